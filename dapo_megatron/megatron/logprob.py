"""Log-probs and entropies of response tokens, and their gradients, without ever holding all logits.

Only the positions that predict a response token are computed, a chunk of rows at a time. With the output weight split
over tensor-parallel ranks, each rank computes its own columns and only per-token numbers cross between ranks.

- `response_log_probs` is a plain differentiable function. Its backward computes the logits a second time, which makes
  four matrix products of three. Without gradient it keeps nothing.
- `response_loss` is for training. The gradient of the logits is linear in the derivatives of the loss by each token's
  log-prob and entropy, which the loss can tell as soon as these are known. So forward makes the gradients while the
  logits of a chunk are still there, and backward only scales them.

For logits z = h W^T / T over the vocabulary, with p = softmax(z), lse = logsumexp(z) and target y:
log p(y) = z_y - lse, H = -sum p log p, d log p(y) / dz = onehot(y) - p, dH / dz = -p (log p + H).
A rank whose columns hold the share s of the distribution, and in it the distribution p_r with entropy H_r, contributes
p = s p_r and s (H_r - log s) to H.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TokenLosses = Callable[[Tensor, Tensor, slice], Tensor]
"""(log_probs [r], entropy [r], rows) -> the summed loss of the response tokens `rows`, a differentiable scalar."""

CHUNK_ELEMENTS = 40 << 20
"""Most logits held at once. Each chunk reads the whole weight and its gradient, which tells below some 200 rows."""

CACHED_ELEMENTS = 4 << 20
"""Logits per element-wise pass on a CPU: as many as its cache keeps from one pass to the next."""

BLOCK_ELEMENTS = 4 << 20
"""Elements of a bfloat16 weight, or of its gradient, that are held a second time."""

_TINY = torch.finfo(torch.float32).tiny


def response_log_probs(
    hidden: Tensor,
    positions: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    *,
    reduce_hidden_grad: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of the distribution it was drawn from, both at `temperature`.

    Args:
        hidden: [T, hidden_size], the last hidden states, float32 or bfloat16; gradient flows here.
        positions: int64 [R], distinct rows of `hidden`: those that predict the targets. R may be 0; it is the same on
            all ranks of the group.
        weight: [V_local, hidden_size] in hidden's dtype, this rank's rows of the output weight; gradient flows here.
        targets: int64 [R].
        temperature: > 0; logits are divided by it.
        vocab_size: real vocabulary; rows of the whole weight beyond it are padding, even if a rank has no others.
        group: the tensor-parallel group that shares the weight by rows; None for one rank.
        reduce_hidden_grad: sum the gradient of `hidden` over the group. Without it each rank gets what its own columns
            give, for a caller that sums it itself (sequence parallelism scatters it).

    Returns:
        float32 [R] and float32 [R], both differentiable.
    """
    tokens = (positions, targets, temperature, vocab_size, group, reduce_hidden_grad)
    return _ResponseLogProbs.apply(hidden, weight, tokens)


def response_loss(
    hidden: Tensor,
    positions: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    vocab_size: int,
    token_losses: TokenLosses,
    group: dist.ProcessGroup | None = None,
    *,
    reduce_hidden_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss of the response tokens, whose gradients are ready when it returns.

    Args:
        token_losses: called once for every chunk of consecutive response tokens. The loss of a token must not depend on
            other tokens. A token whose log-prob and entropy have no influence on the loss leaves no trace in the
            gradients, even if its hidden state is NaN; a chunk of such tokens costs no gradient.
        Everything else is `response_log_probs`'s.

    Returns:
        The loss, float32 scalar, differentiable once; log-probs and entropies, float32 [R] each, detached.
    """
    tokens = (positions, targets, temperature, vocab_size, group, reduce_hidden_grad)
    with_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _ResponseLoss.apply(hidden, weight, tokens, token_losses, with_gradients)


class _ResponseLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, tokens: tuple) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight)
        ctx.tokens = tokens
        ctx.set_materialize_grads(False)
        chunks = _Chunks(hidden, weight, False, *tokens)
        for rows in chunks.rows:
            chunks.compute(rows)
        return chunks.log_probs, chunks.entropy

    @staticmethod
    def backward(ctx: Any, log_prob_grad: Tensor | None, entropy_grad: Tensor | None) -> tuple:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        chunks = _Chunks(hidden, weight, True, *ctx.tokens)
        for rows in chunks.rows:
            chunks.compute(rows)
            chunks.add_gradients(
                rows,
                None if log_prob_grad is None else log_prob_grad[rows],
                None if entropy_grad is None else entropy_grad[rows],
            )
        hidden_grad, weight_grad = chunks.gradients()
        return _spread(hidden_grad, chunks.positions, hidden.shape), weight_grad, None


class _ResponseLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, tokens: tuple, token_losses: TokenLosses, with_gradients: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        chunks = _Chunks(hidden, weight, with_gradients, *tokens)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for rows in chunks.rows:
            chunks.compute(rows)
            leaves = [
                values[rows].clone().requires_grad_(with_gradients) for values in (chunks.log_probs, chunks.entropy)
            ]
            with torch.set_grad_enabled(with_gradients):
                loss_of_rows = token_losses(leaves[0], leaves[1], rows)
            if with_gradients:
                chunks.add_gradients(rows, *torch.autograd.grad(loss_of_rows, leaves, allow_unused=True))
            loss += loss_of_rows.detach()
        if with_gradients:
            ctx.positions, ctx.shape, ctx.gradients = chunks.positions, hidden.shape, chunks.gradients()
        ctx.mark_non_differentiable(chunks.log_probs, chunks.entropy)
        return loss, chunks.log_probs, chunks.entropy

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor, *_: Any) -> tuple:  # type: ignore[override]
        # Scaled in place and given away: a second backward pass finds nothing.
        assert ctx.gradients is not None, "response_loss allows one backward pass"
        (hidden_grad, weight_grad), ctx.gradients = ctx.gradients, None
        return _spread(hidden_grad.mul_(loss_grad), ctx.positions, ctx.shape), weight_grad.mul_(loss_grad), *[None] * 3


class _Chunks:
    """The computation proper: for each of `rows` in turn `compute` and, if wanted, `add_gradients`; then `gradients`.

    Attributes:
        rows: the chunks, as slices of the response tokens.
        log_probs, entropy: float32 [R], as far as computed.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        with_gradients: bool,
        positions: Tensor,
        targets: Tensor,
        temperature: float,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        reduce_hidden_grad: bool,
    ) -> None:
        assert hidden.dtype == weight.dtype and weight.dtype in (torch.float32, torch.bfloat16), weight.dtype
        rank, ranks = (group.rank(), group.size()) if group is not None else (0, 1)
        columns = min(max(vocab_size - rank * len(weight), 0), len(weight))
        self.hidden, self.weight, self.positions, self.temperature = hidden, weight[:columns], positions, temperature
        self.group, self.reduce_hidden_grad = group if ranks > 1 else None, reduce_hidden_grad
        targets = targets - rank * len(weight)
        self.owned = (targets >= 0) & (targets < columns)
        self.column = targets.clamp(0, max(columns - 1, 0))[:, None]

        self.rows = _split(len(positions), CHUNK_ELEMENTS // len(weight))
        longest = max((rows.stop - rows.start for rows in self.rows), default=0)
        # On a GPU launches cost more than memory traffic.
        self.cached_rows = longest if hidden.is_cuda else min(longest, max(1, CACHED_ELEMENTS // len(weight)))

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=hidden.device)

        self.log_probs, self.entropy, self.log_share = zeros(3, len(positions))
        # The same memory for all chunks: to the CPU, fresh pages cost as much as a pass over them.
        self.logits, self.scratch = zeros(longest, columns), zeros(self.cached_rows, columns)
        if with_gradients:
            self.hidden_grad = zeros(len(positions), hidden.shape[1], dtype=hidden.dtype)
            self.weight_grad = zeros(*weight.shape)
            in_place = hidden.dtype == torch.float32
            self.logits_grad = self.logits if in_place else zeros(longest, columns, dtype=hidden.dtype)

    def compute(self, rows: slice) -> None:
        """Log-probs and entropies of `rows`. Leaves the distribution over this rank's columns behind in `logits`."""
        logits, owned, column = self.logits[: rows.stop - rows.start], self.owned[rows], self.column[rows]
        sums = logits.new_zeros(2, len(logits))
        log_probs, entropy = sums
        log_sum_exp = torch.full_like(entropy, -torch.inf)
        _multiply(self.hidden[self.positions[rows]], self.weight, logits)
        for some in self._cached(len(logits)):
            z = logits[some]
            if self.temperature != 1:
                z.div_(self.temperature)
            if self.group is not None:
                log_sum_exp[some] = z.amax(1)
            log_p = torch.log_softmax(z, 1, out=self.scratch[: len(z)])
            if self.group is not None:
                log_sum_exp[some] -= log_p.amax(1)
            log_probs[some] = torch.where(owned[some], log_p.gather(1, column[some])[:, 0], 0.0)
            p = torch.exp(log_p, out=z)
            entropy[some] = -log_p.mul_(p).sum(1)
        if self.group is not None:
            log_sum_exps = [torch.empty_like(log_sum_exp) for _ in range(self.group.size())]
            dist.all_gather(log_sum_exps, log_sum_exp, group=self.group)
            log_share = log_sum_exp - torch.stack(log_sum_exps).logsumexp(0)
            if len(self.weight):
                log_probs += torch.where(owned, log_share, 0.0)
                entropy.sub_(log_share).mul_(log_share.exp())
            dist.all_reduce(sums, group=self.group)
            self.log_share[rows] = log_share
        self.log_probs[rows], self.entropy[rows] = log_probs, entropy

    def add_gradients(self, rows: slice, log_prob_grad: Tensor | None, entropy_grad: Tensor | None) -> None:
        """Add what `rows`, just computed, contribute, given the upstream gradients [r]; None for zeros."""
        owned, column, log_share = self.owned[rows], self.column[rows], self.log_share[rows]
        if log_prob_grad is None:
            log_prob_grad = torch.zeros_like(log_share)
        live = log_prob_grad != 0 if entropy_grad is None else (log_prob_grad != 0) | (entropy_grad != 0)
        live_rows = int(live.sum())
        if not len(self.weight) or not live_rows:
            return
        # With this rank's p, the gradient of the logits is a p + b p log(p), and at the target a summand more.
        scale = log_share.exp() / self.temperature
        a, b = -scale * log_prob_grad, None
        if entropy_grad is not None:
            b = -scale * entropy_grad
            a += b * (log_share + self.entropy[rows])
        at_target = torch.where(owned, log_prob_grad / self.temperature, 0.0)[:, None]
        logits, logits_grad = self.logits[: len(live)], self.logits_grad[: len(live)]
        for some in self._cached(len(live)):
            p = logits[some]
            if b is None:
                grad = p.mul_(a[some, None])
            else:
                log_p = torch.clamp(p, min=_TINY, out=self.scratch[: len(p)]).log_()
                grad = p.mul_(log_p.mul_(b[some, None]).add_(a[some, None]))
            grad.scatter_add_(1, column[some], at_target[some])
            if live_rows < len(live):
                # Zero times NaN is not zero.
                grad.masked_fill_(~live[some, None], 0.0)
            if logits_grad is not logits:
                logits_grad[some] = grad
        hidden = self.hidden[self.positions[rows]].masked_fill_(~live[:, None], 0.0)
        self.hidden_grad[rows] = logits_grad @ self.weight
        _add_product(logits_grad, hidden, self.weight_grad[: len(self.weight)])

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Of the hidden states that predict, [R, hidden_size], and of the weight. Ends the computation."""
        del self.logits, self.scratch, self.logits_grad
        if self.group is not None and self.reduce_hidden_grad and self.rows:
            dist.all_reduce(self.hidden_grad, group=self.group)
        return self.hidden_grad, self.weight_grad.to(self.weight.dtype)

    def _cached(self, rows: int) -> list[slice]:
        return _split(rows, self.cached_rows) if len(self.weight) else []


def _split(count: int, limit: int) -> list[slice]:
    """The fewest slices of at most `limit`, of nearly equal lengths."""
    parts = -(-count // max(1, limit))
    return [slice(count * i // parts, count * (i + 1) // parts) for i in range(parts)]


def _spread(rows: Tensor, positions: Tensor, shape: torch.Size) -> Tensor:
    """`rows` at `positions`, zeros elsewhere."""
    return rows.new_zeros(shape).index_copy_(0, positions, rows)


def _multiply(hidden: Tensor, weight: Tensor, logits: Tensor) -> None:
    """logits = hidden weight^T in float32: rounded to bfloat16, they would be off by up to 2^-9 of their size."""
    if weight.dtype == torch.float32:
        torch.mm(hidden, weight.T, out=logits)
    elif weight.is_cuda:
        torch.mm(hidden, weight.T, out_dtype=torch.float32, out=logits)
    else:
        hidden = hidden.float()
        with _bfloat16_products():
            for block in _split(len(weight), BLOCK_ELEMENTS // weight.shape[1]):
                torch.mm(hidden, weight[block].float().T, out=logits[:, block])


def _add_product(logits_grad: Tensor, hidden: Tensor, weight_grad: Tensor) -> None:
    """weight_grad += logits_grad^T hidden in float32. A CPU rounds a chunk's product of bfloat16 matrices once more."""
    if hidden.dtype == torch.float32:
        weight_grad.addmm_(logits_grad.T, hidden)
        return
    out_dtype = {"out_dtype": torch.float32} if hidden.is_cuda else {}
    for block in _split(len(weight_grad), BLOCK_ELEMENTS // hidden.shape[1]):
        weight_grad[block] += torch.mm(logits_grad[:, block].T, hidden, **out_dtype)


@contextlib.contextmanager
def _bfloat16_products() -> Iterator[None]:
    """float32 matrices are multiplied as bfloat16 with float32 sums, where the CPU can: exact for values that fit.

    Nothing else gives float32 products of bfloat16 matrices on a CPU faster than float32 itself. The switch belongs to
    the whole process: no other thread should multiply float32 matrices meanwhile.
    """
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
