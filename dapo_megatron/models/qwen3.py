"""Qwen3, dense: a Llama-like decoder whose q and k heads are normalised."""

from __future__ import annotations

from dapo_megatron.models.family import Family, fused_glu, fused_qkv, replicated, row, vocabulary

QWEN3 = Family(
    architectures=("Qwen3ForCausalLM",),
    table=(
        vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        fused_qkv("decoder.layers.*.self_attention.linear_qkv.weight", "model.layers.*.self_attn.{q,k,v}_proj.weight"),
        replicated("decoder.layers.*.self_attention.q_layernorm.weight", "model.layers.*.self_attn.q_norm.weight"),
        replicated("decoder.layers.*.self_attention.k_layernorm.weight", "model.layers.*.self_attn.k_norm.weight"),
        row("decoder.layers.*.self_attention.linear_proj.weight", "model.layers.*.self_attn.o_proj.weight"),
        fused_glu("decoder.layers.*.mlp.linear_fc1.weight", "model.layers.*.mlp.{gate,up}_proj.weight"),
        row("decoder.layers.*.mlp.linear_fc2.weight", "model.layers.*.mlp.down_proj.weight"),
        replicated("decoder.layers.*.input_layernorm.weight", "model.layers.*.input_layernorm.weight"),
        replicated("decoder.layers.*.pre_mlp_layernorm.weight", "model.layers.*.post_attention_layernorm.weight"),
        replicated("decoder.final_layernorm.weight", "model.norm.weight"),
        vocabulary("output_layer.weight", "lm_head.weight", tied_to="model.embed_tokens.weight"),
    ),
    transformer={"qk_layernorm": True},
    only={"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)},
    ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),
)
