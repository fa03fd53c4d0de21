"""The invariants that sampling/plan.py states, for any order of arrival."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.algorithm.filtering import Outcome
from dapo_megatron.config.schema import Acceptance
from dapo_megatron.sampling.plan import BatchPlan

OUTCOMES = st.lists(st.sampled_from([Outcome.accepted, Outcome.all_right, Outcome.all_wrong]), min_size=60, max_size=60)


def drive(plan: BatchPlan, outcomes: list[Outcome], order: random.Random) -> int:
    """Run a plan to its end with outcomes that arrive in random order; returns the number of submitted prompts."""
    in_flight: list[int] = []
    while not (plan.filled or plan.exhausted):
        in_flight += [plan.submit() for _ in range(plan.to_submit())]
        assert in_flight, "nothing in flight and nothing to submit: the step would hang"
        position = in_flight.pop(order.randrange(len(in_flight)))
        plan.judge(position, outcomes[position])
    return plan.next_position


@given(OUTCOMES, st.integers(1, 8), st.integers(8, 60), st.floats(0.0, 1.0), st.integers(0, 2**32))
def test_batch_is_the_first_accepted_in_stream_order(
    outcomes: list[Outcome], batch_size: int, budget: int, rate: float, order: int
) -> None:
    plan = BatchPlan(0, batch_size, budget, rate, Acceptance.stream_order)
    submitted = drive(plan, outcomes, random.Random(order))
    expected = [p for p in range(budget) if outcomes[p] is Outcome.accepted][:batch_size]
    assert submitted <= budget
    assert plan.batch() == expected
    assert plan.exhausted == (len(expected) < batch_size)
    assert plan.consumed_end() == (expected[-1] + 1 if len(expected) == batch_size else budget)


@given(OUTCOMES, st.integers(1, 8), st.integers(0, 2**32))
def test_first_finished_fills_without_waiting(outcomes: list[Outcome], batch_size: int, order: int) -> None:
    plan = BatchPlan(0, batch_size, 60, 0.5, Acceptance.first_finished)
    drive(plan, outcomes, random.Random(order))
    assert all(outcomes[p] is Outcome.accepted for p in plan.batch())
    assert len(plan.batch()) == min(batch_size, outcomes.count(Outcome.accepted))


def test_speculation_follows_the_acceptance_rate() -> None:
    assert BatchPlan(0, 32, 320, 1.0, Acceptance.stream_order).to_submit() == 32
    assert BatchPlan(0, 32, 320, 0.5, Acceptance.stream_order).to_submit() == 64
    assert BatchPlan(0, 32, 40, 0.5, Acceptance.stream_order).to_submit() == 40
