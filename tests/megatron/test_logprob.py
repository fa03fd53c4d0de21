from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.algorithm.loss import policy_loss
from dapo_megatron.config.schema import AlgorithmConfig
from dapo_megatron.megatron import logprob
from dapo_megatron.megatron.logprob import response_log_probs, response_loss

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
        patch.setattr(logprob, "CACHED_ELEMENTS", PADDED * 2)
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


@pytest.mark.parametrize("offset", [0.0, 300.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_bfloat16_operands_give_float32_accuracy(
    temperature: float, offset: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits far from zero and nearly certain tokens included, for which rounded logits would be useless."""
    monkeypatch.setattr(logprob, "BLOCK_ELEMENTS", 64 * 5)
    precision = torch.backends.mkldnn.matmul.fp32_precision
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 64, generator=generator)
    hidden[:, 0] = offset
    hidden = hidden.bfloat16()
    weight = torch.randn(VOCAB, 64, generator=generator)
    weight[:, 0] = 1.0
    weight = weight.bfloat16()
    targets = torch.randint(0, VOCAB, (20,), generator=generator)
    log_probs, entropy = response_log_probs(hidden, torch.arange(20), weight, targets, temperature, VOCAB)
    expected_log_probs, expected_entropy = reference(hidden, torch.arange(20), weight, targets, temperature)
    assert expected_entropy.min() < 1e-3
    rounding = 2**-20 * (offset + 50) / temperature  # of a sum of 64 products of that size
    torch.testing.assert_close(log_probs.double(), expected_log_probs, rtol=1e-6, atol=rounding)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=20 * rounding, atol=1e-6)
    assert torch.backends.mkldnn.matmul.fp32_precision == precision


@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.3])
def test_bfloat16_gradients_are_closer_to_float64_than_those_of_autograd(
    entropy_coefficient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several chunks and blocks: a chunk's share of the gradient is rounded, the logits are not."""
    monkeypatch.setattr(logprob, "CHUNK_ELEMENTS", PADDED * 32)
    monkeypatch.setattr(logprob, "BLOCK_ELEMENTS", 64 * 5)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, 64, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(PADDED, 64, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(0, VOCAB, (200,), generator=generator)
    upstream = torch.randn(200, generator=generator)
    tokens = (hidden, torch.arange(200), weight, targets, 1.0)

    def token_losses(log_probs: torch.Tensor, entropy: torch.Tensor, rows: slice) -> torch.Tensor:
        return (upstream[rows] * (log_probs + entropy_coefficient * entropy)).sum()

    def gradients(loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(loss, (hidden, weight))

    exact = gradients(token_losses(*reference(*tokens), slice(None)))
    log_p = torch.nn.functional.linear(hidden, weight[:VOCAB]).float().log_softmax(-1)
    log_probs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    ordinary = gradients(token_losses(log_probs, entropy, slice(None)))
    inside = gradients(response_loss(*tokens, VOCAB, token_losses)[0])
    behind = gradients(token_losses(*response_log_probs(*tokens, VOCAB), slice(None)))
    for got in (inside, behind):
        for mine, theirs, want in zip(got, ordinary, exact, strict=True):
            assert mine.dtype == torch.bfloat16
            assert (mine - want).norm() < 0.8 * (theirs - want).norm()


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(0, 9),
    chunk_rows=st.integers(1, 10),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    entropy_coefficient=st.sampled_from([0.0, 0.3]),
    kl_coefficient=st.sampled_from([0.0, 0.2]),
)
def test_loss_in_the_forward_pass_equals_loss_behind_it(
    seed: int, rows: int, chunk_rows: int, temperature: float, entropy_coefficient: float, kl_coefficient: float
) -> None:
    """The policy loss, in float64 on all logits at once."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(12, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(PADDED, HIDDEN, generator=generator, requires_grad=True)
    positions = torch.randperm(12, generator=generator)[:rows]
    targets = torch.randint(0, VOCAB, (rows,), generator=generator)
    old, reference_log_probs, advantages, weights = torch.randn(4, rows, generator=generator)
    old -= 3
    mask = torch.rand(rows, generator=generator) < 0.7
    algorithm = AlgorithmConfig(entropy_coefficient=entropy_coefficient)
    algorithm.kl.coefficient = kl_coefficient

    def token_losses(log_probs: torch.Tensor, entropy: torch.Tensor, chosen: slice) -> torch.Tensor:
        return policy_loss(
            log_probs,
            old[chosen].to(log_probs.dtype),
            advantages[chosen],
            mask[chosen],
            weights[chosen],
            algorithm,
            reference_log_probs=(reference_log_probs - 3)[chosen].to(log_probs.dtype),
            entropy=entropy if entropy_coefficient else entropy.detach(),
        ).loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprob, "CHUNK_ELEMENTS", PADDED * chunk_rows)
        patch.setattr(logprob, "CACHED_ELEMENTS", PADDED * 2)
        results = response_loss(hidden, positions, weight, targets, temperature, VOCAB, token_losses)
        assert not results[1].requires_grad and not results[2].requires_grad
        gradients = torch.autograd.grad(3 * results[0], (hidden, weight))
    expected = reference(hidden, positions, weight, targets, temperature)
    loss = token_losses(*expected, slice(None))
    expected_gradients = torch.autograd.grad(3 * loss, (hidden, weight), allow_unused=True)
    for got, want in zip([*results, *gradients], [loss, *expected, *expected_gradients], strict=True):
        want = torch.zeros_like(got) if want is None else want.float()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk_rows", [1, 2, 6])
def test_what_the_loss_does_not_read_leaves_no_trace(chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN hidden state behind the mask, in a chunk of its own or beside others."""
    monkeypatch.setattr(logprob, "CHUNK_ELEMENTS", PADDED * chunk_rows)
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(6, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator, requires_grad=True)
    targets = torch.randint(0, VOCAB, (6,), generator=generator)
    mask = torch.tensor([True, True, False, True, True, False])

    def token_losses(log_probs: torch.Tensor, entropy: torch.Tensor, rows: slice) -> torch.Tensor:
        return torch.where(mask[rows], log_probs, 0.0).sum()

    found = []
    for hidden in (clean.clone(), clean.masked_fill(~mask[:, None], float("nan"))):
        hidden.requires_grad_()
        loss, _, _ = response_loss(hidden, torch.arange(6), weight, targets, 1.0, VOCAB, token_losses)
        found.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_what_is_not_trained_at_all_has_zero_gradients() -> None:
    hidden, weight = torch.full((4, HIDDEN), torch.nan, requires_grad=True), torch.ones(PADDED, HIDDEN).requires_grad_()
    loss, _, _ = response_loss(
        hidden, torch.arange(4), weight, torch.zeros(4, dtype=int), 1.0, VOCAB,
        lambda log_probs, entropy, rows: torch.where(torch.zeros(4, dtype=bool)[rows], log_probs, 0.0).sum(),
    )  # fmt: skip
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not weight.grad.any()


def test_a_loss_that_is_nan_makes_the_gradient_nan() -> None:
    """The guard against non-finite gradients must see it."""
    hidden, weight = torch.randn(4, HIDDEN, requires_grad=True), torch.randn(PADDED, HIDDEN, requires_grad=True)
    loss, _, _ = response_loss(
        hidden, torch.arange(4), weight, torch.zeros(4, dtype=int), 1.0, VOCAB,
        lambda log_probs, entropy, rows: (log_probs * torch.nan).sum(),
    )  # fmt: skip
    loss.backward()
    assert hidden.grad.isnan().all() and weight.grad[:VOCAB].isnan().all()


def test_nothing_is_kept_without_gradients() -> None:
    hidden, weight = torch.randn(4, HIDDEN, requires_grad=True), torch.randn(PADDED, HIDDEN, requires_grad=True)
    with torch.no_grad():
        log_probs, entropy = response_log_probs(hidden, torch.arange(4), weight, torch.zeros(4, dtype=int), 1.0, VOCAB)
    assert log_probs.grad_fn is None and entropy.grad_fn is None
