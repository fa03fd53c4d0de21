"""The loss equals the plain reference, for any split, order and packing, whatever stands at untrained positions."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import plain_loss as plain
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_loss import Row
from torch import Tensor

from dapo_megatron.algorithm.loss import LossOutput, kl_estimate, loss_metrics, policy_loss, token_weights
from dapo_megatron.config.schema import Aggregation, AlgorithmConfig, ClipConfig, KLConfig, KLEstimator

NORM_TOKENS = 7


@st.composite
def settings_strategy(draw: st.DrawFn) -> AlgorithmConfig:
    return AlgorithmConfig(
        clip=ClipConfig(
            low=draw(st.floats(0.05, 0.9)),
            high=draw(st.floats(0.05, 2.0)),
            dual=draw(st.none() | st.floats(1.1, 10.0)),
        ),
        aggregation=draw(st.sampled_from(Aggregation)),
        kl=KLConfig(draw(st.sampled_from([0.0, 0.1])), draw(st.sampled_from([KLEstimator.k2, KLEstimator.k3]))),
        entropy_coefficient=draw(st.sampled_from([0.0, 0.05])),
    )


@st.composite
def rows_strategy(draw: st.DrawFn) -> list[Row]:
    """1-4 groups of 1-3 samples of 1-6 tokens; some samples, groups or updates have no trained token."""
    random_source = random.Random(draw(st.integers(0, 2**32)))

    def numbers(length: int, low: float, high: float) -> list[float]:
        return [random_source.uniform(low, high) for _ in range(length)]

    rows = []
    for group in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(1, 3))):
            length = draw(st.integers(1, 6))
            rows.append(
                Row(
                    group=group,
                    log_probs=numbers(length, -4, 0),
                    old=numbers(length, -4, 0),
                    rollout=numbers(length, -4, 0),
                    reference=numbers(length, -4, 0),
                    entropy=numbers(length, 0, 3),
                    mask=draw(st.lists(st.booleans(), min_size=length, max_size=length)),
                    advantage=draw(st.sampled_from([-1.3, 0.0, 0.7])),
                    correction=numbers(length, 0, 2),
                )
            )
    return rows


class Update:
    """Rows as tensors: one leaf for all log-probs and one for all entropies, cut into micro-batches at will."""

    def __init__(self, rows: list[Row], settings: AlgorithmConfig, poison: float = 0.0) -> None:
        self.rows, self.settings, self.poison = rows, settings, poison
        self.log_probs = self.tensor([value for row in rows for value in row.log_probs]).requires_grad_()
        self.entropy = self.tensor([value for row in rows for value in row.entropy]).requires_grad_()
        self.mask = torch.tensor([trained for row in rows for trained in row.mask])
        if poison:
            with torch.no_grad():
                self.log_probs[~self.mask] = poison
                self.entropy[~self.mask] = poison
        self.weights = token_weights(
            settings.aggregation, [sum(row.mask) for row in rows], [row.group for row in rows], NORM_TOKENS
        )

    @staticmethod
    def tensor(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    def micro_batch(self, samples: list[int]) -> LossOutput:
        starts = [sum(len(row.mask) for row in self.rows[:i]) for i in range(len(self.rows))]
        places = torch.tensor([starts[i] + t for i in samples for t in range(len(self.rows[i].mask))])
        mask = self.mask[places]

        def column(name: str) -> Tensor:
            values = self.tensor([value for i in samples for value in getattr(self.rows[i], name)])
            return torch.where(mask, values, self.poison) if self.poison else values

        def repeated(values: list[float]) -> Tensor:
            column = self.tensor([values[i] for i in samples for _ in self.rows[i].mask])
            return torch.where(mask, column, self.poison) if self.poison else column

        return policy_loss(
            self.log_probs[places],
            column("old"),
            repeated([row.advantage for row in self.rows]),
            mask,
            repeated(self.weights),
            self.settings,
            correction_weights=column("correction") if self.rows[0].correction else None,
            reference_log_probs=column("reference"),
            entropy=self.entropy[places],
        )

    def run(self, micro_batches: list[list[int]] | None = None) -> tuple[float, Tensor, dict[str, float]]:
        """Loss, gradient of (log_probs, entropy) in row order, metrics; summed over the micro-batches."""
        self.log_probs.grad = self.entropy.grad = None
        outputs = [self.micro_batch(samples) for samples in micro_batches or [list(range(len(self.rows)))]]
        for output in outputs:
            output.loss.backward()
        assert self.log_probs.grad is not None
        entropy_grad = torch.zeros_like(self.entropy) if self.entropy.grad is None else self.entropy.grad
        sums = {name: sum(output.sums[name].item() for output in outputs) for name in outputs[0].sums}
        gradient = torch.cat([self.log_probs.grad, entropy_grad])
        return sum(output.loss.item() for output in outputs), gradient, loss_metrics(sums)


@given(rows_strategy(), settings_strategy())
def test_loss_and_metrics_equal_the_plain_reference(rows: list[Row], settings: AlgorithmConfig) -> None:
    loss, _, metrics = Update(rows, settings).run()
    assert loss == pytest.approx(plain.update_loss(rows, settings, NORM_TOKENS), rel=1e-9, abs=1e-12)
    expected = plain.update_metrics(rows, settings)
    if expected:
        assert metrics.pop("policy/loss") == pytest.approx(loss)
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(rows_strategy(), settings_strategy())
def test_gradient_equals_central_differences_of_the_plain_reference(rows: list[Row], settings: AlgorithmConfig) -> None:
    _, gradient, _ = Update(rows, settings).run()
    place, step = 0, 1e-6
    for i, row in enumerate(rows):
        for t in range(len(row.mask)):
            shifted = []
            for sign in (1, -1):
                moved = [value + sign * step * (u == t) for u, value in enumerate(row.log_probs)]
                changed = [*rows[:i], replace(row, log_probs=moved), *rows[i + 1 :]]
                shifted.append(plain.update_loss(changed, settings, NORM_TOKENS))
            numeric = (shifted[0] - shifted[1]) / (2 * step)
            ratio = math.exp(row.log_probs[t] - row.old[t])
            kinks = [1 - settings.clip.low, 1 + settings.clip.high, settings.clip.dual or 0]
            k3 = plain.kl(row.log_probs[t], row.reference[t], "k3")
            if min(abs(ratio - kink) for kink in kinks) > 1e-4 and abs(k3 - 10) > 1e-3:
                assert gradient[place].item() == pytest.approx(numeric, rel=1e-4, abs=1e-7)
            place += 1


@given(rows_strategy(), settings_strategy(), st.data())
def test_micro_batches_and_sample_order_change_nothing(
    rows: list[Row], settings: AlgorithmConfig, data: st.DataObject
) -> None:
    update = Update(rows, settings)
    loss, gradient, metrics = update.run()
    order = data.draw(st.permutations(range(len(rows))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(rows)))))
    bounds = zip([0, *cuts], [*cuts, len(rows)], strict=True)
    split = [list(order[start:stop]) for start, stop in bounds if start < stop]
    split_loss, split_gradient, split_metrics = update.run(split)
    assert split_loss == pytest.approx(loss, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(split_gradient, gradient, rtol=1e-9, atol=1e-12)
    assert split_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)

    # The denominators do not depend on the order of the samples either.
    shuffled = token_weights(
        settings.aggregation, [sum(rows[i].mask) for i in order], [rows[i].group for i in order], NORM_TOKENS
    )
    assert shuffled == [update.weights[i] for i in order]


@given(rows_strategy(), settings_strategy(), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_stands_at_untrained_positions_changes_nothing(
    rows: list[Row], settings: AlgorithmConfig, poison: float
) -> None:
    loss, gradient, metrics = Update(rows, settings).run()
    poisoned_loss, poisoned_gradient, poisoned_metrics = Update(rows, settings, poison).run()
    assert poisoned_loss == loss
    assert torch.equal(poisoned_gradient, gradient)
    assert poisoned_metrics == metrics
    mask = torch.tensor([trained for row in rows for trained in row.mask])
    assert not poisoned_gradient[~mask.repeat(2)].any()


@given(rows_strategy(), settings_strategy())
def test_on_policy_ratio_is_one_and_nothing_is_clipped(rows: list[Row], settings: AlgorithmConfig) -> None:
    rows = [replace(row, old=row.log_probs, mask=[True] * len(row.mask)) for row in rows]
    metrics = Update(rows, settings).run()[2]
    assert metrics["policy/ratio"] == 1
    assert metrics["policy/kl_old"] == 0
    assert all(metrics[f"policy/clip_fraction_{side}"] == 0 for side in ("low", "high", "dual"))


@given(rows_strategy(), st.integers(1, 5))
def test_token_mean_of_equal_lengths_is_seq_mean_token_mean(rows: list[Row], tokens: int) -> None:
    """Also the prompt mean, for groups of one size; and Dr.GRPO's with the length as its constant."""
    groups = [row.group for row in rows]
    lengths = [tokens] * len(rows)
    expected = token_weights(Aggregation.token_mean, lengths, groups)
    assert token_weights(Aggregation.seq_mean_token_mean, lengths, groups) == pytest.approx(expected)
    assert token_weights(Aggregation.seq_mean_token_sum_norm, lengths, groups, tokens) == pytest.approx(expected)
    assert token_weights(Aggregation.prompt_token_mean, lengths, range(len(rows))) == pytest.approx(expected)


def test_wide_clip_on_policy_gives_the_reinforce_gradient() -> None:
    torch.manual_seed(0)
    logits = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
    actions, advantages = torch.randint(5, (12,)), torch.randn(12, dtype=torch.float64)
    settings = AlgorithmConfig(clip=ClipConfig(low=math.inf, high=math.inf, dual=None))

    def log_probs() -> Tensor:
        return logits.log_softmax(-1)[torch.arange(12), actions]

    weights = torch.full((12,), 1 / 12, dtype=torch.float64)
    mask = torch.ones(12, dtype=torch.bool)
    (ours,) = torch.autograd.grad(
        policy_loss(log_probs(), log_probs(), advantages, mask, weights, settings).loss, logits
    )
    (reinforce,) = torch.autograd.grad(-(advantages * log_probs()).mean(), logits)
    torch.testing.assert_close(ours, reinforce, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "clipped"),
    [
        (math.log(1.5), 1.0, -1.28, "high"),
        (math.log(1.5), -1.0, 1.5, None),
        (math.log(0.5), -1.0, 0.8, "low"),
        (math.log(0.5), 1.0, -0.5, None),
        (math.log(50.0), -1.0, 10.0, "dual"),
        (math.log(50.0), 1.0, -1.28, "high"),
        (100.0, -1.0, 10.0, "dual"),
        (-math.inf, -2.0, 1.6, "low"),
        (math.log(1.5), 0.0, 0.0, None),
    ],
)
def test_clip_by_hand(log_ratio: float, advantage: float, loss: float, clipped: str | None) -> None:
    one = torch.ones(1, dtype=torch.float64)
    output = policy_loss(one * log_ratio, one * 0, one * advantage, one.bool(), one, AlgorithmConfig())
    assert output.loss.item() == pytest.approx(loss)
    metrics = loss_metrics({name: value.item() for name, value in output.sums.items()})
    for side in ("low", "high", "dual"):
        assert metrics[f"policy/clip_fraction_{side}"] == (side == clipped)


def test_samples_without_trained_tokens_do_not_count() -> None:
    for aggregation in Aggregation:
        with_empty = token_weights(aggregation, [3, 0, 5, 0], ["a", "a", "b", "c"], NORM_TOKENS)
        without = token_weights(aggregation, [3, 5], ["a", "b"], NORM_TOKENS)
        assert with_empty == [without[0], 0.0, without[1], 0.0]
        assert token_weights(aggregation, [0, 0], ["a", "b"], NORM_TOKENS) == [0.0, 0.0]
        assert token_weights(aggregation, [], [], NORM_TOKENS) == []


def test_update_without_trained_tokens_has_no_metrics_and_no_gradient() -> None:
    log_probs = torch.zeros(3, requires_grad=True)
    output = policy_loss(
        log_probs, torch.zeros(3), torch.ones(3), torch.zeros(3, dtype=torch.bool), torch.ones(3), AlgorithmConfig()
    )
    output.loss.backward()
    assert output.loss.item() == 0
    assert log_probs.grad is not None and not log_probs.grad.any()
    assert loss_metrics({name: value.item() for name, value in output.sums.items()}) == {}


@pytest.mark.parametrize("loss_norm_tokens", [None, 0, -1])
def test_norm_aggregation_needs_its_constant(loss_norm_tokens: int | None) -> None:
    with pytest.raises(ValueError, match="loss_norm_tokens > 0"):
        token_weights(Aggregation.seq_mean_token_sum_norm, [1], [0], loss_norm_tokens)


def test_k1_is_refused_as_a_loss_term() -> None:
    one = torch.ones(1)
    settings = AlgorithmConfig(kl=KLConfig(coefficient=0.1, estimator=KLEstimator.k1))
    with pytest.raises(ValueError, match="k2 or k3"):
        policy_loss(one, one, one, one.bool(), one, settings, reference_log_probs=one)


def test_kl_estimators_are_clamped_and_have_the_right_expectation() -> None:
    """Under the policy k1 and k3 average to the true KL; the gradient of k2 averages to the KL's gradient."""
    torch.manual_seed(0)
    logits = (torch.randn(6, dtype=torch.float64) * 0.5).requires_grad_()
    reference = (torch.randn(6, dtype=torch.float64) * 0.5).log_softmax(-1)
    log_probs = logits.log_softmax(-1)
    probs = log_probs.exp().detach()
    true_kl = (log_probs.exp() * (log_probs - reference)).sum()
    for estimator in (KLEstimator.k1, KLEstimator.k3):
        torch.testing.assert_close((probs * kl_estimate(log_probs, reference, estimator)).sum(), true_kl)
    (true_gradient,) = torch.autograd.grad(true_kl, logits, retain_graph=True)
    (gradient,) = torch.autograd.grad((probs * kl_estimate(log_probs, reference, KLEstimator.k2)).sum(), logits)
    torch.testing.assert_close(gradient, true_gradient)

    far = torch.tensor([-500.0, 0.0]), torch.tensor([0.0, -500.0])
    assert kl_estimate(*far, KLEstimator.k1).tolist() == [-20, 20]
    assert kl_estimate(*far, KLEstimator.k2).tolist() == [200, 200]
    assert kl_estimate(*far, KLEstimator.k3).tolist() == [10, 10]
