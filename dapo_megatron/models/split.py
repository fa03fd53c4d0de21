"""How HF tensors become one Megatron tensor, and how tensor-parallel ranks share that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from dapo_megatron.models.dimensions import Dimensions


class Split(Protocol):
    """How HF tensors become one Megatron tensor, and how ranks share that."""

    sharded: ClassVar[bool]

    def __hash__(self) -> int: ...

    def part(self, shape: Sequence[int], rank: int, size: int) -> tuple[slice, ...]:
        """Where, in an HF tensor of that shape, lies what tensor-parallel rank `rank` of `size` needs of it."""
        ...

    def fuse(self, parts: Sequence[Tensor], dimensions: Dimensions) -> Tensor:
        """Whole HF tensors -> the full Megatron tensor; a rank's parts of them -> its shard. No vocabulary padding."""
        ...

    def unfuse(self, tensor: Tensor, dimensions: Dimensions) -> list[Tensor]:
        """A full Megatron tensor -> its HF tensors; cuts vocabulary padding. Views where possible."""
        ...

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The shards of all tensor-parallel ranks -> the full Megatron tensor."""
        ...

    def place(self, shard: Tensor, whole: Sequence[Tensor], rank: int, size: int, dimensions: Dimensions) -> None:
        """Copy the shard of rank `rank` of `size` to where it lies in the whole HF tensors, and nothing else."""
        ...


@dataclass(frozen=True)
class Replicated:
    """The same tensor on every rank."""

    sharded: ClassVar[bool] = False

    def part(self, shape: Sequence[int], rank: int, size: int) -> tuple[slice, ...]:
        return ()

    def fuse(self, parts: Sequence[Tensor], dimensions: Dimensions) -> Tensor:
        (part,) = parts
        return part

    def unfuse(self, tensor: Tensor, dimensions: Dimensions) -> list[Tensor]:
        return [tensor]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return shards[0]

    def place(self, shard: Tensor, whole: Sequence[Tensor], rank: int, size: int, dimensions: Dimensions) -> None:
        for tensor, part in zip(whole, self.unfuse(shard, dimensions), strict=True):
            tensor[self.part(tensor.shape, rank, size)].copy_(part)


@dataclass(frozen=True)
class Parallel(Replicated):
    """Split along one dimension: 0 for column-parallel weights and their biases, 1 for row-parallel weights."""

    sharded: ClassVar[bool] = True
    dim: int

    def part(self, shape: Sequence[int], rank: int, size: int) -> tuple[slice, ...]:
        length = -(-shape[self.dim] // size)
        start, stop = (min(i * length, shape[self.dim]) for i in (rank, rank + 1))
        return (slice(None),) * self.dim + (slice(start, stop),)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards), self.dim) if len(shards) > 1 else shards[0]


@dataclass(frozen=True)
class Vocabulary(Parallel):
    """Rows are tokens, padded at the end to a multiple of the tensor-parallel size on Megatron's side only."""

    dim: int = 0

    def unfuse(self, tensor: Tensor, dimensions: Dimensions) -> list[Tensor]:
        return [tensor[: dimensions.vocab_size]]

    def place(self, shard: Tensor, whole: Sequence[Tensor], rank: int, size: int, dimensions: Dimensions) -> None:
        (tensor,) = whole
        rows = tensor[self.part(tensor.shape, rank, size)]
        rows.copy_(shard[: len(rows)])


@dataclass(frozen=True)
class FusedQKV(Parallel):
    """q, k, v in one tensor, ordered by query group: the q heads of a group, its k head, its v head.

    Tensor-parallel ranks hold whole groups.
    """

    dim: int = 0

    def fuse(self, parts: Sequence[Tensor], dimensions: Dimensions) -> Tensor:
        groups = parts[-1].shape[0] // dimensions.head_dim
        return torch.cat([part.view(groups, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)

    def unfuse(self, tensor: Tensor, dimensions: Dimensions) -> list[Tensor]:
        d = dimensions.head_dim
        rows = [dimensions.heads // dimensions.kv_heads * d, d, d]
        groups = tensor.view(-1, sum(rows), *tensor.shape[1:])
        return [part.flatten(0, 1) for part in groups.split(rows, 1)]


@dataclass(frozen=True)
class FusedGLU(Parallel):
    """gate over up; every rank holds its part of both."""

    dim: int = 0

    def fuse(self, parts: Sequence[Tensor], dimensions: Dimensions) -> Tensor:
        return torch.cat(list(parts))

    def unfuse(self, tensor: Tensor, dimensions: Dimensions) -> list[Tensor]:
        return list(tensor.chunk(2))

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        if len(shards) == 1:
            return shards[0]
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return torch.cat([*gates, *ups])
