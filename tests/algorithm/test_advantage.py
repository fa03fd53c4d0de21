"""Group advantages against plain formulas."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.algorithm.advantage import group_advantages
from dapo_megatron.config.schema import AdvantageConfig, Baseline

rewards_strategy = st.lists(st.floats(-2, 2), min_size=2, max_size=16)


@given(rewards_strategy, st.sampled_from(Baseline), st.booleans())
def test_formula(rewards: list[float], baseline: Baseline, divide_by_std: bool) -> None:
    advantages = group_advantages(rewards, AdvantageConfig(baseline, divide_by_std))
    if len(set(rewards)) == 1:
        assert advantages == [0.0] * len(rewards)
        return
    mean = statistics.fmean(rewards)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    for i, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True)):
        others = rewards[:i] + rewards[i + 1 :]
        expected = reward - (statistics.fmean(others) if baseline == Baseline.leave_one_out else mean)
        if divide_by_std:
            expected /= std + 1e-6
        assert advantage == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.floats(-2, 2), st.integers(2, 16), st.sampled_from(Baseline), st.booleans())
def test_equal_rewards_are_exactly_zero(reward: float, n: int, baseline: Baseline, divide_by_std: bool) -> None:
    assert group_advantages([reward] * n, AdvantageConfig(baseline, divide_by_std)) == [0.0] * n


@given(st.floats(-2, 2), st.sampled_from(Baseline), st.booleans())
def test_a_group_of_one_has_its_reward(reward: float, baseline: Baseline, divide_by_std: bool) -> None:
    assert group_advantages([reward], AdvantageConfig(baseline, divide_by_std)) == [reward]


def test_one_right_of_four_by_hand() -> None:
    rewards = [1.0, -1.0, -1.0, -1.0]
    assert group_advantages(rewards, AdvantageConfig()) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)
    assert group_advantages(rewards, AdvantageConfig(divide_by_std=False)) == [1.5, -0.5, -0.5, -0.5]
    assert group_advantages(rewards, AdvantageConfig(Baseline.leave_one_out, False)) == pytest.approx(
        [2.0, -2 / 3, -2 / 3, -2 / 3]
    )
