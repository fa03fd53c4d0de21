"""Megatron model chunks -> full tensors under their HF names: what checkpoints and rollout engines take.

`MegatronWeightSource` has the methods of vLLM's `WeightSource` (vllm.distributed.weight_transfer.base) without
importing vLLM. In any layout the order is that of HF checkpoints: embedding, layer by layer, final norm, output weight.
Of the ranks that hold the same shard the first gives it; the others do nothing. Which rank gives what is planned once.

Three ways out:
- iteration: rank 0 yields the full tensors; shards travel to it, many in one message. After `on_every_rank()` every
  rank yields them; shards are broadcast.
- `write`: each rank copies its shards to where they lie in full tensors that all ranks of a host share.
- `local_parts`: each rank its own part of each tensor, for transports that reshard themselves.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dapo_megatron.models.dimensions import Dimensions
from dapo_megatron.models.family import Family, TensorMapping
from dapo_megatron.weights.load import hf_shapes, named_local_tensors, shard_group

RECEIVER = 0
"""The rank that yields the tensors."""

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class TensorDescription:
    """What iteration yields under a name: dtype on the wire and full shape (vLLM's `ParamMeta`)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Shard:
    """What a rank holds of a Megatron tensor: shard `index` of all."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _PlannedTensor:
    """A Megatron tensor, the rank that gives each of its shards, and what a shard is on the wire."""

    mapping: TensorMapping
    holders: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def shard_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, buffer: Tensor, offset_bytes: int) -> Tensor:
        """The shard that lies in `buffer` (uint8) at an offset, without a copy."""
        return buffer[offset_bytes : offset_bytes + self.shard_bytes].view(self.dtype).view(self.shape)


@dataclass
class _Message:
    """Where each tensor's shard lies in a message, and how long that is."""

    offsets: dict[str, int] = field(default_factory=dict)
    size_bytes: int = 0

    def append(self, tensor: _PlannedTensor) -> None:
        """Give the tensor's shard the next place."""
        self.offsets[tensor.mapping.megatron] = self.size_bytes
        self.size_bytes += -(-tensor.shard_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@dataclass(frozen=True)
class _Bucket:
    """Consecutive tensors whose shards travel together: one message from each rank that holds some."""

    tensors: tuple[_PlannedTensor, ...]

    @cached_property
    def messages(self) -> dict[int, _Message]:
        """By the rank that sends it, in ascending order."""
        found: dict[int, _Message] = {}
        for tensor in self.tensors:
            for rank in tensor.holders:
                found.setdefault(rank, _Message()).append(tensor)
        return dict(sorted(found.items()))


class MegatronWeightSource:
    """The weights of a policy as full HF tensors; every iteration is a fresh pass over the current values.

    All ranks of the world construct it together, and all iterate it to its end together. Rank 0 yields the tensors,
    the others yield nothing. A tensor is a view of the live parameter where no sending, splitting or cast made a copy:
    use it before the next update.

    Args:
        chunks: this rank's model chunks.
        dtype: wire dtype; None keeps the parameters'.
        bucket_bytes: how much travels at a time; a single larger tensor travels alone. Rank 0 takes room for twice as
            much, others for twice what they hold of it.

    Attributes:
        yields: whether this rank yields the tensors.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        family: Family,
        dimensions: Dimensions,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = 32 * 1024 * 1024,
    ) -> None:
        self._dimensions = dimensions
        self._everywhere = False
        self._rank = dist.get_rank() if dist.is_initialized() else RECEIVER
        self.yields = self._rank == RECEIVER
        self._parameters = dict(named_local_tensors(chunks))
        mappings = [mapping for mapping in family.tensors(dimensions) if mapping.exported]
        held = {
            mapping.megatron: _Shard(
                shard_group(chunks, mapping).rank() if mapping.split.sharded else 0,
                tuple(self._parameters[mapping.megatron].shape),
                mapping.dtype or dtype or self._parameters[mapping.megatron].dtype,
            )
            for mapping in mappings
            if mapping.megatron in self._parameters
        }
        self._held_by_rank = _of_all_ranks(held)
        self._plan = _plan(mappings, self._held_by_rank)
        self._tensor_of = {name: tensor for tensor in self._plan for name in tensor.mapping.hf}
        self._buckets = _cut(self._plan, bucket_bytes)

    def on_every_rank(self) -> MegatronWeightSource:
        """The same weights, yielded by all ranks of the world."""
        source = copy.copy(self)
        source._everywhere = dist.is_initialized()
        source.yields = True
        return source

    @property
    def participates(self) -> bool:
        """Whether iterating does anything on this rank."""
        return self.yields or any(self._rank in bucket.messages for bucket in self._buckets)

    def metadata(self) -> list[TensorDescription]:
        """What iteration will yield, in order, without sending anything. The same on every rank."""
        return list(self._metadata)

    @cached_property
    def _metadata(self) -> list[TensorDescription]:
        return [
            TensorDescription(name, tensor.dtype, shape)
            for tensor in self._plan
            for name, shape in zip(
                tensor.mapping.hf,
                hf_shapes(tensor.mapping.split, tensor.shape, len(tensor.holders), self._dimensions),
                strict=True,
            )
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self.yields:
            yield from self._receive()
        else:
            self._send()

    def _send(self) -> None:
        """Pack the next message while the last is on its way."""
        sending: Any = None
        for bucket in self._buckets:
            if self._rank in bucket.messages:
                packed = self._pack(bucket)
                if sending is not None:
                    sending.wait()
                sending = dist.isend(packed, RECEIVER)
        if sending is not None:
            sending.wait()

    def _pack(self, bucket: _Bucket) -> Tensor:
        message = bucket.messages[self._rank]
        packed = self._buffer(message)
        for tensor in bucket.tensors:
            name = tensor.mapping.megatron
            if name in message.offsets:
                tensor.view(packed, message.offsets[name]).copy_(_values(self._parameters[name]))
        return packed

    def _receive(self) -> Iterator[tuple[str, Tensor]]:
        """The next messages arrive while the last are in use."""
        arriving = self._start_receiving(self._buckets[0])
        for bucket, following in zip_longest(self._buckets, self._buckets[1:]):
            received = {}
            for holder, (buffer, receiving) in arriving.items():
                receiving.wait()
                received[holder] = buffer
            arriving = self._start_receiving(following) if following else {}
            yield from self._unpack(bucket, received)

    def _start_receiving(self, bucket: _Bucket) -> dict[int, tuple[Tensor, Any]]:
        if self._everywhere:
            buffers = {
                rank: self._pack(bucket) if rank == self._rank else self._buffer(message)
                for rank, message in bucket.messages.items()
            }
            return {rank: (buffer, dist.broadcast(buffer, rank, async_op=True)) for rank, buffer in buffers.items()}
        return self._receive_from(bucket, [rank for rank in bucket.messages if rank != self._rank])

    def _receive_from(self, bucket: _Bucket, ranks: Collection[int]) -> dict[int, tuple[Tensor, Any]]:
        buffers = {rank: self._buffer(message) for rank, message in bucket.messages.items() if rank in ranks}
        return {rank: (buffer, dist.irecv(buffer, rank)) for rank, buffer in buffers.items()}

    def _unpack(self, bucket: _Bucket, received: dict[int, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for tensor in bucket.tensors:
            mapping = tensor.mapping
            shards = [
                _values(self._parameters[mapping.megatron]).to(tensor.dtype)
                if rank == self._rank and rank not in received
                else tensor.view(received[rank], bucket.messages[rank].offsets[mapping.megatron])
                for rank in tensor.holders
            ]
            parts = mapping.split.unfuse(mapping.split.unshard(shards), self._dimensions)
            yield from zip(mapping.hf, parts, strict=True)

    def _buffer(self, message: _Message) -> Tensor:
        return torch.empty(message.size_bytes, dtype=torch.uint8, device=self._device)

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def writers(self, names: Collection[str]) -> list[int]:
        """The ranks that hold what `write` needs of these tensors, in ascending order."""
        return list(self._bucket_of(names).messages)

    def write(self, whole: Mapping[str, Tensor]) -> None:
        """Copy this rank's shards to where they lie in full tensors (HF name -> tensor, all of a fused one among them).

        A rank of `writers` that does not share the memory sends `packed` to rank 0, which calls `write_received`.
        """
        self._place(self._bucket_of(whole), self._rank, whole)

    def packed(self, names: Collection[str]) -> Tensor:
        """This rank's shards of these tensors in one message."""
        return self._pack(self._bucket_of(names))

    def write_received(self, whole: Mapping[str, Tensor], ranks: Collection[int]) -> None:
        """Receive what these ranks have packed, and copy it to its places."""
        bucket = self._bucket_of(whole)
        for holder, (buffer, receiving) in self._receive_from(bucket, ranks).items():
            receiving.wait()
            self._place(bucket, holder, whole, buffer)

    def _place(self, bucket: _Bucket, holder: int, whole: Mapping[str, Tensor], message: Tensor | None = None) -> None:
        """Place the shards of one holder: those in its message, or this rank's own."""
        for tensor in bucket.tensors:
            if holder not in tensor.holders:
                continue
            mapping = tensor.mapping
            if message is None:
                shard = _values(self._parameters[mapping.megatron])
            else:
                shard = tensor.view(message, bucket.messages[holder].offsets[mapping.megatron])
            index, shards = tensor.holders.index(holder), len(tensor.holders)
            mapping.split.place(shard, [whole[name] for name in mapping.hf], index, shards, self._dimensions)

    def _bucket_of(self, names: Collection[str]) -> _Bucket:
        return _Bucket(tuple({id(self._tensor_of[name]): self._tensor_of[name] for name in names}.values()))

    def shard_layout(self) -> tuple[int, dict[str, int | None]]:
        """How many ranks share a copy of the model, and HF name -> the dimension along which they do (None: each holds
        the whole).

        Raises:
            ValueError: some rank lacks a tensor (pipeline or expert parallelism), or tensors are shared in other ways.
        """
        size = max(len(tensor.holders) for tensor in self._plan)
        for rank, held in enumerate(self._held_by_rank):
            for tensor in self._plan:
                name, shards = tensor.mapping.megatron, len(tensor.holders)
                if name not in held:
                    raise ValueError(f"rank {rank} holds no part of {name}")
                if shards not in (1, size) or held[name].index != rank % shards:
                    raise ValueError(f"rank {rank} of {size} holds part {held[name].index} of {shards} of {name}")
        return size, {
            # `part` slices the dimensions up to the split one.
            name: len(tensor.mapping.split.part(tensor.shape, 0, 1)) - 1 if len(tensor.holders) > 1 else None
            for tensor in self._plan
            for name in tensor.mapping.hf
        }

    def local_parts(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of every HF tensor that it holds, in order; nothing is sent."""
        for tensor in self._plan:
            mapping = tensor.mapping
            if mapping.megatron in self._parameters:
                shard = _values(self._parameters[mapping.megatron]).to(tensor.dtype)
                yield from zip(mapping.hf, mapping.split.unfuse(shard, self._dimensions), strict=True)

    def held_names(self) -> Collection[str] | None:
        """None, all of them, where they are yielded; no name on the other ranks."""
        return None if self.yields else ()

    def groups(self) -> list[list[str]]:
        """Names by layer, of what this rank yields: before the layers, each layer, after them."""
        names = [description.name for description in self.metadata()] if self.yields else []
        return [list(group) for _, group in groupby(names, key=layer_of)]

    def iter_groups(self) -> Iterator[tuple[list[str], list[Tensor]]]:
        """The same stream, a whole group at a time."""
        for _, pairs in groupby(self, key=lambda pair: layer_of(pair[0])):
            names, tensors = zip(*pairs, strict=True)
            yield list(names), list(tensors)


def _values(parameter: Tensor) -> Tensor:
    """The plain values of a parameter: Transformer Engine's FP8 ones stay what they are in any cast."""
    quantised = hasattr(parameter, "get_data_tensors")
    return parameter.detach().dequantize() if quantised else parameter.detach()


def _of_all_ranks(held: dict[str, _Shard]) -> list[dict[str, _Shard]]:
    if not dist.is_initialized():
        return [held]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, held)
    return found


def _plan(mappings: Sequence[TensorMapping], held: Sequence[dict[str, _Shard]]) -> list[_PlannedTensor]:
    """Of the ranks that hold the same shard, the first gives it."""
    holders: dict[str, dict[int, int]] = {mapping.megatron: {} for mapping in mappings}
    shards: dict[str, _Shard] = {}
    for rank, of_rank in enumerate(held):
        for name, shard in of_rank.items():
            holders[name].setdefault(shard.index, rank)
            shards[name] = shard
    planned = []
    for mapping in mappings:
        name = mapping.megatron
        assert sorted(holders[name]) == list(range(len(holders[name]))) != [], f"no rank holds all of {name}"
        by_index = tuple(holders[name][index] for index in range(len(holders[name])))
        planned.append(_PlannedTensor(mapping, by_index, shards[name].shape, shards[name].dtype))
    return planned


def _cut(tensors: Sequence[_PlannedTensor], bucket_bytes: int) -> list[_Bucket]:
    """Buckets of at most so many bytes, all shards of a tensor in one."""
    cut: list[list[_PlannedTensor]] = []
    total = 0
    for tensor in tensors:
        size = tensor.shard_bytes * len(tensor.holders)
        if not cut or total + size > bucket_bytes:
            cut.append([])
            total = 0
        cut[-1].append(tensor)
        total += size
    return [_Bucket(tuple(tensors)) for tensors in cut]


def layer_of(name: str) -> str | None:
    """`model.layers.3` of `model.layers.3.mlp.up_proj.weight`; None outside the layers."""
    match = re.match(r"(?:.*?\.)?\d+(?=\.|$)", name)
    return match[0] if match else None
