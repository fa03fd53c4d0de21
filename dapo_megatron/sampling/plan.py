"""Which prompts of the stream make a step's batch: pure bookkeeping, no engine, no clock.

Invariants (stream order):
  - prompts are submitted in stream order, without gaps, and at most `budget` of them in a step;
  - the batch is the first `batch_size` accepted prompts in stream order, and every earlier prompt has been judged, so
    the batch is a function of the outcomes alone and never of the order in which they arrive;
  - the step consumes the stream up to and including the last prompt of its batch (or, when the budget is spent, all
    that was submitted); what was submitted beyond that is surplus and comes again in a later step;
  - how far to submit ahead (speculation) changes the surplus, never the batch.
"""

from __future__ import annotations

import math

from dapo_megatron.algorithm.filtering import Outcome
from dapo_megatron.config.schema import Acceptance

LOWEST_ACCEPTANCE_RATE = 0.05


class BatchPlan:
    """The state of one step's sampling, driven by `submit` and `judge`.

    Args:
        start: stream position of the step's first prompt.
        batch_size: groups wanted.
        budget: prompts that may be submitted.
        acceptance_rate: expected share of accepted prompts, for speculation.
        acceptance: which accepted prompts make the batch.
    """

    def __init__(
        self, start: int, batch_size: int, budget: int, acceptance_rate: float, acceptance: Acceptance
    ) -> None:
        assert batch_size >= 1 and budget >= batch_size
        self.start = start
        self.next_position = start
        self._batch_size = batch_size
        self._end_of_budget = start + budget
        self._acceptance_rate = max(acceptance_rate, LOWEST_ACCEPTANCE_RATE)
        self._acceptance = acceptance
        self._outcomes: dict[int, Outcome] = {}
        self._settled_end = start
        self._accepted_settled: list[int] = []
        self._accepted_as_finished: list[int] = []

    @property
    def in_flight(self) -> int:
        """Prompts submitted and not yet judged."""
        return self.next_position - self.start - len(self._outcomes)

    def to_submit(self) -> int:
        """How many further prompts to submit now, so that the expected number of accepted ones fills the batch."""
        missing = self._batch_size - len(self._accepted_as_finished) - self.in_flight * self._acceptance_rate
        wanted = math.ceil(missing / self._acceptance_rate - 1e-9)
        return max(0, min(wanted, self._end_of_budget - self.next_position))

    def submit(self) -> int:
        """Take the next stream position."""
        assert self.next_position < self._end_of_budget
        position = self.next_position
        self.next_position += 1
        return position

    def judge(self, position: int, outcome: Outcome) -> None:
        """Record the outcome of a submitted prompt."""
        assert self.start <= position < self.next_position and position not in self._outcomes
        self._outcomes[position] = outcome
        if outcome is Outcome.accepted:
            self._accepted_as_finished.append(position)
        while self._settled_end in self._outcomes:
            if self._outcomes[self._settled_end] is Outcome.accepted:
                self._accepted_settled.append(self._settled_end)
            self._settled_end += 1

    @property
    def _accepted(self) -> list[int]:
        return self._accepted_settled if self._acceptance is Acceptance.stream_order else self._accepted_as_finished

    @property
    def filled(self) -> bool:
        """The batch is complete."""
        return len(self._accepted) >= self._batch_size

    @property
    def exhausted(self) -> bool:
        """The budget is spent, everything is judged, and the batch is not complete."""
        return not self.filled and self.in_flight == 0 and self.next_position == self._end_of_budget

    def batch(self) -> list[int]:
        """Positions of the batch in stream order (fewer than `batch_size` when exhausted)."""
        assert self.filled or self.exhausted
        return sorted(self._accepted[: self._batch_size])

    def consumed_end(self) -> int:
        """First stream position of the next step."""
        if self.filled and self._acceptance is Acceptance.stream_order:
            return self.batch()[-1] + 1
        return self.next_position
