"""The invariants that data/packing.py states."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.data.packing import plan_micro_batches

LENGTHS = st.lists(st.integers(1, 300), min_size=0, max_size=80)


@given(LENGTHS, st.integers(1, 8), st.integers(50, 1000))
def test_every_sample_once_in_equal_counts_under_the_cap(lengths: list[int], ranks: int, max_tokens: int) -> None:
    plan = plan_micro_batches(lengths, ranks, max_tokens)
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1 and len(plan[0]) >= 1
    members = [members for rank in plan for members in rank]
    assert sorted(i for m in members for i in m) == list(range(len(lengths)))
    for m in members:
        assert m == sorted(m)
        assert sum(lengths[i] for i in m) <= max_tokens or len(m) == 1
    assert plan == plan_micro_batches(lengths, ranks, max_tokens)


@given(st.lists(st.integers(1, 50), min_size=200, max_size=300), st.integers(1, 4))
def test_short_samples_spread_evenly(lengths: list[int], ranks: int) -> None:
    """With many short samples no micro-batch is more than one sample heavier than another."""
    plan = plan_micro_batches(lengths, ranks, 1000)
    tokens = [sum(lengths[i] for i in members) for rank in plan for members in rank]
    assert max(tokens) - min(tokens) <= 50


def test_one_rank_needs_no_more_micro_batches_than_the_tokens_ask_for() -> None:
    assert plan_micro_batches([10] * 10, 1, 100) == [[list(range(10))]]
    assert len(plan_micro_batches([10] * 11, 1, 100)[0]) == 2
