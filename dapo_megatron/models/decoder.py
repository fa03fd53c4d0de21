"""The rows that decoders of Llama's kind share."""

from __future__ import annotations

from dapo_megatron.models.family import Row, fused_glu, fused_qkv, replicated, row, vocabulary

_MEGATRON, _HF = "decoder.layers.*.", "model.layers.*."

QKV = fused_qkv(f"{_MEGATRON}self_attention.linear_qkv.weight", f"{_HF}self_attn.{{q,k,v}}_proj.weight")
QKV_BIAS = fused_qkv(f"{_MEGATRON}self_attention.linear_qkv.bias", f"{_HF}self_attn.{{q,k,v}}_proj.bias")
QK_NORM = (
    replicated(f"{_MEGATRON}self_attention.q_layernorm.weight", f"{_HF}self_attn.q_norm.weight"),
    replicated(f"{_MEGATRON}self_attention.k_layernorm.weight", f"{_HF}self_attn.k_norm.weight"),
)
PROJECTION = row(f"{_MEGATRON}self_attention.linear_proj.weight", f"{_HF}self_attn.o_proj.weight")


ATTENTION = (QKV, PROJECTION)
NAMES = ("{gate,up}_proj", "down_proj")


def gated_mlp(megatron: str = "mlp", hf: str = "mlp", names: tuple[str, str] = NAMES) -> tuple[Row, ...]:
    """The linear layers of an MLP.

    Args:
        megatron: what holds them in a layer.
        hf: the same in HF.
        names: in HF, of those that are fused and of the last.
    """
    return (
        fused_glu(f"{_MEGATRON}{megatron}.linear_fc1.weight", f"{_HF}{hf}.{names[0]}.weight"),
        row(f"{_MEGATRON}{megatron}.linear_fc2.weight", f"{_HF}{hf}.{names[1]}.weight"),
    )


def experts(hf: str = "mlp", names: tuple[str, str] = NAMES) -> tuple[Row, ...]:
    """The router and the routed experts."""
    return (
        replicated(f"{_MEGATRON}mlp.router.weight", f"{_HF}{hf}.gate.weight"),
        *gated_mlp("mlp.experts.local_experts.*", f"{hf}.experts.*", names),
    )


def decoder(*layer: Row) -> tuple[Row, ...]:
    """The whole table: these rows of a layer, with its two norms, and what stands before and after the layers."""
    return (
        vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        *layer,
        replicated(f"{_MEGATRON}input_layernorm.weight", f"{_HF}input_layernorm.weight"),
        replicated(f"{_MEGATRON}pre_mlp_layernorm.weight", f"{_HF}post_attention_layernorm.weight"),
        replicated("decoder.final_layernorm.weight", "model.norm.weight"),
        vocabulary("output_layer.weight", "lm_head.weight", tied_to="model.embed_tokens.weight"),
    )
