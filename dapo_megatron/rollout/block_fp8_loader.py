"""How an engine in block-wise FP8 reads a plain checkpoint: quantised tensor by tensor, as the syncs to come are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader

from dapo_megatron.weights.block_fp8 import quantised

LOAD_FORMAT = "block_fp8"


@register_model_loader(LOAD_FORMAT)
class BlockFP8Loader(DefaultModelLoader):
    """Importing this module registers it with vLLM."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        """Values and scales in place of each linear weight."""
        return quantised(super().get_all_weights(model_config, model))
