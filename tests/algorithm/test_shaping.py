"""Rewards: base values, the soft overlong penalty, overlong filtering."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.algorithm.shaping import is_trained, overlong_penalty, shaped_reward
from dapo_megatron.config.schema import AlgorithmConfig, OverlongConfig, RewardShapingConfig


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0), (16384, 0), (16385, -1 / 4096), (18432, -0.5), (20480, -1), (20481, -1), (40960, -1)],
)
def test_dapo_penalty(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, 20480, OverlongConfig()) == pytest.approx(penalty)


@given(st.integers(0, 100), st.integers(1, 50), st.integers(1, 50), st.sampled_from([0.5, 1.0, 2.0]), st.booleans())
def test_penalty_formula(tokens: int, limit: int, buffer_tokens: int, factor: float, floor: bool) -> None:
    settings = OverlongConfig(buffer_tokens=buffer_tokens, penalty_factor=factor, floor=floor)
    if buffer_tokens > limit:
        with pytest.raises(ValueError, match="buffer_tokens must be between"):
            overlong_penalty(tokens, limit, settings)
        return
    if tokens <= limit - buffer_tokens:
        expected = 0.0
    elif tokens <= limit or not floor:
        expected = (limit - buffer_tokens - tokens) / buffer_tokens
    else:
        expected = -1.0
    assert overlong_penalty(tokens, limit, settings) == pytest.approx(expected * factor)


def test_reward_is_base_plus_penalty() -> None:
    settings = AlgorithmConfig(overlong=OverlongConfig(buffer_tokens=4))
    assert shaped_reward(1.0, 4, 8, settings) == 1.0
    assert shaped_reward(1.0, 6, 8, settings) == 0.5
    assert shaped_reward(0.0, 8, 8, settings) == -2.0
    assert shaped_reward(0.25, 1, 8, settings) == -0.5


def test_right_and_wrong_are_exact() -> None:
    settings = AlgorithmConfig(reward=RewardShapingConfig(0.1, -0.3), overlong=OverlongConfig(penalty=False))
    assert shaped_reward(1.0, 10**6, None, settings) == 0.1
    assert shaped_reward(0.0, 10**6, None, settings) == -0.3


def test_the_configured_maximum_comes_first() -> None:
    settings = AlgorithmConfig(overlong=OverlongConfig(max_response_tokens=8, buffer_tokens=4))
    assert shaped_reward(1.0, 6, 100, settings) == shaped_reward(1.0, 6, None, settings) == 0.5


def test_penalty_without_a_known_maximum_is_refused() -> None:
    with pytest.raises(ValueError, match="max_response_tokens"):
        shaped_reward(1.0, 5, None, AlgorithmConfig())


def test_overlong_filtering_masks_only_truncated_samples() -> None:
    assert is_trained("length", OverlongConfig())
    assert is_trained("stop", OverlongConfig(filter=True))
    assert not is_trained("length", OverlongConfig(filter=True))
