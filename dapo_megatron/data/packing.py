"""Which samples share a micro-batch, and which rank computes it: a pure plan.

Invariants of `plan_micro_batches`:
  - every sample is in exactly one micro-batch of one rank;
  - a micro-batch holds at most `max_tokens`, unless it is a single longer sample;
  - every rank has the same number of micro-batches (some are empty when there are fewer samples than that);
  - inside a micro-batch samples keep their order; the plan is a function of its arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def plan_micro_batches(lengths: Sequence[int], ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Pack samples into micro-batches and deal these to the data-parallel ranks.

    Args:
        lengths: tokens of each sample.
        ranks: data-parallel size.
        max_tokens: most tokens of a micro-batch.

    Returns:
        plan[rank][micro_batch] -> indices into `lengths`.
    """
    assert ranks >= 1 and max_tokens >= 1
    count = max(1, -(-sum(lengths) // max_tokens))
    while True:
        count += -count % ranks
        bins = _spread(lengths, count, max_tokens)
        if bins is not None:
            break
        count += ranks
    bins.sort(key=lambda members: (-sum(lengths[i] for i in members), members))
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    for first in range(0, count, ranks):
        row = bins[first : first + ranks]
        # Alternate the direction so that no rank always takes the heaviest of a row.
        for rank, members in zip(range(ranks), reversed(row) if (first // ranks) % 2 else row, strict=True):
            plan[rank].append(members)
    return plan


def _spread(lengths: Sequence[int], count: int, max_tokens: int) -> list[list[int]] | None:
    """Longest first into the emptiest of `count` bins; None if a bin would overflow with more than one sample."""
    heap: list[tuple[int, int]] = [(0, b) for b in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, chosen = heapq.heappop(heap)
        if bins[chosen] and tokens + lengths[index] > max_tokens:
            return None
        bins[chosen].append(index)
        heapq.heappush(heap, (tokens + lengths[index], chosen))
    return [sorted(members) for members in bins]
