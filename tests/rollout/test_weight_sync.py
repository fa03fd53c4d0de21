"""Weights through the transport into real engines: exact afterwards, and refused when anything is amiss."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dapo_megatron.config.schema import SamplingConfig, WeightsConfig
from tests.rollout.conftest import MAX_PROMPT_TOKENS, Policy, prompt_of, randomize

pytest.importorskip("vllm")

from dapo_megatron.weights.transport import (  # noqa: E402
    ParamMeta,
    WeightSyncError,
    WeightTransfer,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
    trainer_engine,
)

ONE_LAYER_BYTES = 200_000


class ProcessClient:
    """vLLM's weight-sync client over an EngineProcess; `tamper` may change each chunk's description.

    Whatever the engine has answered for is scribbled over: it must not look at it again.
    """

    def __init__(self, policy: Policy) -> None:
        self._process = policy.process
        self.chunks = 0
        self.buffers: list[torch.Tensor] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for path, size_bytes in init_info["buffers"]:
            self.buffers.append(torch.from_file(path, shared=True, size=size_bytes, dtype=torch.uint8))
        self._process.call("init_weight_transfer_engine", WeightTransferInitRequest(init_info))

    def start_weight_update(self) -> None:
        self._process.call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.chunks += 1
        info = self.tamper(self, update_info)
        self._process.call("update_weights", WeightTransferUpdateRequest(info))
        self.buffers[info["buffer"]].fill_(0xFF)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._process.call("finish_weight_update")
        if weight_version is not None:
            self._process.call("update_weight_version", weight_version)

    @staticmethod
    def tamper(client: ProcessClient, update_info: dict[str, Any]) -> dict[str, Any]:
        return update_info


class ModelSource:
    """A model's tensors, as its checkpoint names them, as a WeightSource; the pairs that it yields can be changed."""

    def __init__(self, policy: Policy) -> None:
        with TemporaryDirectory() as folder:
            policy.model.save_pretrained(folder)
            self._pairs = list(load_file(Path(folder, "model.safetensors")).items())

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._pairs]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._pairs)


def connect(
    source: Any, client: ProcessClient, buffer_bytes: int = 10**9, quantization: str | None = None
) -> WeightTransfer:
    settings = WeightsConfig(buffer_bytes=buffer_bytes, verify="checksums")
    return trainer_engine(source, [client], settings, rank=0, quantization=quantization)


def sync(
    policy: Policy, version: int, buffer_bytes: int = ONE_LAYER_BYTES, quantization: str | None = None
) -> ProcessClient:
    client = ProcessClient(policy)
    connect(ModelSource(policy), client, buffer_bytes, quantization).send_weights(version)
    return client


def assert_engine_has_the_weights(policy: Policy, version: int) -> None:
    for length in (3, 150):
        (greedy,) = policy.generate(prompt_of(length), [0], temperature=0.0)
        assert greedy.token_ids == policy.log_probs(prompt_of(length), greedy).argmax(-1).tolist()
        for sample in [greedy, *policy.generate(prompt_of(length), [1, 2])]:
            assert policy.log_prob_error(prompt_of(length), sample) <= 1e-5
            assert sample.policy_version == version


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3_moe"])
@pytest.mark.parametrize("buffer_bytes", [1, ONE_LAYER_BYTES, 10**9])
def test_after_a_sync_the_engine_equals_the_model(policies: dict[str, Policy], family: str, buffer_bytes: int) -> None:
    """Untied, tied, mixture of experts; the vocabulary is one that vLLM pads, whose rows it holds back to the end."""
    policy = policies[family]
    randomize(policy.model)
    client = sync(policy, buffer_bytes, buffer_bytes)
    assert (client.chunks == 1) == (buffer_bytes == 10**9)
    assert_engine_has_the_weights(policy, buffer_bytes)


def test_the_prefix_cache_of_the_old_weights_is_gone(policy: Policy) -> None:
    """The prompt fills two blocks of the cache; sampled from the old ones, log-probs would be far off."""
    prompt = prompt_of(MAX_PROMPT_TOKENS, start=3)
    (before,) = policy.generate(prompt, [7])
    (again,) = policy.generate(prompt, [7])
    randomize(policy.model)
    assert policy.log_prob_error(prompt, again) > 0.1
    sync(policy, 3)
    (after,) = policy.generate(prompt, [7])
    assert before == again != after
    assert policy.log_prob_error(prompt, after) <= 1e-5


def dropped(pairs: list[Any]) -> list[Any]:
    return pairs[:4] + pairs[5:]


def duplicated(pairs: list[Any]) -> list[Any]:
    return pairs[:5] + pairs[4:]


def misshapen(pairs: list[Any]) -> list[Any]:
    return [*pairs[:4], (pairs[4][0], pairs[4][1][:-1]), *pairs[5:]]


def surplus(pairs: list[Any]) -> list[Any]:
    return [*pairs, ("model.extra.weight", torch.zeros(3))]


@pytest.mark.parametrize("fault", [dropped, duplicated, misshapen, surplus])
def test_a_source_that_breaks_its_word_stops_the_engine_until_a_full_sync(policy: Policy, fault: Any) -> None:
    randomize(policy.model)

    class FaultySource(ModelSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(fault(list(super().__iter__())))

    faulty = connect(FaultySource(policy), ProcessClient(policy), buffer_bytes=1)
    with pytest.raises(WeightSyncError, match="weight source yields"):
        faulty.send_weights(5)
    with pytest.raises(RuntimeError, match="no generation before a full weight sync"):
        policy.generate(prompt_of(3), [1])
    sync(policy, 6)
    assert_engine_has_the_weights(policy, 6)


def without_a_tensor(client: ProcessClient, info: dict[str, Any]) -> dict[str, Any]:
    """Leaves a fused layer incomplete, which the next sync must not count on."""
    at = info["names"].index("model.layers.1.self_attn.q_proj.weight")
    columns = ("names", "dtype_names", "shapes", "offsets_bytes", "checksums")
    return info | {column: info[column][:at] + info[column][at + 1 :] for column in columns}


def renamed(client: ProcessClient, info: dict[str, Any]) -> dict[str, Any]:
    return info | {"names": ["model.extra.weight", *info["names"][1:]]}


def twice(client: ProcessClient, info: dict[str, Any]) -> dict[str, Any]:
    return info | {"names": [info["names"][1], *info["names"][1:]], "shapes": [info["shapes"][1], *info["shapes"][1:]]}


def transposed(client: ProcessClient, info: dict[str, Any]) -> dict[str, Any]:
    at = next(i for i, name in enumerate(info["names"]) if name.endswith("up_proj.weight"))
    return info | {"shapes": [shape[::-1] if i == at else shape for i, shape in enumerate(info["shapes"])]}


def corrupted(client: ProcessClient, info: dict[str, Any]) -> dict[str, Any]:
    client.buffers[info["buffer"]][info["offsets_bytes"][3]] ^= 1
    return info


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (without_a_tensor, "ended without 1 tensors: model.layers.1.self_attn.q_proj.weight"),
        (renamed, "model.extra.weight is not in the manifest"),
        (twice, "was sent twice"),
        (transposed, r"up_proj.weight: expected \(72, 128\), received \(128, 72\)"),
        (corrupted, "the bytes received are not those sent"),
    ],
)
def test_the_engine_checks_the_manifest_itself(untied: Policy, tamper: Any, message: str) -> None:
    client = ProcessClient(untied)
    client.tamper = tamper  # type: ignore[method-assign]
    randomize(untied.model)
    with pytest.raises(WeightSyncError, match=message):
        connect(ModelSource(untied), client).send_weights(8)
    with pytest.raises(RuntimeError, match="half-updated"):
        untied.generate(prompt_of(3), [1])
    sync(untied, 9)
    assert_engine_has_the_weights(untied, 9)


def test_a_manifest_of_another_model_is_refused_and_changes_nothing(untied: Policy) -> None:
    class OtherSource(ModelSource):
        def metadata(self) -> list[ParamMeta]:
            metas = [meta for meta in super().metadata() if meta.name != "lm_head.weight"]
            return [ParamMeta(metas[0].name, metas[0].dtype, (7, 7)), *metas[1:], ParamMeta("x", torch.float32, (1,))]

    sync(untied, 10)
    with pytest.raises(ValueError, match="1 missing: lm_head.weight; 1 surplus: x; 1 misshapen: model.embed_tokens"):
        connect(OtherSource(untied), ProcessClient(untied))
    assert_engine_has_the_weights(untied, 10)


def test_no_sync_while_samples_are_under_way_and_no_files_stay(untied: Policy) -> None:
    pending = untied.process.submit("generate", prompt_of(100), range(64), SamplingConfig())
    with pytest.raises(RuntimeError, match="samples are being generated"):
        sync(untied, 11)
    assert len(pending.result(60)) == 64
    sync(untied, 11)
    assert not list(Path("/dev/shm").glob(f"dapo_megatron_{os.getpid()}_*"))
