"""The invariants that data/packing.py states, one by one, and its alignment rule."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.config.schema import Config, Packing
from dapo_megatron.data.packing import EVEN_ENOUGH, Alignment, alignment_of, plan_micro_batches
from dapo_megatron.models.flops import SequenceCost

LENGTHS = st.lists(st.integers(1, 300), min_size=0, max_size=60)
ALIGNMENTS = st.sampled_from([Alignment(), Alignment(1, 8), Alignment(2, 2), Alignment(4, 32), Alignment(8, 1024)])
CASES = {
    "lengths": LENGTHS,
    "ranks": st.integers(1, 8),
    "max_tokens": st.integers(50, 1000),
    "alignment": ALIGNMENTS,
    "count_multiple": st.integers(1, 4),
    "packing": st.sampled_from(list(Packing)),
}


def allocated(lengths: list[int], members: list[int], alignment: Alignment) -> int:
    """Tokens of a micro-batch with its padding."""
    tokens = sum(math.ceil(lengths[i] / alignment.sequence) * alignment.sequence for i in members)
    return math.ceil(tokens / alignment.micro_batch) * alignment.micro_batch


def first_fit_decreasing_bins(lengths: list[int], max_tokens: int, alignment: Alignment) -> int:
    """How many bins plain first-fit-decreasing opens."""
    padded = [math.ceil(length / alignment.sequence) * alignment.sequence for length in lengths]
    bins: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -padded[i]):
        fitting = (b for b in bins if allocated(lengths, [*b, i], alignment) <= max_tokens)
        chosen = next(fitting, None)
        if chosen is None:
            bins.append(chosen := [])
        chosen.append(i)
    return len(bins)


@settings(deadline=None)
@given(**CASES)
def test_every_sample_once_in_stream_order_in_equal_counts_under_the_cap(
    lengths: list[int], ranks: int, max_tokens: int, alignment: Alignment, count_multiple: int, packing: Packing
) -> None:
    options = {"alignment": alignment, "count_multiple": count_multiple, "packing": packing}
    plan = plan_micro_batches(lengths, ranks, max_tokens, **options)
    assert len(plan) == ranks
    counts = {len(share) for share in plan}
    assert len(counts) == 1 and plan[0] and len(plan[0]) % count_multiple == 0
    micro_batches = [members for share in plan for members in share]
    assert sorted(i for members in micro_batches for i in members) == list(range(len(lengths)))
    for members in micro_batches:
        assert members == sorted(members) and all(type(i) is int for i in members)
        assert allocated(lengths, members, alignment) <= max_tokens or len(members) == 1
    assert plan == plan_micro_batches(lengths, ranks, max_tokens, **options)


@settings(deadline=None)
@given(**CASES)
def test_no_more_micro_batches_than_first_fit_decreasing_needs(
    lengths: list[int], ranks: int, max_tokens: int, alignment: Alignment, count_multiple: int, packing: Packing
) -> None:
    plan = plan_micro_batches(
        lengths, ranks, max_tokens, alignment=alignment, count_multiple=count_multiple, packing=packing
    )
    needed = first_fit_decreasing_bins(lengths, max_tokens, alignment)
    assert len(plan[0]) == max(1, math.ceil(needed / (ranks * count_multiple))) * count_multiple
    if packing is Packing.first_fit_decreasing:
        assert sum(map(bool, (members for share in plan for members in share))) == needed


@settings(deadline=None)
@given(LENGTHS, st.integers(2, 6), st.integers(300, 1000), ALIGNMENTS, st.integers(0, 2))
def test_the_heaviest_rank_is_even_enough_or_no_exchange_helps(
    lengths: list[int], ranks: int, max_tokens: int, alignment: Alignment, quadratic: int
) -> None:
    cost = SequenceCost(linear=3, quadratic=quadratic)
    plan = plan_micro_batches(lengths, ranks, max_tokens, alignment=alignment, cost=cost)
    work = [cost(math.ceil(length / alignment.sequence) * alignment.sequence) for length in lengths] + [0]
    nothing = len(lengths)
    padded = [*lengths, 0]
    load = [sum(work[i] for members in share for i in members) for share in plan]
    heaviest = max(range(ranks), key=lambda rank: load[rank])
    if load[heaviest] <= EVEN_ENOUGH * sum(load) / ranks:
        return
    for other in set(range(ranks)) - {heaviest}:
        for given_from in plan[heaviest]:
            for taken_from in plan[other]:
                for give in given_from:
                    for take in [*taken_from, nothing]:
                        after = [[i for i in given_from if i != give] + [take], [give, *taken_from]]
                        after[1] = [i for i in after[1] if i != take]
                        moved = work[give] - work[take]
                        helps = 0 < moved < load[heaviest] - load[other]
                        fits = all(allocated(padded, members, alignment) <= max_tokens for members in after)
                        assert not (helps and fits)


def test_exchanges_balance_the_work_of_ranks_where_tokens_alone_do_not() -> None:
    lengths = [100] * 8 + [10] * 80
    cost = SequenceCost(1, 1)
    plan = plan_micro_batches(lengths, 2, 10_000, cost=cost)
    work = [sum(cost(lengths[i]) for members in share for i in members) for share in plan]
    assert max(work) <= EVEN_ENOUGH * sum(work) / 2


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=200, max_size=300))
def test_micro_batches_of_one_rank_are_evenly_filled(lengths: list[int]) -> None:
    """With many short samples none is more than one sample longer than another."""
    (share,) = plan_micro_batches(lengths, 1, 1000, count_multiple=4)
    tokens = [sum(lengths[i] for i in members) for members in share]
    if sum(lengths) <= 950 * len(share):
        assert max(tokens) - min(tokens) <= 50


def test_fewer_samples_than_ranks_leave_empty_micro_batches() -> None:
    plan = plan_micro_batches([5, 7], 4, 100, count_multiple=2)
    assert sorted(sum(len(members) for members in share) for share in plan) == [0, 0, 1, 1]
    assert {len(share) for share in plan} == {2}


def test_one_rank_needs_no_more_micro_batches_than_the_tokens_ask_for() -> None:
    assert plan_micro_batches([10] * 10, 1, 100) == [[list(range(10))]]
    assert len(plan_micro_batches([10] * 11, 1, 100)[0]) == 2


@pytest.mark.parametrize(
    ("layout", "fp8", "expected"),
    [
        ({}, None, Alignment(1, 1)),
        ({"tensor": 4}, None, Alignment(1, 1)),
        ({"tensor": 4, "sequence_parallel": True}, None, Alignment(1, 4)),
        ({"context": 2}, None, Alignment(4, 4)),
        ({"context": 4, "tensor": 8, "sequence_parallel": True}, None, Alignment(8, 32)),
        ({}, "delayed", Alignment(1, 16)),
        ({"tensor": 8, "sequence_parallel": True}, "tensorwise", Alignment(1, 16)),
        ({"tensor": 3, "sequence_parallel": True}, "mxfp8", Alignment(1, 96)),
        ({"context": 2, "tensor": 8, "sequence_parallel": True}, "blockwise", Alignment(4, 256)),
    ],
)
def test_alignment_follows_layout_and_fp8_recipe(layout: dict[str, int], fp8: str | None, expected: Alignment) -> None:
    config = Config()
    for name, value in layout.items():
        setattr(config.parallel, name, value)
    config.precision.fp8 = SimpleNamespace(recipe=fp8)  # type: ignore[assignment]
    found = alignment_of(config)
    assert found == expected
    context, tensor = config.parallel.context, config.parallel.tensor if config.parallel.sequence_parallel else 1
    step = {None: 1, "delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}[fp8]
    assert found.micro_batch == context * math.lcm(tensor, step, 2 if context > 1 else 1)
