"""Log-probs and entropies of response tokens from hidden states, without ever holding all logits.

Only the positions that predict a response token are computed, a chunk of rows at a time; backward computes the
logits of a chunk again. With the output weight split over tensor-parallel ranks, each rank computes its own columns
and only per-token sums cross between ranks.

For logits z = h W^T / T over the vocabulary, with p = softmax(z), lse = logsumexp(z) and target y:
log p(y) = z_y - lse, H = lse - sum p z, d log p(y) / dz = onehot(y) - p, dH / dz = -p (log p + H).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22
"""Most fp32 logits that are held at once."""


def response_log_probs(
    hidden: Tensor,
    positions: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of the distribution it was drawn from, both at `temperature`.

    Args:
        hidden: [T, hidden_size], the last hidden states; gradient flows here.
        positions: int64 [R], distinct rows of `hidden`: those that predict the targets.
        weight: [V_local, hidden_size], this rank's rows of the output weight; gradient flows here.
        targets: int64 [R].
        temperature: > 0; logits are divided by it.
        vocab_size: real vocabulary; rows of the whole weight beyond it are padding.
        group: the tensor-parallel group that shares the weight by rows; None for one rank.

    Returns:
        float32 [R] and float32 [R], both differentiable.
    """
    return _ResponseLogProbs.apply(hidden, positions, weight, targets, temperature, vocab_size, group)


class _ResponseLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        positions: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        vocab_size: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        rank, ranks = (group.rank(), group.size()) if group is not None else (0, 1)
        first = rank * weight.shape[0]
        ctx.columns = min(vocab_size - first, weight.shape[0])
        ctx.temperature, ctx.group = temperature, group if ranks > 1 else None
        targets = targets - first
        sums = torch.empty(3, positions.shape[0], dtype=torch.float32, device=hidden.device)
        for rows in _chunks(positions.shape[0], weight.shape[0]):
            logits = _logits(hidden, positions[rows], weight[: ctx.columns], temperature)
            sums[:, rows] = _reduce(logits, targets[rows], ctx.group)
        target_logits, log_sum_exp, entropy = sums
        ctx.save_for_backward(hidden, positions, weight, targets, log_sum_exp, entropy)
        ctx.set_materialize_grads(False)
        return target_logits - log_sum_exp, entropy.clone()

    @staticmethod
    def backward(ctx: Any, log_prob_grad: Tensor | None, entropy_grad: Tensor | None) -> tuple:  # type: ignore[override]
        hidden, positions, weight, targets, log_sum_exp, entropy = ctx.saved_tensors
        columns = weight[: ctx.columns]
        hidden_grad = torch.zeros_like(hidden)
        weight_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for rows in _chunks(positions.shape[0], weight.shape[0]):
            log_p = _logits(hidden, positions[rows], columns, ctx.temperature) - log_sum_exp[rows, None]
            logits_grad = torch.zeros_like(log_p)
            p = log_p.exp()
            if entropy_grad is not None:
                logits_grad -= p * (log_p + entropy[rows, None]) * entropy_grad[rows, None]
            if log_prob_grad is not None:
                logits_grad -= p * log_prob_grad[rows, None]
                here, column = _owned(targets[rows], ctx.columns)
                logits_grad.scatter_add_(1, column[:, None], (log_prob_grad[rows] * here)[:, None])
            logits_grad = (logits_grad / ctx.temperature).to(hidden.dtype)
            hidden_grad.index_copy_(0, positions[rows], logits_grad @ columns)
            weight_grad[: ctx.columns] += logits_grad.T @ hidden[positions[rows]]
        if ctx.group is not None:
            dist.all_reduce(hidden_grad, group=ctx.group)
        return hidden_grad, None, weight_grad.to(weight.dtype), None, None, None, None


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // columns)
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def _logits(hidden: Tensor, positions: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """fp32 [r, columns]; bf16 operands are multiplied in fp32, as rounding logits to bf16 would cost 2^-8 of them."""
    logits = hidden[positions].float() @ weight.float().T
    return logits if temperature == 1.0 else logits.div_(temperature)


def _owned(targets: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Whether each target is among this rank's columns, and a column that is safe to index."""
    return (targets >= 0) & (targets < columns), targets.clamp(0, columns - 1)


def _reduce(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[3, r]: target logit, logsumexp and entropy over the whole vocabulary."""
    here, column = _owned(targets, logits.shape[1])
    target = torch.where(here, logits.gather(1, column[:, None])[:, 0], 0.0)
    largest = logits.amax(1)
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - largest[:, None]
    exponentials = shifted.exp()
    sums = torch.stack([target, exponentials.sum(1), (exponentials * shifted).sum(1)])
    if group is not None:
        dist.all_reduce(sums, group=group)
    target, total, weighted = sums
    return torch.stack([target, total.log() + largest, total.log() - weighted / total])
