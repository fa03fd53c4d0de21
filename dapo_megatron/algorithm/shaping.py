"""From the accuracy and the length of a response to its reward (DAPO, arXiv 2503.14476, section 3.4).

Shaping changes rewards only: groups are filtered on raw accuracy.
"""

from __future__ import annotations

from dapo_megatron.config.schema import AlgorithmConfig, OverlongConfig


def overlong_penalty(response_tokens: int, max_response_tokens: int, settings: OverlongConfig) -> float:
    """Soft overlong punishment of a response, <= 0 and scaled by `settings.penalty_factor`.

    With Lmax = max_response_tokens and Lbuf = settings.buffer_tokens: 0 up to Lmax - Lbuf, then
    (Lmax - Lbuf - length) / Lbuf, which is -1 at Lmax; beyond it -1 if `settings.floor`, else the same line.

    Raises:
        ValueError: buffer_tokens outside 1..max_response_tokens.
    """
    buffer_tokens = settings.buffer_tokens
    if not 1 <= buffer_tokens <= max_response_tokens:
        raise ValueError(
            f"algorithm.overlong.buffer_tokens must be between 1 and the longest response "
            f"({max_response_tokens} tokens), got {buffer_tokens}"
        )
    excess_tokens = response_tokens - (max_response_tokens - buffer_tokens)
    if excess_tokens <= 0:
        return 0.0
    if settings.floor:
        excess_tokens = min(excess_tokens, buffer_tokens)
    return -excess_tokens / buffer_tokens * settings.penalty_factor


def shaped_reward(
    accuracy: float, response_tokens: int, max_response_tokens: int | None, settings: AlgorithmConfig
) -> float:
    """Reward of a sample: the base reward of its accuracy plus, if asked for, the overlong penalty.

    Args:
        accuracy: 1.0 right, 0.0 wrong; in between the base reward is interpolated.
        response_tokens: length of the response.
        max_response_tokens: Lmax where `settings.overlong.max_response_tokens` does not set it.
        settings: base rewards and the penalty.

    Raises:
        ValueError: the penalty is on and no maximum length is known.
    """
    base = accuracy * settings.reward.right + (1 - accuracy) * settings.reward.wrong
    if not settings.overlong.penalty:
        return base
    limit = settings.overlong.max_response_tokens or max_response_tokens
    if limit is None:
        raise ValueError(
            "algorithm.overlong.penalty needs a longest response: set algorithm.overlong.max_response_tokens "
            "or rollout.max_response_tokens, or turn the penalty off"
        )
    return base + overlong_penalty(response_tokens, limit, settings.overlong)


def is_trained(finish_reason: str, settings: OverlongConfig) -> bool:
    """Whether a sample is trained on: overlong filtering masks truncated ones (they stay in the group statistics)."""
    return not (settings.filter and finish_reason == "length")
