"""Which samples share a micro-batch, and which rank computes it: a pure plan.

Micro-batches hold whole sequences one behind the other, so that the only padding is what layout and precision demand
(`Alignment`). Invariants of `plan_micro_batches`:
  - every sample is in exactly one micro-batch of one rank;
  - a micro-batch holds at most `max_tokens`, padding included, unless it is a single longer sample;
  - every rank has the same number of micro-batches, at least one, a multiple of `count_multiple`; some are empty when
    there are fewer samples than that;
  - that number is the least multiple whose micro-batches, over all ranks, are enough for first-fit-decreasing;
  - inside a micro-batch samples keep their order; the plan is a function of its arguments;
  - `balanced` never makes the heaviest rank heavier than it was before it exchanged samples between ranks.
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
"""Heaviest rank over the mean at which exchanging samples stops."""

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
    fp8 = getattr(getattr(config.precision, "fp8", None), "recipe", None)
    held = math.lcm(parallel.tensor if parallel.sequence_parallel else 1, FP8_ALIGNMENT_TOKENS[fp8])
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
    costs = np.array([cost(int(length)) for length in tokens])
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
    """Exchange samples (one for one, or one for none) between the heaviest and a lighter rank while that helps."""
    load = np.array([sum(costs[members].sum() for members in share) for share in plan])
    for _ in range(len(tokens)):
        heavy = int(load.argmax())
        if load[heavy] <= EVEN_ENOUGH * load.mean():
            return
        for light in np.argsort(load, kind="stable")[:-1]:
            gap = float(load[heavy] - load[light])
            moved = _exchange(plan[heavy], plan[light], tokens, costs, capacity, gap)
            if moved:
                load[[heavy, light]] += [-moved, moved]
                break
        else:
            return


def _exchange(
    heavy: list[Bin], light: list[Bin], tokens: np.ndarray, costs: np.ndarray, capacity: int, gap: float
) -> float:
    """Do the exchange that comes nearest to moving half of `gap`; returns the work moved, 0 if none is allowed."""
    given = [(b, index) for b, members in enumerate(heavy) for index in members]
    taken = [(b, index) for b, members in enumerate(light) for index in [*members, None]]
    give_tokens, give_cost, give_room = _columns(given, heavy, tokens, costs, capacity)
    take_tokens, take_cost, take_room = _columns(taken, light, tokens, costs, capacity)
    growth = give_tokens[:, None] - take_tokens
    work = give_cost[:, None] - take_cost
    allowed = (growth <= take_room) & (-growth <= give_room[:, None]) & (work > 0) & (work < gap)
    if not allowed.any():
        return 0.0
    best = np.where(allowed, np.abs(work - gap / 2), np.inf).argmin()
    i, j = np.unravel_index(best, work.shape)
    (give_bin, give), (take_bin, take) = given[i], taken[j]
    heavy[give_bin].remove(give)
    light[take_bin].append(give)
    if take is not None:
        light[take_bin].remove(take)
        heavy[give_bin].append(take)
    return float(work[i, j])
