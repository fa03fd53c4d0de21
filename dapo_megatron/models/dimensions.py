"""The sizes of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a model, read from its HF config.

    Attributes:
        head_dim: size of one attention head, not necessarily hidden_size / heads.
        kv_heads: key/value heads (query groups).
        tied_embeddings: the output weight is the embedding; HF checkpoints then hold no lm_head.
        experts: routed experts of each layer; 0 in a dense model.
        experts_per_token: experts that the router chooses for a token.
        moe_ffn_hidden_size: width of one expert; the layers then have no MLP of width `ffn_hidden_size`.
        norm_topk_prob: the weights of the chosen experts sum to one, else they are what softmax over all experts gave.
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
