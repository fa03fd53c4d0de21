"""The trainer's side of the shared-memory transport, against a client that reads the files as an engine would."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from dapo_megatron.config.schema import WeightsConfig  # noqa: E402
from dapo_megatron.weights.transport import ParamMeta, WeightSyncError, WeightTransfer, shared_memory, trainer_engine  # noqa: E402
from dapo_megatron.weights.transport.chunks import check_manifest, checksum, plan_chunks  # noqa: E402
from dapo_megatron.weights.transport.engine import SharedMemoryUpdateInfo  # noqa: E402

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
    """Reads each chunk as it comes, `delay_s` late; `fail_at` names the call that raises."""

    def __init__(self, fail_at: str | None = None, delay_s: float = 0.0) -> None:
        self.fail_at = fail_at
        self.delay_s = delay_s
        self.calls: list[str] = []
        self.received: dict[str, torch.Tensor] = {}
        self.hashed = 0
        self.versions: list[str | None] = []
        self.manifest: list[Any] = []
        self.buffers: list[Any] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fail_at:
            raise ConnectionError(f"the engine died in {name}")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init")
        self.manifest = init_info["manifest"]
        for path, size_bytes in init_info["buffers"]:
            assert os.stat(path).st_mode & 0o777 == 0o600 and os.stat(path).st_size == size_bytes
            self.buffers.append(torch.from_file(path, shared=True, size=size_bytes, dtype=torch.uint8))

    def start_weight_update(self) -> None:
        self._call("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        info = SharedMemoryUpdateInfo(**update_info)
        time.sleep(self.delay_s)
        for i, slot in enumerate(info.slots()):
            self.received[slot.name] = slot.view(self.buffers[info.buffer]).clone()
            if info.checksums is not None:
                assert info.checksums[i] == checksum(self.received[slot.name])
                self.hashed += 1
        self._call("update")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish")
        self.versions.append(weight_version)


def transfer(source: Any, *clients: Any, rank: int = 0, **settings: Any) -> WeightTransfer:
    return trainer_engine(source, clients, WeightsConfig(**settings), rank=rank)


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
@pytest.mark.parametrize("verify", ["manifest", "first", "checksums"])
def test_every_byte_arrives_and_no_file_stays(buffer_bytes: int, verify: str) -> None:
    source, client = Source(pairs()), RecordingClient()
    sending = transfer(source, client, buffer_bytes=buffer_bytes, verify=verify)
    assert not files(), "a process that is killed now would leave them behind"
    assert client.manifest == [[name, list(tensor.shape)] for name, tensor in source.pairs]
    for version in (1, 2):
        source.pairs = [(name, tensor + 1) for name, tensor in source.pairs]
        sending.send_weights(version)
        assert list(client.received) == NAMES
        for name, tensor in source.pairs:
            assert torch.equal(client.received[name], tensor) and client.received[name].dtype == tensor.dtype
    assert client.versions == ["1", "2"]
    assert client.hashed == {"manifest": 0, "first": 1, "checksums": 2}[verify] * len(NAMES)


def test_a_slow_engine_beside_a_fast_one_gets_every_byte() -> None:
    source, slow, fast = Source(pairs()), RecordingClient(delay_s=0.05), RecordingClient()
    sending = transfer(source, slow, fast, buffer_bytes=1)
    for version in (1, 2):
        source.pairs = [(name, tensor + 1) for name, tensor in source.pairs]
        sending.send_weights(version)
        for client in (slow, fast):
            assert all(torch.equal(client.received[name], tensor) for name, tensor in source.pairs)


def test_one_buffer_is_filled_while_the_other_is_loaded_and_no_third() -> None:
    source = Source([(f"w{i}", torch.full((9,), float(i))) for i in range(6)])
    drawn: list[int] = []

    class Loading(RecordingClient):
        def update_weights(self, update_info: dict[str, Any]) -> None:
            number = len(drawn)
            for _ in range(500):  # the next one is filled meanwhile, ...
                if source.drawn >= min(number + 2, 6):
                    break
                time.sleep(0.01)
            time.sleep(0.02)  # ... but not the one after
            drawn.append(source.drawn)
            super().update_weights(update_info)

    client = Loading()
    transfer(source, client, buffer_bytes=1).send_weights(1)
    assert drawn == [2, 3, 4, 5, 6, 6]
    assert all(torch.equal(client.received[name], tensor) for name, tensor in source.pairs)


@pytest.mark.parametrize("call", ["start_weight_update", "update_weights", "finish_weight_update"])
def test_an_engine_that_falls_silent_is_an_error_at_the_deadline(call: str) -> None:
    silent, source = RecordingClient(), Source(pairs())
    never = threading.Event()
    setattr(silent, call, lambda *_: never.wait(60))
    sending = transfer(source, RecordingClient(), silent, buffer_bytes=1, deadline_s=0.2)
    with pytest.raises(WeightSyncError, match=f"rollout engine 1 did not answer {call} within 0.2 s"):
        sending.send_weights(1)
    assert source.drawn == len(NAMES)
    never.set()


def test_ranks_beyond_the_first_iterate_and_say_nothing() -> None:
    source, client = Source(pairs()), RecordingClient()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory._Ranks, "from_sender", lambda self, value: [])
        transfer(source, client, rank=1, buffer_bytes=1).send_weights(1)
    assert source.drawn == len(NAMES)
    assert client.calls == []


@pytest.mark.parametrize("call", ["start", "update", "finish"])
def test_after_a_failure_the_source_is_walked_to_its_end(call: str) -> None:
    """Else the collectives of the other ranks would wait for ever."""
    source, client = Source(pairs()), RecordingClient(fail_at=call)
    with pytest.raises(ConnectionError, match=f"died in {call}"):
        transfer(source, client, buffer_bytes=1).send_weights(1)
    assert source.drawn == len(NAMES)
    assert client.versions == []


def test_an_engine_that_refuses_leaves_no_file() -> None:
    with pytest.raises(ConnectionError, match="died in init"):
        transfer(Source(pairs()), RecordingClient(fail_at="init"))
    assert not files()


def test_a_source_that_raises_never_finishes_a_sync() -> None:
    class Broken(Source):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from self.pairs[:3]
            raise OSError("gather failed")

    client = RecordingClient()
    with pytest.raises(OSError, match="gather failed"):
        transfer(Broken(pairs()), client).send_weights(1)
    assert "finish" not in client.calls


def test_no_room_is_an_error_and_not_a_crash() -> None:
    class Huge(Source):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta("v", torch.uint8, (1,)), ParamMeta("w", torch.uint8, (2**45,))]

    with pytest.raises(OSError, match="no room for a weight buffer of 35184372088832 bytes"):
        transfer(Huge([]), RecordingClient(), buffer_bytes=1)
    assert not files()


def test_metadata_that_lies_is_an_error() -> None:
    class Lying(Source):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(meta.name, torch.float64, meta.shape) for meta in super().metadata()]

    with pytest.raises(WeightSyncError, match=r"embed_tokens.weight: expected \(5, 3\) torch.float64"):
        transfer(Lying(pairs()), RecordingClient(), buffer_bytes=1).send_weights(1)


def test_a_manifest_must_be_the_checkpoints() -> None:
    checkpoint = {"a.weight": (2, 3), "lm_head.weight": (5, 2), "layers.0.rotary_emb.inv_freq": (4,)}

    def untied(name: str) -> bool:
        return name.endswith("inv_freq")

    def tied(name: str) -> bool:
        return untied(name) or name == "lm_head.weight"

    check_manifest({"a.weight": (2, 3), "lm_head.weight": (5, 2)}, checkpoint, untied)
    check_manifest({"a.weight": (2, 3)}, checkpoint, tied)
    check_manifest(checkpoint, {"a.weight": (2, 3)}, tied)
    with pytest.raises(ValueError, match="1 missing: lm_head.weight"):
        check_manifest({"a.weight": (2, 3)}, checkpoint, untied)
    with pytest.raises(ValueError, match=r"1 surplus: b; 1 misshapen: a.weight: expected \(2, 3\), given \(3, 2\)"):
        check_manifest({"a.weight": (3, 2), "b": (1,), "lm_head.weight": (5, 2)}, checkpoint, untied)
