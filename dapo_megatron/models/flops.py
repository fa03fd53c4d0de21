"""Work of training on packed sequences, in floating-point operations (FLOPs) that the model itself needs.

A multiply-add counts two; backward costs twice forward (Kaplan et al. 2020, arXiv:2001.08361, section 2.1: six FLOPs a
parameter and token), to which causal attention adds half of the square of each sequence (Chowdhery et al. 2022,
arXiv:2204.02311, appendix B, halved). Recomputed activations, norms, softmax and the embedding's look-up do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dapo_megatron.models.dimensions import Dimensions

_FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True)
class SequenceCost:
    """FLOPs of one sequence of L tokens: linear x L + quadratic x L^2."""

    linear: float
    quadratic: float

    def __call__(self, tokens: int) -> float:
        """FLOPs of a sequence of so many tokens."""
        return self.linear * tokens + self.quadratic * tokens**2


def sequence_cost(dimensions: Dimensions) -> SequenceCost:
    """Forward and backward of one sequence, the logits of all its tokens included."""
    d = dimensions
    weights = d.hidden_size * d.vocab_size + d.layers * _attention(d)
    weights += (d.dense_layers if d.experts else d.layers) * 3 * d.hidden_size * d.ffn_hidden_size
    if d.experts:
        # A token passes the router, the experts that it chooses and the shared ones.
        width = d.experts_per_token * d.moe_ffn_hidden_size + d.shared_ffn_hidden_size
        weights += (d.layers - d.dense_layers) * d.hidden_size * (d.experts + 3 * width)
    # Scores and their product with the values are 2 L^2 FLOPs each a channel, of which the causal mask leaves half.
    products = d.layers * d.heads * (d.head_dim + (d.latent.value_head_dim if d.latent else d.head_dim))
    return SequenceCost(_FORWARD_AND_BACKWARD * 2 * weights, _FORWARD_AND_BACKWARD * products)


def _attention(d: Dimensions) -> int:
    """Weights of one layer's attention."""
    if d.latent is None:
        return d.hidden_size * (2 * d.heads + 2 * d.kv_heads) * d.head_dim
    rank, queries = d.latent.query_rank, d.heads * d.head_dim
    down = d.hidden_size * (d.latent.kv_rank + d.latent.rope_head_dim)
    up = d.latent.kv_rank * d.heads * (d.latent.nope_head_dim + d.latent.value_head_dim)
    project = rank * (d.hidden_size + queries) if rank else d.hidden_size * queries
    return project + down + up + d.heads * d.latent.value_head_dim * d.hidden_size


def training_flops(dimensions: Dimensions, lengths: Sequence[int]) -> float:
    """FLOPs of a forward and backward pass over sequences of these lengths."""
    return sum(map(sequence_cost(dimensions), lengths), start=0.0)
