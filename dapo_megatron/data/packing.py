"""Which samples share a micro-batch, and which rank computes it: a pure plan.

Invariants of `plan_micro_batches`:
  - every sample is in exactly one micro-batch of one rank;
  - a micro-batch holds at most `max_tokens`, unless it is a single longer sample;
  - every rank has the same number of micro-batches (some are empty when there are fewer samples than that);
  - inside a micro-batch samples keep their order; the plan is a function of its arguments.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dapo_megatron.config.schema import Config

FP8_ALIGNMENT_TOKENS = {None: 1, "delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}
"""Multiple of the tokens in a matrix product that each FP8 recipe demands."""


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
