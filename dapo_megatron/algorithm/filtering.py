"""Dynamic sampling's verdict on a group (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from math import inf
from statistics import fmean

from dapo_megatron.config.schema import FilteringConfig


class Outcome(StrEnum):
    """What becomes of a group. `outside_band` is any rejection that is neither all right nor all wrong."""

    accepted = "accepted"
    all_right = "all_right"
    all_wrong = "all_wrong"
    outside_band = "outside_band"


def judge_group(accuracies: Sequence[float], settings: FilteringConfig) -> Outcome:
    """Whether a group is kept, decided on raw accuracies (before any shaping).

    Kept iff they are not all equal; with a pass-rate band, iff their mean lies in [low, high] (a missing end is open).
    """
    assert accuracies, "a group has at least one sample"
    low, high = settings.pass_rate_low, settings.pass_rate_high
    if not settings.enabled:
        return Outcome.accepted
    if low is None and high is None:
        keep = any(accuracy != accuracies[0] for accuracy in accuracies)
    else:
        keep = (-inf if low is None else low) <= fmean(accuracies) <= (inf if high is None else high)
    if keep:
        return Outcome.accepted
    if all(accuracy == 1 for accuracy in accuracies):
        return Outcome.all_right
    if all(accuracy == 0 for accuracy in accuracies):
        return Outcome.all_wrong
    return Outcome.outside_band
