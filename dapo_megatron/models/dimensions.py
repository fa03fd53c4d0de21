"""The sizes of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Attributes:
        query_rank: of the compressed queries; None if queries are projected at once.
        kv_rank: of the compressed keys and values.
        nope_head_dim: channels of a query or key head without position.
        rope_head_dim: channels of a query head with position; all key heads share theirs.
        value_head_dim: channels of a value head.
    """

    query_rank: int | None
    kv_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of RoPE (arXiv:2309.00071), under the names of HF configs."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a model, read from its HF config.

    Attributes:
        head_dim: size of one query or key head, not necessarily hidden_size / heads.
        kv_heads: key/value heads (query groups).
        tied_embeddings: the output weight is the embedding; HF checkpoints then hold no lm_head.
        experts: routed experts of each layer; 0 in a dense model.
        experts_per_token: experts that the router chooses for a token.
        moe_ffn_hidden_size: width of one expert; layers with experts have no MLP of width `ffn_hidden_size`.
        norm_topk_prob: the weights of the chosen experts sum to one, else they are what softmax over all experts gave.
        shared_ffn_hidden_size: width of all experts together that every token passes.
        dense_layers: of a model with experts, the first layers, which have none.
        expert_groups: equal groups of experts, of which a token's experts are all in `groups_per_token`; 1 for no
            such limit.
        expert_scale: what the weights of the chosen experts are multiplied by.
        llama3_rope_factor: by which Llama 3.1 stretches RoPE's low frequencies; None if it does not.
        yarn: None for plain RoPE.
        latent: None for plain attention.
        extra_layers: behind the last layer, in checkpoints alone: they predict further tokens.
    """

    layers: int
    hidden_size: int
    ffn_hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    experts: int = 0
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    norm_topk_prob: bool = False
    shared_ffn_hidden_size: int = 0
    dense_layers: int = 0
    expert_groups: int = 1
    groups_per_token: int = 1
    expert_scale: float = 1.0
    llama3_rope_factor: float | None = None
    yarn: Yarn | None = None
    latent: Latent | None = None
    extra_layers: int = 0
