"""Qwen2 and Qwen2.5: a Llama-like decoder with biases on q, k and v."""

from __future__ import annotations

from dapo_megatron.models.decoder import PROJECTION, QKV, QKV_BIAS, decoder, gated_mlp
from dapo_megatron.models.family import Family

QWEN2 = Family(
    architectures=("Qwen2ForCausalLM",),
    table=decoder(QKV, QKV_BIAS, PROJECTION, *gated_mlp()),
    transformer={"add_qkv_bias": True},
    only={"hidden_act": ("silu",), "use_sliding_window": (False,)},
)
