from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.megatron import logprob
from dapo_megatron.megatron.logprob import response_log_probs

HIDDEN, VOCAB, PADDED = 7, 13, 16


def reference(
    hidden: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64, all logits at once."""
    logits = hidden.double()[positions] @ weight[:VOCAB].double().T / temperature
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(0, 9),
    chunk_rows=st.integers(1, 10),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    with_entropy=st.booleans(),
)
def test_values_and_gradients_equal_log_softmax(
    seed: int, rows: int, chunk_rows: int, temperature: float, with_entropy: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(12, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(PADDED, HIDDEN, generator=generator, requires_grad=True)
    positions = torch.randperm(12, generator=generator)[:rows]
    targets = torch.randint(0, VOCAB, (rows,), generator=generator)
    upstream = torch.randn(2, rows, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprob, "CHUNK_ELEMENTS", PADDED * chunk_rows)
        results = response_log_probs(hidden, positions, weight, targets, temperature, VOCAB)
        kept = slice(0, 2 if with_entropy else 1)
        loss = sum((u * r).sum() for u, r in zip(upstream[kept], results[kept], strict=True))
        gradients = torch.autograd.grad(loss, (hidden, weight))
    expected = reference(hidden, positions, weight, targets, temperature)
    expected_loss = sum((u * r).sum() for u, r in zip(upstream[kept], expected[kept], strict=True))
    expected_gradients = torch.autograd.grad(expected_loss, (hidden, weight))
    for got, want in zip([*results, *gradients], [*expected, *expected_gradients], strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-5)


def test_entropy_of_a_large_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 16, generator=generator)
    weight = torch.randn(152_064, 16, generator=generator)
    _, entropy = response_log_probs(hidden, torch.arange(3), weight, torch.zeros(3, dtype=torch.int64), 1.0, 152_064)
    log_p = (hidden.double() @ weight.double().T).log_softmax(-1)
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(-1), rtol=1e-4, atol=1e-6)


def test_a_certain_token_has_log_prob_zero_and_entropy_zero() -> None:
    hidden, weight = torch.ones(1, 2), torch.tensor([[500.0, 500.0], [-500.0, -500.0]])
    log_probs, entropy = response_log_probs(hidden, torch.tensor([0]), weight, torch.tensor([0]), 1.0, 2)
    assert log_probs.item() == 0.0 and entropy.item() == 0.0


def test_bfloat16_operands_give_float32_accuracy() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 64, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(VOCAB, 64, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(0, VOCAB, (20,), generator=generator)
    log_probs, _ = response_log_probs(hidden, torch.arange(20), weight, targets, 1.0, VOCAB)
    expected, _ = reference(hidden, torch.arange(20), weight, targets, 1.0)
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(log_probs.sum(), (hidden, weight))
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients)
