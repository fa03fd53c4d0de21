"""Engines of several processes, of latent attention and in FP8: exact after a sync, or as one freshly loaded."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("vllm")

from dapo_megatron.weights.block_fp8 import is_quantised, quantise_blocks  # noqa: E402
from dapo_megatron.weights.transport import WeightSyncError  # noqa: E402
from tests.rollout.conftest import Policy, engine_config, make_folder, prompt_of, randomize  # noqa: E402
from tests.rollout.engine_process import EngineProcess  # noqa: E402
from tests.rollout.test_weight_sync import (  # noqa: E402
    ModelSource,
    ProcessClient,
    assert_engine_has_the_weights,
    connect,
    corrupted,
    sync,
)

BLOCKS = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384}
"""Whole blocks of 128 x 128 in every part of a fused weight, as vLLM wants them."""

KINDS: dict[str, tuple[str, str | None, dict[str, int]]] = {
    "two processes": ("mixtral", None, {}),
    "latent attention": ("deepseek_v3", None, {}),
    "fp8_per_channel": ("llama", "fp8_per_channel", {}),
    "fp8_block": ("qwen2", "fp8_block", BLOCKS),
}
FP8 = {"fp8_per_channel": 0.4, "fp8_block": 0.2}
"""The largest difference of log-probs from those of a model in bfloat16: of the plain weights, whose products the first
rounds to FP8 on both sides; of `dequantised` weights."""


def plain_block_kernel() -> None:
    """vLLM's CPU kernel for block-wise FP8 needs AMX: in its place, values times scales and a plain product."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel

    def apply_weights(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        scales = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return torch.nn.functional.linear(x, (layer.weight.float() * scales).to(x.dtype), bias)

    kernel: Any = CPUFp8BlockScaledMMKernel
    kernel.is_supported = classmethod(lambda cls, capability=None: (True, None))
    kernel.process_weights_after_loading = lambda self, layer: None
    kernel.apply_weights = apply_weights


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Policy]]:
    """All of them, started side by side."""
    started = {}
    for kind, (family, quantization, sizes) in KINDS.items():
        config = engine_config()
        config.rollout.tensor = 2 if kind == "two processes" else 1
        config.rollout.quantization = quantization
        dtype = torch.bfloat16 if quantization else torch.float32
        config.precision.rollout_dtype = str(dtype).removeprefix("torch.")
        folder, model = make_folder(tmp_path_factory.mktemp(family), family, dtype, **sizes)
        prepare = plain_block_kernel if quantization == "fp8_block" else None
        started[kind] = Policy(EngineProcess(config, folder, prepare), model)
    try:
        for policy in started.values():
            policy.process.wait_until_started()
        yield started
    finally:
        for policy in started.values():
            policy.process.stop()


@pytest.mark.parametrize("kind", ["two processes", "latent attention"])
def test_after_a_sync_the_engine_equals_the_model(engines: dict[str, Policy], kind: str) -> None:
    for version in (1, 2):
        randomize(engines[kind].model)
        sync(engines[kind], version)
        assert_engine_has_the_weights(engines[kind], version)


def answers(policy: Policy) -> list[tuple[list[int], list[float]]]:
    samples = [policy.generate(prompt_of(n), [0], temperature)[0] for n in (3, 150) for temperature in (0.0, 1.0)]
    return [(sample.token_ids, sample.log_probs) for sample in samples]


def largest_error(policy: Policy, kind: str) -> float:
    model = dequantised(policy.model) if kind == "fp8_block" else policy.model
    served = Policy(policy.process, model)
    samples = [(prompt_of(n), sample) for n in (3, 150) for sample in policy.generate(prompt_of(n), [1, 2])]
    return max(served.log_prob_error(prompt, sample) for prompt, sample in samples)


@torch.no_grad()
def dequantised(model: Any) -> Any:
    """A copy whose linear weights are what block-wise FP8 leaves of them; all their blocks are whole."""
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        if is_quantised(name, parameter.shape):
            values, scales = quantise_blocks(parameter)
            parameter.copy_(values.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1))
    return model


@pytest.mark.parametrize("kind", FP8)
def test_a_quantised_engine_after_a_sync_is_as_one_freshly_loaded(engines: dict[str, Policy], kind: str) -> None:
    """Loaded with one set of weights, synced to another, synced back."""
    policy, quantization = engines[kind], KINDS[kind][1]
    fresh, first = answers(policy), copy.deepcopy(policy.model.state_dict())
    assert largest_error(policy, kind) <= FP8[kind]
    randomize(policy.model)
    assert largest_error(policy, kind) > 2 * FP8[kind]
    sync(policy, 1, quantization=quantization)
    assert largest_error(policy, kind) <= FP8[kind]
    assert answers(policy) != fresh
    policy.model.load_state_dict(first)
    sync(policy, 2, quantization=quantization)
    assert answers(policy) == fresh


def test_what_workers_refuse_is_an_error_and_the_next_sync_is_right(engines: dict[str, Policy]) -> None:
    policy = engines["two processes"]
    client = ProcessClient(policy)
    client.tamper = corrupted  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="the bytes received are not those sent"):
        connect(ModelSource(policy), client).send_weights(3)
    with pytest.raises(RuntimeError, match="half-updated"):
        policy.generate(prompt_of(3), [1])
    sync(policy, 4)
    assert_engine_has_the_weights(policy, 4)


@pytest.mark.parametrize("kind", ["two processes", "latent attention"])
def test_a_process_killed_mid_sync_is_an_error_at_once(engines: dict[str, Policy], kind: str) -> None:
    """One of two workers, or the whole engine."""
    policy = engines[kind]
    client = ProcessClient(policy)

    def kill(client: ProcessClient, info: dict[str, Any]) -> dict[str, Any]:
        if client.chunks == 2:
            engine = psutil.Process(policy.process.pid)
            [engine, *engine.children(recursive=True)][-1].kill()
        return info

    client.tamper = kill  # type: ignore[method-assign]
    started = time.monotonic()
    with pytest.raises((RuntimeError, OSError)) as caught:
        connect(ModelSource(policy), client, buffer_bytes=1).send_weights(5)
    assert caught.value.__notes__ == ["update_weights of rollout engine 0"]
    assert time.monotonic() - started < 30
    with pytest.raises((RuntimeError, OSError), match="half-updated|process has ended|Broken pipe"):
        policy.generate(prompt_of(3), [1])
