"""Qwen3: a Llama-like decoder whose q and k heads are normalised, dense or with routed experts in every layer."""

from __future__ import annotations

from dapo_megatron.models.decoder import PROJECTION, QK_NORM, QKV, decoder, experts, gated_mlp
from dapo_megatron.models.family import Family

_ONLY = {"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)}

QWEN3 = Family(
    architectures=("Qwen3ForCausalLM",),
    table=decoder(QKV, *QK_NORM, PROJECTION, *gated_mlp()),
    transformer={"qk_layernorm": True},
    only=_ONLY,
)

QWEN3_MOE = Family(
    architectures=("Qwen3MoeForCausalLM",),
    table=decoder(QKV, *QK_NORM, PROJECTION, *experts()),
    transformer={"qk_layernorm": True},
    only=_ONLY | {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
    expert_width_key="moe_intermediate_size",
)
