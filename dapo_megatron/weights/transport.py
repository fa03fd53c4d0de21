"""Weights through host shared memory: a backend of vLLM's weight-transfer protocol, both sides.

The trainer side walks its `WeightSource`, fills one bounded shared-memory file with whole layers, has every engine
load it, removes it, and goes on. The engine side maps the file and loads it through vLLM's layerwise reload.

Guaranteed: a sync either ends with every tensor of the manifest loaded exactly once with the right shape, or raises
on both sides; no shared-memory file outlives its chunk; a file is never written again once an engine has mapped it
(vLLM keeps references into it until a layer is complete). Importing this module registers the backend.
"""

from __future__ import annotations

import os
import tempfile
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient as RayVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from dapo_megatron.weights.hf_folder import HFFolder

__all__ = [
    "ParamMeta",
    "RayVLLMWeightSyncClient",
    "SharedMemoryTrainerEngine",
    "WeightSource",
    "WeightSyncError",
    "WeightTransferInitRequest",
    "WeightTransferUpdateRequest",
    "check_manifest",
    "checksum",
    "plan_chunks",
    "trainer_engine",
]

BACKEND = "shared_memory"
ALIGNMENT_BYTES = 64
NAMES_IN_ERROR = 8


class WeightSyncError(RuntimeError):
    """A sync did not deliver exactly the manifest; the engine holds a mixture of two policies until a full sync."""


@dataclass(frozen=True)
class Slot:
    """Place of one tensor in a shared-memory chunk."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor itself."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor inside `buffer` (uint8), without a copy."""
        return buffer[self.offset_bytes : self.offset_bytes + self.size_bytes].view(self.dtype).view(self.shape)


def _layer_of(name: str) -> str | None:
    """`model.layers.3` of `model.layers.3.mlp.up_proj.weight`; None outside the layers."""
    parts = name.split(".")
    index = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return None if index is None else ".".join(parts[: index + 1])


def plan_chunks(metadata: Sequence[ParamMeta], buffer_bytes: int) -> list[list[Slot]]:
    """Cut the manifest, in its order, into chunks of whole layers that fit into `buffer_bytes`.

    Invariants: every tensor has exactly one slot; consecutive tensors of a layer share a chunk, so that fused weights
    (q, k, v) arrive together; a chunk exceeds `buffer_bytes` only if it is a single layer, or a single tensor outside
    the layers; slots do not overlap and start at multiples of 64 bytes.
    """
    groups: list[list[ParamMeta]] = []
    for i, meta in enumerate(metadata):
        layer = _layer_of(meta.name)
        if i and layer is not None and layer == _layer_of(metadata[i - 1].name):
            groups[-1].append(meta)
        else:
            groups.append([meta])
    chunks: list[list[Slot]] = []
    end = 0
    for group in groups:
        size = sum(_padded(torch.Size(meta.shape).numel() * meta.dtype.itemsize) for meta in group)
        if not chunks or end + size > buffer_bytes:
            chunks.append([])
            end = 0
        for meta in group:
            slot = Slot(meta.name, meta.dtype, tuple(meta.shape), end)
            chunks[-1].append(slot)
            end += _padded(slot.size_bytes)
    return chunks


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes, in row-major order."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy())


@contextmanager
def _shared_memory_file(size_bytes: int) -> Iterator[Path]:
    """A new private file in shared memory that is removed on exit.

    Raises:
        OSError: shared memory has no room; allocated up front, because a later write would kill the process instead.
    """
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    path = Path(folder, f"dapo_megatron_{os.getpid()}_{uuid.uuid4().hex}")
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        try:
            os.posix_fallocate(descriptor, 0, max(1, size_bytes))
        except OSError as error:
            raise OSError(error.errno, f"no room for a weight buffer of {size_bytes} bytes in {folder}") from error
        finally:
            os.close(descriptor)
        yield path
    finally:
        path.unlink(missing_ok=True)


# ---- the trainer's side ----


@dataclass
class SharedMemoryTrainerInitInfo(TrainerInitInfo):
    """`buffer_bytes`: see `plan_chunks`. `checksums`: compare a CRC-32 of every tensor on both sides."""

    backend: ClassVar[str] = BACKEND
    buffer_bytes: int = 256 * 1024 * 1024
    checksums: bool = False


class SharedMemoryTrainerEngine(TrainerWeightTransferEngine[SharedMemoryTrainerInitInfo]):
    """Sends a `WeightSource`. Every rank constructs one and calls `send_weights`; only rank 0 writes and sends."""

    init_info_cls = SharedMemoryTrainerInitInfo

    def __init__(
        self, init_info: SharedMemoryTrainerInitInfo, client: VLLMWeightSyncClient, source: WeightSource
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.checksums = init_info.checksums
        self.metadata = source.metadata()
        self.chunks = plan_chunks(self.metadata, init_info.buffer_bytes)

    @classmethod
    def trainer_init(
        cls,
        init_info: SharedMemoryTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Plan the transfer and give the engines the manifest; they refuse one that does not fit their model."""
        if source is None:
            raise ValueError(f"the {BACKEND} transport needs a WeightSource")
        engine = cls(init_info, client, source)
        if engine.is_sender:
            manifest = [[meta.name, list(meta.shape)] for meta in engine.metadata]
            client.init_weight_transfer_engine({"manifest": manifest})
        return engine

    def send_weights(self, version: int | None = None) -> None:
        """Push all weights into the engines; `version` becomes their policy version.

        Raises:
            WeightSyncError: the source did not yield exactly what its metadata says. An error of an engine is raised
                as it comes from the client. The source is walked to its end first, so that the collectives of the
                other ranks stay aligned.
        """
        assert self.source is not None
        tensors = iter(self.source)
        if not self.is_sender:
            for _ in tensors:
                continue
            return
        try:
            self.client.start_weight_update()
            for chunk in self.chunks:
                self._send_chunk(chunk, tensors)
            surplus = next(tensors, None)
            if surplus is not None:
                raise WeightSyncError(f"the weight source yields {surplus[0]!r} beyond its metadata")
        finally:
            for _ in tensors:
                continue
        self.client.finish_weight_update(None if version is None else str(version))

    def _send_chunk(self, chunk: list[Slot], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        size_bytes = chunk[-1].offset_bytes + _padded(chunk[-1].size_bytes)
        checksums: list[int] = []
        with _shared_memory_file(size_bytes) as path:
            buffer = torch.from_file(str(path), shared=True, size=size_bytes, dtype=torch.uint8)
            for slot in chunk:
                name, tensor = next(tensors, ("nothing more", None))
                if name != slot.name:
                    raise WeightSyncError(f"the weight source yields {name!r} where its metadata has {slot.name!r}")
                if tensor is None or tuple(tensor.shape) != slot.shape or tensor.dtype != slot.dtype:
                    given = None if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
                    raise WeightSyncError(
                        f"{name}: expected {slot.shape} {slot.dtype}, the weight source yields {given}"
                    )
                slot.view(buffer).copy_(tensor.detach())
                if self.checksums:
                    checksums.append(checksum(tensor))
            self.client.update_weights(
                {
                    "path": str(path),
                    "size_bytes": size_bytes,
                    "names": [slot.name for slot in chunk],
                    "dtype_names": [str(slot.dtype).removeprefix("torch.") for slot in chunk],
                    "shapes": [list(slot.shape) for slot in chunk],
                    "offsets_bytes": [slot.offset_bytes for slot in chunk],
                    "checksums": checksums or None,
                }
            )


# ---- the engine's side ----


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """`manifest`: [name, shape] of every tensor that each sync will bring, under HF names."""

    manifest: list[tuple[str, list[int]]]


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """One chunk: a shared-memory file and what lies where in it."""

    path: str
    size_bytes: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets_bytes: list[int]
    checksums: list[int] | None = None

    def slots(self) -> list[Slot]:
        """The chunk's slots, in the order of `names`."""
        columns = zip(self.names, self.dtype_names, self.shapes, self.offsets_bytes, strict=True)
        return [Slot(name, getattr(torch, dtype), tuple(shape), offset) for name, dtype, shape, offset in columns]


class SharedMemoryWeightEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Loads chunks into a worker's model; on the CPU with the two steps that vLLM's layerwise reload lacks there."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    expected: dict[str, tuple[int, ...]] | None = None

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Take the trainer's manifest.

        Raises:
            ValueError: it is not what this engine's model folder holds.
        """
        manifest = {name: tuple(shape) for name, shape in init_info.manifest}
        if len(manifest) != len(init_info.manifest):
            raise ValueError("the weight source's metadata names a tensor twice")
        tied = bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))
        folder = HFFolder(self.model_config.model)
        check_manifest(manifest, {name: folder.shape(name) for name in folder.names()}, tied)
        self.expected = manifest

    def start_weight_update(self) -> None:
        """Open a sync; what an abandoned one left behind is dropped."""
        from vllm.model_executor.model_loader.reload import layerwise

        if self.expected is None:
            raise WeightSyncError("start_weight_update before init_weight_transfer_engine")
        self.received: set[str] = set()
        for module in self.model.modules():
            info = layerwise.get_layerwise_info(module)
            if info.can_load():  # a layer that an abandoned sync left incomplete
                layerwise._place_kernel_tensors(module, info)
                info.reset()
            method: Any = getattr(module, "quant_method", None)
            if self.device.type == "cpu" and getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None  # else the experts are not packed again
        layerwise.initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Load one chunk.

        Raises:
            WeightSyncError: a tensor is unknown, comes twice, has the wrong shape, or its bytes changed on the way.
        """
        assert self.expected is not None
        slots = update_info.slots()
        for slot in slots:
            if slot.name not in self.expected:
                raise WeightSyncError(f"{slot.name} is not in the manifest")
            if slot.name in self.received:
                raise WeightSyncError(f"{slot.name} was sent twice in one sync")
            if slot.shape != self.expected[slot.name]:
                raise WeightSyncError(f"{slot.name}: expected {self.expected[slot.name]}, received {slot.shape}")
            self.received.add(slot.name)
        # A private mapping: what a loader might write stays out of the file.
        buffer = torch.from_file(update_info.path, shared=False, size=update_info.size_bytes, dtype=torch.uint8)
        weights = [(slot.name, slot.view(buffer)) for slot in slots]
        if update_info.checksums is not None:
            for (name, weight), sent in zip(weights, update_info.checksums, strict=True):
                if checksum(weight) != sent:
                    raise WeightSyncError(f"{name}: the bytes received are not those sent (CRC-32 differs)")
        if self.device.type != "cpu":
            weights = [(name, weight.to(self.device)) for name, weight in weights]
        self.model.load_weights(iter(weights))

    def finish_weight_update(self) -> None:
        """Close a sync.

        Raises:
            WeightSyncError: some tensor of the manifest never came.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        assert self.expected is not None
        missing = [name for name in self.expected if name not in self.received]
        if missing:
            raise WeightSyncError(f"the sync ended without {len(missing)} tensors: {_some(missing)}")
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            # A tied head keeps its packed copy of the old embedding unless it is packed again.
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing is held between chunks."""


def check_manifest(
    manifest: dict[str, tuple[int, ...]], checkpoint: dict[str, tuple[int, ...]], tied_embeddings: bool
) -> None:
    """Refuse a manifest that is not the checkpoint's: names and shapes.

    `lm_head.weight` may be absent on either side when the embeddings are tied; rotary tables are no weights.

    Raises:
        ValueError: naming what is missing, surplus or misshapen.
    """

    def optional(name: str) -> bool:
        return (tied_embeddings and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq")

    missing = [name for name in checkpoint if name not in manifest and not optional(name)]
    surplus = [name for name in manifest if name not in checkpoint and not optional(name)]
    misshapen = [
        f"{name}: expected {checkpoint[name]}, given {shape}"
        for name, shape in manifest.items()
        if name in checkpoint and checkpoint[name] != shape
    ]
    problems = [
        f"{len(names)} {what}: {_some(names)}"
        for what, names in (("missing", missing), ("surplus", surplus), ("misshapen", misshapen))
        if names
    ]
    if problems:
        raise ValueError("the trainer's weights do not fit the engine's model: " + "; ".join(problems))


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:NAMES_IN_ERROR]) + (", ..." if len(names) > NAMES_IN_ERROR else "")


def trainer_engine(
    source: WeightSource, client: VLLMWeightSyncClient, *, rank: int, buffer_bytes: int, checksums: bool = False
) -> SharedMemoryTrainerEngine:
    """The trainer's end of the shared-memory transport, ready for `send_weights(version)`. Called on every rank."""
    info = SharedMemoryTrainerInitInfo(buffer_bytes=buffer_bytes, checksums=checksums, rank=rank)
    engine: Any = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    return engine


WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryWeightEngine)
WeightTransferTrainerFactory.register_engine(BACKEND, SharedMemoryTrainerEngine)
