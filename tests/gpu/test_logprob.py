"""The log-prob function on a GPU: what it holds, against materialised logits."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest
import torch

from dapo_megatron.megatron.logprob import response_loss

TOKENS, HIDDEN, VOCAB = 4096, 1024, 152_064


def peak_and_time(run: Callable[[], torch.Tensor]) -> tuple[int, float, torch.Tensor]:
    run()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    began = time.perf_counter()
    loss = run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, time.perf_counter() - began, loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_memory_and_time_against_materialised_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(VOCAB, HIDDEN, device="cuda") / HIDDEN**0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,), device="cuda")
    positions = torch.arange(TOKENS, device="cuda")

    def token_losses(log_probs: torch.Tensor, entropy: torch.Tensor, rows: slice) -> torch.Tensor:
        return log_probs.sum() - 0.1 * entropy.sum()

    def ours() -> torch.Tensor:
        hidden.grad = weight.grad = None
        loss, _, _ = response_loss(hidden, positions, weight, targets, 1.0, VOCAB, token_losses)
        loss.backward()
        return loss.detach()

    def materialised() -> torch.Tensor:
        hidden.grad = weight.grad = None
        log_p = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        loss = token_losses(log_p.gather(1, targets[:, None])[:, 0], entropy, slice(None))
        loss.backward()
        return loss.detach()

    peak, time_s, loss = peak_and_time(ours)
    gradient = hidden.grad.float().clone()  # type: ignore[union-attr]
    other_peak, other_time_s, other_loss = peak_and_time(materialised)
    print(f"\n{dtype}: memory {peak / other_peak:.1%}, time {time_s / other_time_s:.2f}x of materialised logits")
    torch.testing.assert_close(loss, other_loss, rtol=1e-3, atol=0)
    similarity = torch.nn.functional.cosine_similarity(gradient, hidden.grad.float(), dim=-1)  # type: ignore[union-attr]
    assert similarity.min() > 0.99
    assert peak <= 0.15 * other_peak
