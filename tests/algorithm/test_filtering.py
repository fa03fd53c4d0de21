"""The group filter against a plain reference."""

from __future__ import annotations

from fractions import Fraction
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.algorithm.filtering import Outcome, judge_group
from dapo_megatron.config.schema import FilteringConfig

groups = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=16)
ends = st.none() | st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0])


@given(groups)
def test_kept_iff_mixed(accuracies: list[float]) -> None:
    right = 0
    for accuracy in accuracies:
        right += accuracy == 1.0
    if right == len(accuracies):
        expected = Outcome.all_right
    elif right == 0:
        expected = Outcome.all_wrong
    else:
        expected = Outcome.accepted
    assert judge_group(accuracies, FilteringConfig()) == expected
    assert judge_group(accuracies, FilteringConfig(enabled=False)) == Outcome.accepted


@given(groups, ends, ends)
def test_band(accuracies: list[float], low: float | None, high: float | None) -> None:
    if low is None and high is None:
        return
    right = sum(int(accuracy) for accuracy in accuracies)
    rate = right / len(accuracies)
    if (low is None or rate >= low) and (high is None or rate <= high):
        expected = Outcome.accepted
    else:
        expected = {Fraction(1): Outcome.all_right, Fraction(0): Outcome.all_wrong}.get(
            Fraction(right, len(accuracies)), Outcome.outside_band
        )
    settings = FilteringConfig(pass_rate_low=low, pass_rate_high=high)
    assert judge_group(accuracies, settings) == expected


@given(groups, st.randoms())
def test_order_of_samples_is_irrelevant(accuracies: list[float], random_source: Random) -> None:
    shuffled = accuracies.copy()
    random_source.shuffle(shuffled)
    band = FilteringConfig(pass_rate_low=0.2, pass_rate_high=0.8)
    assert judge_group(shuffled, FilteringConfig()) == judge_group(accuracies, FilteringConfig())
    assert judge_group(shuffled, band) == judge_group(accuracies, band)


def test_equal_partial_accuracies_carry_no_signal() -> None:
    assert judge_group([0.5, 0.5], FilteringConfig()) == Outcome.outside_band
    assert judge_group([0.5, 0.6], FilteringConfig()) == Outcome.accepted
