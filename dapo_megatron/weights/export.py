"""Megatron model chunks -> full tensors under their HF names: what checkpoints and rollout engines take.

`MegatronWeightSource` has the methods of vLLM's `WeightSource` (vllm.distributed.weight_transfer.base) without
importing vLLM. Tensors come one at a time in the order of HF checkpoints: embedding, layer by layer, final norm, output
weight. Gathering a tensor is a collective of its tensor-parallel group, so all ranks of the group iterate together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dapo_megatron.models.family import Dimensions, Family, Parallel
from dapo_megatron.weights.load import full_hf_tensors, named_local_parameters, tensor_parallel_group


@dataclass(frozen=True)
class TensorDescription:
    """What iteration yields under a name: dtype on the wire and full shape (vLLM's `ParamMeta`)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class MegatronWeightSource:
    """The weights of a policy as full HF tensors; every iteration is a fresh pass over the current values.

    A tensor is a view of the live parameter where no gathering, splitting or cast made a copy: use it before the next
    update.

    Args:
        chunks: this rank's model chunks.
        dtype: wire dtype; None keeps the parameters'.

    Raises:
        ValueError: pipeline-parallel chunks.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], family: Family, dimensions: Dimensions, dtype: torch.dtype | None = None
    ) -> None:
        self._dimensions = dimensions
        self._dtype = dtype
        self._group = tensor_parallel_group(chunks)
        parameters = dict(named_local_parameters(chunks))
        mappings = [mapping for mapping in family.tensors(dimensions) if mapping.exported]
        absent = [mapping.megatron for mapping in mappings if mapping.megatron not in parameters]
        if absent:
            raise ValueError(
                f"this rank does not hold {absent[0]} and {len(absent) - 1} more tensors: export needs "
                "parallel.pipeline=1"
            )
        self._tensors = [(mapping, parameters[mapping.megatron]) for mapping in mappings]

    def metadata(self) -> list[TensorDescription]:
        """What iteration will yield, in order, without gathering anything."""
        return [
            TensorDescription(name, self._dtype or parameter.dtype, shape)
            for mapping, parameter in self._tensors
            for name, shape in full_hf_tensors(mapping, parameter, self._group.size(), self._dimensions).items()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for mapping, parameter in self._tensors:
            local = parameter.detach()
            full = mapping.split.unshard(self._gather(local)) if isinstance(mapping.split, Parallel) else local
            for name, tensor in zip(mapping.hf, mapping.split.unfuse(full, self._dimensions), strict=True):
                yield name, tensor.to(self._dtype or tensor.dtype)

    def _gather(self, local: Tensor) -> list[Tensor]:
        if self._group.size() == 1:
            return [local]
        shards = [torch.empty_like(local) for _ in range(self._group.size())]
        dist.all_gather(shards, local.contiguous(), group=self._group)
        return shards

    def held_names(self) -> Collection[str] | None:
        """None: this rank can yield every tensor."""
        return None

    def groups(self) -> list[list[str]]:
        """Names by layer: before the layers, each layer, after them."""
        names = [description.name for description in self.metadata()]
        return [list(group) for _, group in groupby(names, key=_place)]

    def iter_groups(self) -> Iterator[tuple[list[str], list[Tensor]]]:
        """The same stream, a whole group at a time."""
        for _, pairs in groupby(self, key=lambda pair: _place(pair[0])):
            names, tensors = zip(*pairs, strict=True)
            yield list(names), list(tensors)


def _place(name: str) -> str | None:
    match = re.search(r"\.(\d+)\.", name)
    return match[1] if match else None
