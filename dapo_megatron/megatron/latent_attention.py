"""Multi-head latent attention: Megatron's, where it differs from the one of HF models and of Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import MLATransformerConfig, multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

if not isinstance(multi_latent_attention.TELinear, type):
    # Core 0.16 takes a missing Transformer Engine for present here.
    multi_latent_attention.HAVE_TE = False

LATENT_NORM_EPS = 1e-6
"""Of the norms of compressed queries, keys and values, whatever rms_norm_eps says (transformers, modeling_deepseek_v3;
vLLM takes rms_norm_eps)."""


class DuplicatedLinear(torch.nn.Module):
    """A linear layer that every tensor-parallel rank has whole, as Transformer Engine's with parallel_mode=duplicated.

    With sequence parallelism each rank sees its part of the sequence: the gradients are summed over the ranks.
    """

    def __init__(self, input_size: int, output_size: int, config: MLATransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[..., input_size] -> [..., output_size], and no bias."""
        return torch.nn.functional.linear(x, self.weight), None


class LatentSelfAttention(MLASelfAttention):
    """Megatron's, with whole down projections in the local layer spec too, and HF's eps.

    The local spec would split the down projections by columns, give every rank the gradient of its own heads alone for
    the keys' shared channels, and thus train another model than one rank does.
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            split = getattr(self, name, None)
            if isinstance(split, ColumnParallelLinear):
                setattr(self, name, DuplicatedLinear(split.input_size, split.output_size, config))
        # Transformer Engine fuses the norms into the linear layers behind them.
        for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
            if hasattr(getattr(self, name, None), "eps"):
                getattr(self, name).eps = LATENT_NORM_EPS

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """The layer spec's own modules. Core 0.19 would add a norm before queries that are not compressed."""
        return vars(submodules)
