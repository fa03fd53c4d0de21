"""An engine that gives its memory back: what is measured, what it refuses, and what brings it back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.rollout.conftest import Policy, engine_config, make_folder, prompt_of, randomize  # noqa: E402
from tests.rollout.engine_process import EngineProcess  # noqa: E402
from tests.rollout.test_weight_sync import assert_engine_has_the_weights, sync  # noqa: E402

MB = 1024 * 1024
KV_CACHE_BYTES = 48 * MB
WIDE = {"intermediate_size": 4096, "num_hidden_layers": 4}
"""19 MB of weights, of the dense model."""


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def dropper(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    """Engines of sleep level 2 with tied and with untied embeddings, dense and of experts."""
    config = engine_config()
    config.rollout.sleep_level = 2
    config.rollout.kv_cache_bytes = KV_CACHE_BYTES
    sizes = WIDE if request.param == "llama" else {}
    folder, model = make_folder(tmp_path_factory.mktemp("dropper"), request.param, **sizes)
    policy = Policy(EngineProcess(config, folder), model)
    try:
        policy.process.wait_until_started()
        yield policy
    finally:
        policy.process.stop()


def resident_bytes(policy: Policy) -> int:
    pages = Path(f"/proc/{policy.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_resident_memory_falls_and_level_2_needs_a_full_sync(dropper: Policy) -> None:
    call = dropper.process.call
    for version in (1, 2):
        dropper.generate(prompt_of(200, version), range(64))
        before = resident_bytes(dropper)
        freed = call("release")
        fell = before - resident_bytes(dropper)
        weights = sum(p.numel() * p.element_size() for p in dropper.model.parameters())
        assert freed >= 0.8 * (weights + (KV_CACHE_BYTES if version == 1 else 0))
        assert fell == pytest.approx(freed, abs=2 * MB)
        for method, message in [("start_weight_update", "released: no sync"), ("wake_kv_cache", "not without a KV")]:
            with pytest.raises(RuntimeError, match=message):
                call(method)
        call("wake_weights")
        if version == 1:  # the KV cache may come before the weights, and changes nothing about them
            call("wake_kv_cache")
            with pytest.raises(RuntimeError, match="dropped: no generation before a full weight sync"):
                dropper.generate(prompt_of(9), [1])
        randomize(dropper.model)
        sync(dropper, version)
        if version == 2:
            with pytest.raises(RuntimeError, match="without a KV cache: no generation"):
                dropper.generate(prompt_of(9), [1])
            call("wake_kv_cache")
        assert_engine_has_the_weights(dropper, version)
