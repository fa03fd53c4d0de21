"""How a manifest is cut into chunks of whole layers, and what both sides of a sync check."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import ParamMeta

from dapo_megatron.weights.export import layer_of

ALIGNMENT_BYTES = 64
NAMES_IN_ERROR = 8


class WeightSyncError(RuntimeError):
    """A sync did not deliver exactly the manifest; the engine holds a mixture of two policies until a full sync."""


@dataclass(frozen=True)
class Slot:
    """Place of one tensor in a chunk."""

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


def plan_chunks(metadata: Sequence[ParamMeta], buffer_bytes: int) -> list[list[Slot]]:
    """Cut the manifest, in its order, into chunks of whole layers that fit into `buffer_bytes`.

    Invariants: every tensor has exactly one slot; consecutive tensors of a layer share a chunk, so that fused weights
    (q, k, v) arrive together; a chunk exceeds `buffer_bytes` only if it is a single layer, or a single tensor outside
    the layers; slots do not overlap and start at multiples of 64 bytes.
    """
    groups: list[list[ParamMeta]] = []
    for i, meta in enumerate(metadata):
        layer = layer_of(meta.name)
        if i and layer is not None and layer == layer_of(metadata[i - 1].name):
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


def chunk_bytes(chunk: Sequence[Slot]) -> int:
    """Room that a chunk takes."""
    return chunk[-1].offset_bytes + _padded(chunk[-1].size_bytes)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes, in row-major order."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy())


def check_manifest(
    manifest: Mapping[str, tuple[int, ...]], checkpoint: Mapping[str, tuple[int, ...]], optional: Callable[[str], bool]
) -> None:
    """Refuse a manifest that is not the checkpoint's: names and shapes; `optional` names may be absent on either side.

    Raises:
        ValueError: naming what is missing, surplus or misshapen.
    """
    missing = [name for name in checkpoint if name not in manifest and not optional(name)]
    surplus = [name for name in manifest if name not in checkpoint and not optional(name)]
    misshapen = [
        f"{name}: expected {checkpoint[name]}, given {shape}"
        for name, shape in manifest.items()
        if name in checkpoint and checkpoint[name] != shape
    ]
    problems = [
        f"{len(names)} {what}: {some_of(names)}"
        for what, names in (("missing", missing), ("surplus", surplus), ("misshapen", misshapen))
        if names
    ]
    if problems:
        raise ValueError("the trainer's weights do not fit the engine's model: " + "; ".join(problems))


def some_of(names: Iterable[str]) -> str:
    """The first names of a list that may be long."""
    names = list(names)
    return ", ".join(names[:NAMES_IN_ERROR]) + (", ..." if len(names) > NAMES_IN_ERROR else "")
