"""Group-relative advantages (GRPO, arXiv 2402.03300; DAPO, arXiv 2503.14476, equation 9)."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from statistics import stdev

from dapo_megatron.config.schema import AdvantageConfig, Baseline

STD_EPS = 1e-6
"""Added to the group's standard deviation."""


def group_advantages(rewards: Sequence[float], settings: AdvantageConfig) -> list[float]:
    """Advantage of each sample of one group: (R_i - baseline_i) / (std + 1e-6), std with n - 1.

    The baseline is the mean of the group, or with `leave_one_out` the mean of the others; without
    `divide_by_std` (Dr.GRPO) nothing is divided. n equal rewards give exactly 0; a group of one gives A = R.
    """
    n = len(rewards)
    if n == 1:
        return [float(rewards[0])]
    # By equality: the std of equal rewards may be float noise, which the division would blow up.
    if all(reward == rewards[0] for reward in rewards):
        return [0.0] * n
    total = fsum(rewards)
    if settings.baseline == Baseline.leave_one_out:
        centred = [reward - (total - reward) / (n - 1) for reward in rewards]
    else:
        centred = [reward - total / n for reward in rewards]
    divisor = stdev(rewards) + STD_EPS if settings.divide_by_std else 1.0
    return [value / divisor for value in centred]
