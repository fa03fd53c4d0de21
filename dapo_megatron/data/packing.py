"""Which samples share a micro-batch, and which rank computes it: a pure plan.

Micro-batches hold whole sequences one behind the other, so that the only padding is what layout and precision demand
(`Alignment`). Invariants of `plan_micro_batches`:
  - every sample is in exactly one micro-batch of one rank;
  - a micro-batch holds at most `max_tokens`, padding included, unless it is a single longer sample;
  - every rank has the same number of micro-batches, at least one, a multiple of `count_multiple`; some are empty when
    there are fewer samples than that;
  - that number is the least for which first-fit-decreasing has bins enough, over all ranks;
  - inside a micro-batch samples keep their order; the plan is a function of its arguments;
  - `balanced`: the heaviest rank is within `EVEN_ENOUGH` of the mean, or no exchange with another rank (of two samples,
    or of one for none) would help that leaves both lighter than it and their micro-batches within the cap.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dapo_megatron.config.schema import Config, Packing

FP8_ALIGNMENT_TOKENS = {None: 1, "delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}
"""Multiple of the tokens in a matrix product that each FP8 recipe demands."""

EVEN_ENOUGH = 1.001
"""Heaviest rank over the mean at which exchanging samples between ranks stops."""

_LEAST_GAIN = 1e-6
"""Of the mean: an exchange must lighten the heaviest rank by more, so that rounding cannot keep exchanges going."""

Bin = list[int]
"""The samples of a micro-batch, as indices."""


@dataclass(frozen=True)
class Alignment:
    """What layout and precision demand of token counts.

    Attributes:
        sequence: each sequence is padded to a multiple of it.
        micro_batch: the tokens of a micro-batch are padded to a multiple of it, itself a multiple of `sequence`.
    """

    sequence: int = 1
    micro_batch: int = 1


def alignment_of(config: Config) -> Alignment:
    """Context parallelism deals every sequence out in 2 x CP chunks (zig-zag); of what a rank then holds, sequence
    parallelism takes TP equal parts and an FP8 product a multiple of its block."""
    parallel = config.parallel
    fp8_tokens = FP8_ALIGNMENT_TOKENS[config.precision.fp8.recipe]
    held = math.lcm(parallel.tensor if parallel.sequence_parallel else 1, fp8_tokens)
    sequence = 2 * parallel.context if parallel.context > 1 else 1
    return Alignment(sequence, math.lcm(sequence, parallel.context * held))


def plan_micro_batches(
    lengths: Sequence[int],
    ranks: int,
    max_tokens: int,
    *,
    alignment: Alignment | None = None,
    cost: Callable[[int], float] = float,
    count_multiple: int = 1,
    packing: Packing = Packing.balanced,
) -> list[list[Bin]]:
    """Pack samples into micro-batches and deal these to the data-parallel ranks.

    Args:
        lengths: tokens of each sample.
        ranks: data-parallel size.
        max_tokens: most tokens of a micro-batch.
        alignment: see Alignment; none by default.
        cost: work of a sequence of so many tokens (models.flops.SequenceCost); its tokens by default.
        count_multiple: what the micro-batches of a rank must be divisible by (PP with virtual stages).
        packing: see Packing.

    Returns:
        plan[rank][micro_batch] -> indices into `lengths`, heavy micro-batches first.
    """
    assert ranks >= 1 and max_tokens >= 1 and count_multiple >= 1
    alignment = alignment or Alignment()
    tokens = np.array([_round_up(length, alignment.sequence) for length in lengths], np.int64)
    costs = np.array([cost(int(length)) for length in tokens], np.float64)
    # What fits into the largest aligned total fits into `max_tokens` after alignment.
    capacity = max_tokens // alignment.micro_batch * alignment.micro_batch

    bins = _first_fit_decreasing(tokens, capacity)
    count = _round_up(max(1, len(bins)), ranks * count_multiple)
    if packing is Packing.balanced:
        bins = _spread(tokens, count, capacity) or bins
    bins += [[] for _ in range(count - len(bins))]
    plan = _deal(bins, ranks, costs)
    if packing is Packing.balanced:
        _even_out(plan, tokens, costs, capacity)
    return [[sorted(members) for members in share] for share in plan]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _first_fit_decreasing(tokens: np.ndarray, capacity: int) -> list[Bin]:
    """Longest first into the first bin with room, or a new one: at most 11/9 of the fewest bins (+ 6/9)."""
    room = np.zeros(len(tokens), np.int64)
    bins: list[Bin] = []
    for index in np.argsort(-tokens, kind="stable"):
        fits = room[: len(bins)] >= tokens[index]
        chosen = int(fits.argmax()) if fits.any() else len(bins)
        if chosen == len(bins):
            bins.append([])
            room[chosen] = capacity
        bins[chosen].append(int(index))
        room[chosen] -= tokens[index]
    return bins


def _spread(tokens: np.ndarray, count: int, capacity: int) -> list[Bin] | None:
    """Longest first into the emptiest of `count` bins; None if a bin would overflow with more than one sample."""
    heap = [(0, b) for b in range(count)]
    bins: list[Bin] = [[] for _ in range(count)]
    for index in np.argsort(-tokens, kind="stable"):
        held, chosen = heap[0]
        if bins[chosen] and held + tokens[index] > capacity:
            return None
        bins[chosen].append(int(index))
        heapq.heapreplace(heap, (held + int(tokens[index]), chosen))
    return bins


def _deal(bins: list[Bin], ranks: int, costs: np.ndarray) -> list[list[Bin]]:
    """Row by row, heavy rows first: the heaviest bin of a row to the rank with the least work so far."""
    work = {b: float(costs[members].sum()) for b, members in enumerate(bins)}
    heaviest_first = sorted(work, key=lambda b: -work[b])
    plan: list[list[Bin]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for row in range(0, len(bins), ranks):
        lightest_first = sorted(range(ranks), key=load.__getitem__)
        for rank, b in zip(lightest_first, heaviest_first[row : row + ranks], strict=True):
            plan[rank].append(bins[b])
            load[rank] += work[b]
    return plan


def _even_out(plan: list[list[Bin]], tokens: np.ndarray, costs: np.ndarray, capacity: int) -> None:
    """Exchange samples between the heaviest rank and the lightest that can take some of its work, while that helps."""
    load = np.array([sum(costs[members].sum() for members in share) for share in plan])
    mean = load.mean()
    while load.max() > EVEN_ENOUGH * mean:
        heavy = int(load.argmax())
        for light in np.argsort(load, kind="stable"):
            gap = float(load[heavy] - load[light])
            moved = _exchange(plan[heavy], plan[light], tokens, costs, capacity, gap, _LEAST_GAIN * mean)
            if moved:
                load[[heavy, light]] += [-moved, moved]
                break
        else:
            return


def _exchange(
    heavy: list[Bin], light: list[Bin], tokens: np.ndarray, costs: np.ndarray, capacity: int, gap: float, least: float
) -> float:
    """Do the exchange (one sample for one, or for none) that comes nearest to moving half of the two ranks' `gap`.

    Returns the work moved; 0 if no exchange within the cap lightens the heavier rank by `least`.
    """
    nothing = len(tokens)  # Costs nothing: the sample that a rank gives back when it gives none.
    tokens, costs = np.append(tokens, 0), np.append(costs, 0.0)
    given = [(b, i) for b, members in enumerate(heavy) for i in members]
    taken = [(b, i) for b, members in enumerate(light) for i in (*members, nothing)]
    give_bin, give = np.array(given).T
    take_bin, take = np.array(taken).T
    give_room = capacity - np.array([tokens[members].sum() for members in heavy])[give_bin]
    take_room = capacity - np.array([tokens[members].sum() for members in light])[take_bin]
    growth = tokens[give][:, None] - tokens[take]
    work = costs[give][:, None] - costs[take]
    allowed = (growth <= take_room) & (-growth <= give_room[:, None]) & (work > least) & (work < gap - least)
    if not allowed.any():
        return 0.0
    i, j = np.unravel_index(np.where(allowed, np.abs(work - gap / 2), np.inf).argmin(), work.shape)
    heavy[give_bin[i]].remove(give[i])
    light[take_bin[j]].append(int(give[i]))
    if take[j] != nothing:
        light[take_bin[j]].remove(take[j])
        heavy[give_bin[i]].append(int(take[j]))
    return float(work[i, j])
