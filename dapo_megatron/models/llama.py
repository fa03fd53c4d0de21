"""Llama 2 and 3, and models of that architecture (SmolLM2)."""

from __future__ import annotations

from dapo_megatron.models.decoder import ATTENTION, decoder, gated_mlp
from dapo_megatron.models.family import Family

LLAMA = Family(
    architectures=("LlamaForCausalLM",),
    table=decoder(*ATTENTION, *gated_mlp()),
    only={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    rope=("default", "llama3"),
)
