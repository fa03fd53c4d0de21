"""DeepSeek-V3 and Moonlight: multi-head latent attention, first dense layers, then routed and shared experts.

The router scores experts by sigmoid and chooses them by score plus a bias that no gradient moves, which stays what the
checkpoint says. Queries may be compressed (`q_lora_rank`) or not. RoPE turns neighbouring channels, as Megatron's
latent attention does.
"""

from __future__ import annotations

import torch

from dapo_megatron.models.decoder import PROJECTION, decoder, experts, gated_mlp
from dapo_megatron.models.dimensions import Dimensions
from dapo_megatron.models.family import Family, column, only_where, replicated


def _compresses_queries(dimensions: Dimensions, layer: int) -> bool:
    assert dimensions.latent is not None
    return dimensions.latent.query_rank is not None


def _projects_queries(dimensions: Dimensions, layer: int) -> bool:
    return not _compresses_queries(dimensions, layer)


def _is_dense(dimensions: Dimensions, layer: int) -> bool:
    return layer < dimensions.dense_layers


def _has_experts(dimensions: Dimensions, layer: int) -> bool:
    return not _is_dense(dimensions, layer)


_MEGATRON, _HF = "decoder.layers.*.self_attention.", "model.layers.*.self_attn."

_QUERIES = only_where(_projects_queries, column(f"{_MEGATRON}linear_q_proj.weight", f"{_HF}q_proj.weight"))
_COMPRESSED_QUERIES = only_where(
    _compresses_queries,
    replicated(f"{_MEGATRON}linear_q_down_proj.weight", f"{_HF}q_a_proj.weight"),
    replicated(f"{_MEGATRON}q_layernorm.weight", f"{_HF}q_a_layernorm.weight"),
    column(f"{_MEGATRON}linear_q_up_proj.weight", f"{_HF}q_b_proj.weight"),
)
_KEYS_AND_VALUES = (
    replicated(f"{_MEGATRON}linear_kv_down_proj.weight", f"{_HF}kv_a_proj_with_mqa.weight"),
    replicated(f"{_MEGATRON}kv_layernorm.weight", f"{_HF}kv_a_layernorm.weight"),
    column(f"{_MEGATRON}linear_kv_up_proj.weight", f"{_HF}kv_b_proj.weight"),
)
_ROUTER_BIAS = replicated(
    "decoder.layers.*.mlp.router.expert_bias", "model.layers.*.mlp.gate.e_score_correction_bias", torch.float32
)

DEEPSEEK_V3 = Family(
    architectures=("DeepseekV3ForCausalLM",),
    table=decoder(
        *_QUERIES,
        *_COMPRESSED_QUERIES,
        *_KEYS_AND_VALUES,
        PROJECTION,
        *only_where(_is_dense, *gated_mlp()),
        *only_where(_has_experts, _ROUTER_BIAS, *experts(), *gated_mlp("mlp.shared_experts", "mlp.shared_experts")),
    ),
    transformer={
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
    },
    only={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        # Megatron's sigmoid router always normalises.
        "norm_topk_prob": (True,),
        "moe_layer_freq": (1,),
    },
    defaults={"norm_topk_prob": True},
    rope=("default", "yarn"),
    latent=True,
    expert_width_key="moe_intermediate_size",
)
