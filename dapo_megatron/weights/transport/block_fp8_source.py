"""What a transport sends to engines in block-wise FP8."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from dapo_megatron.weights.block_fp8 import quantised, scale_shapes
from dapo_megatron.weights.export import MegatronWeightSource, TensorDescription


class BlockFP8Source:
    """A MegatronWeightSource whose linear weights come out as values and scales."""

    def __init__(self, source: MegatronWeightSource) -> None:
        self._source = source

    def on_every_rank(self) -> BlockFP8Source:
        """See MegatronWeightSource.on_every_rank."""
        return BlockFP8Source(self._source.on_every_rank())

    def held_names(self) -> Collection[str] | None:
        """See MegatronWeightSource.held_names."""
        return self._source.held_names()

    def metadata(self) -> list[TensorDescription]:
        """See MegatronWeightSource.metadata."""
        described = []
        for tensor in self._source.metadata():
            scales = scale_shapes({tensor.name: tensor.shape})
            dtype = torch.float8_e4m3fn if scales else tensor.dtype
            described.append(TensorDescription(tensor.name, dtype, tensor.shape))
            described += [TensorDescription(name, torch.float32, shape) for name, shape in scales.items()]
        return described

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return quantised(self._source)
