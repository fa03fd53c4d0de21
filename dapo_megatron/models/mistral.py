"""Mistral, Llama's decoder, and Mixtral, the same with routed experts in every layer.

Their attention sees no further back than `sliding_window` tokens. Megatron's sees everything, which is the same up to
that length: longer sequences are refused with the configuration (config/validate_model.py).
"""

from __future__ import annotations

from dapo_megatron.models.decoder import ATTENTION, decoder, experts, gated_mlp
from dapo_megatron.models.family import Family

MISTRAL = Family(
    architectures=("MistralForCausalLM",),
    table=decoder(*ATTENTION, *gated_mlp()),
    only={"hidden_act": ("silu",)},
)

MIXTRAL = Family(
    architectures=("MixtralForCausalLM",),
    table=decoder(*ATTENTION, *experts("block_sparse_moe", ("w{1,3}", "w2"))),
    only={"hidden_act": ("silu",)},
    defaults={"norm_topk_prob": True},
    expert_width_key="intermediate_size",
)
