"""A reward that a random policy can learn in a few steps."""

from __future__ import annotations

from dapo_megatron.reward.scorer import ScoringInput


def starts_with_a_digit(samples: list[ScoringInput]) -> list[float]:
    """Right iff the first character is a digit."""
    return [float(sample.response[:1].isdigit()) for sample in samples]
