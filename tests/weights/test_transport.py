"""The trainer's side of the shared-memory transport, against a client that reads the files as an engine would."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from dapo_megatron.weights.transport import (  # noqa: E402
    ParamMeta,
    SharedMemoryUpdateInfo,
    WeightSyncError,
    check_manifest,
    checksum,
    plan_chunks,
    trainer_engine,
)

NAMES = [
    "model.embed_tokens.weight",
    *(f"model.layers.{i}.{name}" for i in range(3) for name in ("self_attn.q_proj.weight", "mlp.experts.11.w1.weight")),
    "model.norm.weight",
    "lm_head.weight",
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def layer_of(name: str) -> str:
    return ".".join(name.split(".")[:3]) if "layers" in name else name


@st.composite
def manifests(draw: st.DrawFn) -> list[ParamMeta]:
    shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)
    return [ParamMeta(name, draw(st.sampled_from(DTYPES)), draw(shapes)) for name in NAMES]


def size_bytes(meta: ParamMeta) -> int:
    return torch.empty(meta.shape, dtype=meta.dtype).nbytes


@given(manifests(), st.integers(1, 4000))
def test_a_plan_holds_every_tensor_once_and_keeps_layers_together(manifest: list[ParamMeta], buffer_bytes: int) -> None:
    chunks = plan_chunks(manifest, buffer_bytes)
    slots = [slot for chunk in chunks for slot in chunk]
    assert [(slot.name, slot.dtype, slot.shape) for slot in slots] == [(m.name, m.dtype, m.shape) for m in manifest]
    for chunk in chunks:
        end = 0
        for slot in chunk:
            assert slot.offset_bytes % 64 == 0 and slot.offset_bytes >= end
            end = slot.offset_bytes + slot.size_bytes
        assert end <= buffer_bytes or len({layer_of(slot.name) for slot in chunk}) == 1
    homes: dict[str, set[int]] = {}
    for number, chunk in enumerate(chunks):
        for slot in chunk:
            homes.setdefault(layer_of(slot.name), set()).add(number)
    assert all(len(numbers) == 1 for numbers in homes.values())


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 1000))
def test_checksum_is_the_crc_of_the_bytes(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    assert checksum(tensor) == zlib.crc32(tensor.view(torch.int16 if dtype.itemsize == 2 else dtype).numpy().tobytes())
    if tensor.ndim >= 2:
        assert checksum(tensor.transpose(0, 1)) == checksum(tensor.transpose(0, 1).contiguous())


class Source:
    """A WeightSource over a list of pairs; counts the pairs that were drawn."""

    def __init__(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        self.pairs = pairs
        self.drawn = 0

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.pairs]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in self.pairs:
            self.drawn += 1
            yield pair


class RecordingClient:
    """Reads each chunk as it comes; `fail_at` names the call that raises."""

    def __init__(self, fail_at: str | None = None) -> None:
        self.fail_at = fail_at
        self.calls: list[str] = []
        self.received: dict[str, torch.Tensor] = {}
        self.versions: list[str | None] = []
        self.manifest: list[Any] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fail_at:
            raise ConnectionError(f"the engine died in {name}")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init")
        self.manifest = init_info["manifest"]

    def start_weight_update(self) -> None:
        self._call("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        info = SharedMemoryUpdateInfo(**update_info)
        buffer = torch.from_file(info.path, shared=False, size=info.size_bytes, dtype=torch.uint8)
        assert os.stat(info.path).st_mode & 0o777 == 0o600
        for i, slot in enumerate(info.slots()):
            self.received[slot.name] = slot.view(buffer).clone()
            assert info.checksums is None or info.checksums[i] == checksum(self.received[slot.name])
        self._call("update")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish")
        self.versions.append(weight_version)


def pairs() -> list[tuple[str, torch.Tensor]]:
    """Mixed dtypes, an empty tensor, a scalar, and one that is not contiguous."""
    tensors: list[torch.Tensor] = [torch.randn(5, 3 + i).to(DTYPES[i % 3]) for i in range(len(NAMES))]
    tensors[2] = torch.randn(4, 6).T
    tensors[3] = torch.empty(0, 4)
    tensors[4] = torch.tensor(2.5)
    return list(zip(NAMES, tensors, strict=True))


def files() -> list[Path]:
    return list(Path("/dev/shm").glob(f"dapo_megatron_{os.getpid()}_*"))


@pytest.mark.parametrize("buffer_bytes", [1, 300, 10**6])
@pytest.mark.parametrize("checksums", [False, True])
def test_every_byte_arrives_and_no_file_stays(buffer_bytes: int, checksums: bool) -> None:
    source, client = Source(pairs()), RecordingClient()
    transfer = trainer_engine(source, client, rank=0, buffer_bytes=buffer_bytes, checksums=checksums)  # type: ignore[arg-type]
    assert client.manifest == [[name, list(tensor.shape)] for name, tensor in source.pairs]
    for version in (1, 2):
        source.pairs = [(name, tensor + 1) for name, tensor in source.pairs]
        transfer.send_weights(version)
        assert list(client.received) == NAMES
        for name, tensor in source.pairs:
            assert torch.equal(client.received[name], tensor) and client.received[name].dtype == tensor.dtype
    assert client.versions == ["1", "2"]
    assert not files()


def test_ranks_beyond_the_first_iterate_and_say_nothing() -> None:
    source, client = Source(pairs()), RecordingClient()
    trainer_engine(source, client, rank=1, buffer_bytes=1).send_weights(1)  # type: ignore[arg-type]
    assert source.drawn == len(NAMES)
    assert client.calls == []


@pytest.mark.parametrize("call", ["start", "update", "finish"])
def test_after_a_failure_the_source_is_walked_to_its_end_and_no_file_stays(call: str) -> None:
    """Else the collectives of the other ranks would wait for ever."""
    source, client = Source(pairs()), RecordingClient(fail_at=call)
    with pytest.raises(ConnectionError, match=f"died in {call}"):
        trainer_engine(source, client, rank=0, buffer_bytes=1).send_weights(1)  # type: ignore[arg-type]
    assert source.drawn == len(NAMES)
    assert not files()
    assert client.versions == []


def test_a_source_that_raises_leaves_no_file() -> None:
    class Broken(Source):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from self.pairs[:3]
            raise OSError("gather failed")

    client = RecordingClient()
    with pytest.raises(OSError, match="gather failed"):
        trainer_engine(Broken(pairs()), client, rank=0, buffer_bytes=10**6).send_weights(1)  # type: ignore[arg-type]
    assert not files()
    assert "finish" not in client.calls


def test_no_room_is_an_error_and_not_a_crash() -> None:
    class Huge(Source):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta("w", torch.uint8, (2**45,))]

    with pytest.raises(OSError, match="no room for a weight buffer of 35184372088832 bytes"):
        trainer_engine(Huge([]), RecordingClient(), rank=0, buffer_bytes=1).send_weights(1)  # type: ignore[arg-type]
    assert not files()


def test_metadata_that_lies_is_an_error() -> None:
    class Lying(Source):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(meta.name, torch.float64, meta.shape) for meta in super().metadata()]

    with pytest.raises(WeightSyncError, match=r"embed_tokens.weight: expected \(5, 3\) torch.float64"):
        trainer_engine(Lying(pairs()), RecordingClient(), rank=0, buffer_bytes=1).send_weights(1)  # type: ignore[arg-type]


def test_a_manifest_must_be_the_checkpoints() -> None:
    checkpoint = {"a.weight": (2, 3), "lm_head.weight": (5, 2), "layers.0.rotary_emb.inv_freq": (4,)}
    check_manifest({"a.weight": (2, 3), "lm_head.weight": (5, 2)}, checkpoint, tied_embeddings=False)
    check_manifest({"a.weight": (2, 3)}, checkpoint, tied_embeddings=True)
    check_manifest(checkpoint, {"a.weight": (2, 3)}, tied_embeddings=True)
    with pytest.raises(ValueError, match="1 missing: lm_head.weight"):
        check_manifest({"a.weight": (2, 3)}, checkpoint, tied_embeddings=False)
    with pytest.raises(ValueError, match=r"1 surplus: b; 1 misshapen: a.weight: expected \(2, 3\), given \(3, 2\)"):
        check_manifest({"a.weight": (3, 2), "b": (1,), "lm_head.weight": (5, 2)}, checkpoint, tied_embeddings=False)
