"""Dynamic sampling: prompts stream in, groups are sampled, scored and kept, a batch comes out.

Who is kept and when a step is done is decided in plan.py; here prompts are sent to the engines, scored as they
finish (so that scoring overlaps generation), and what is no longer needed is aborted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dapo_megatron.algorithm.filtering import Outcome, judge_group
from dapo_megatron.config.schema import BudgetExhausted, Config
from dapo_megatron.data.prompts import PromptStream, sample_seed
from dapo_megatron.data.types import Group, Verdict
from dapo_megatron.sampling.engine_pool import EnginePool
from dapo_megatron.sampling.plan import BatchPlan

logger = logging.getLogger(__name__)

ABORT_AGAIN_S = 0.05

BUDGET_PER_BATCH = 10
"""Default budget of a step, in batches of prompts."""


class Scorer(Protocol):
    """What sampling needs of a scorer."""

    def score(self, group: Group) -> Sequence[Verdict]:
        """One verdict a sample, in order. Runs on a thread of its own."""


class SamplingExhausted(RuntimeError):
    """A step spent its budget of prompts without filling its batch (`budget_exhausted: raise`)."""


@dataclass(frozen=True)
class SampledStep:
    """What one step's sampling gave.

    Attributes:
        batch: the groups to train on, in stream order.
        judged: every group that the step consumed, with its outcome, in stream order; independent of timing.
        surplus_prompts: prompts submitted beyond the consumed ones; they come again in a later step.
        surplus_tokens: response tokens of surplus groups that had already finished.
    """

    batch: list[Group]
    judged: list[tuple[Group, Outcome]]
    surplus_prompts: int
    surplus_tokens: int

    def metrics(self) -> dict[str, float]:
        """`sampling/...` of the step."""
        outcomes = [outcome for _, outcome in self.judged]
        generated = self.surplus_tokens + sum(_response_tokens(group) for group, _ in self.judged)
        kept = sum(_response_tokens(group) for group in self.batch)
        return {
            "sampling/prompts": len(outcomes),
            "sampling/accepted": outcomes.count(Outcome.accepted),
            "sampling/rejected_all_right": outcomes.count(Outcome.all_right),
            "sampling/rejected_all_wrong": outcomes.count(Outcome.all_wrong),
            "sampling/rejected_outside_band": outcomes.count(Outcome.outside_band),
            "sampling/surplus": self.surplus_prompts,
            "sampling/generated_tokens": generated,
            "sampling/wasted_tokens_fraction": 1.0 - kept / generated if generated else 0.0,
        }


def _response_tokens(group: Group) -> int:
    return sum(len(sample.token_ids) for sample in group.samples)


class GroupSampler:
    """Samples one batch a step from a prompt stream.

    Attributes:
        position: stream position of the next step's first prompt.
        acceptance_rate: running estimate over the consumed prompts.
    """

    def __init__(self, config: Config, stream: PromptStream, engines: EnginePool, scorer: Scorer) -> None:
        self.position = 0
        self.acceptance_rate = 1.0
        self._config = config
        self._stream = stream
        self._engines = engines
        self._scorer = scorer

    async def next_step(self) -> SampledStep:
        """Sample until the batch is complete or the budget is spent.

        Raises:
            SamplingExhausted: the budget is spent and `budget_exhausted` is `raise`, or nothing at all was accepted.
        """
        filtering = self._config.algorithm.filtering
        batch_size = self._config.trainer.train_batch_size
        budget = filtering.max_prompts_per_step or BUDGET_PER_BATCH * batch_size
        plan = BatchPlan(self.position, batch_size, budget, self.acceptance_rate, filtering.acceptance)
        finished: dict[int, Group] = {}
        outcomes: dict[int, Outcome] = {}
        tasks: set[asyncio.Task[Group]] = set()
        try:
            while not (plan.filled or plan.exhausted):
                for _ in range(plan.to_submit()):
                    tasks.add(asyncio.create_task(self._sample_group(plan.submit())))
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for group in (task.result() for task in done):
                    finished[group.position] = group
                    outcomes[group.position] = judge_group(group.accuracies, filtering)
                    plan.judge(group.position, outcomes[group.position])
        except Exception:
            await self._abort(tasks)
            raise
        await self._abort(tasks)

        batch = [finished[position] for position in plan.batch()]
        if plan.exhausted:
            self._report_exhausted(len(batch), batch_size, budget, list(outcomes.values()))
        end = plan.consumed_end()
        judged = [(finished[p], outcomes[p]) for p in range(plan.start, end) if p in finished]
        accepted = sum(outcome is Outcome.accepted for _, outcome in judged)
        self.acceptance_rate = 0.5 * (self.acceptance_rate + accepted / len(judged))
        self.position = end
        surplus = [group for position, group in finished.items() if position >= end]
        return SampledStep(
            batch, judged, plan.next_position - plan.start - len(judged), sum(map(_response_tokens, surplus))
        )

    async def _sample_group(self, position: int) -> Group:
        prompt = self._stream[position]
        n = self._config.rollout.samples_per_prompt
        seeds = [sample_seed(self._config.trainer.seed, position, index) for index in range(n)]
        samples = await self._engines.generate(prompt.token_ids, seeds, self._config.rollout.sampling)
        group = Group(prompt, position, samples)
        verdicts = await asyncio.to_thread(self._scorer.score, group)
        for sample, verdict in zip(group.samples, verdicts, strict=True):
            sample.verdict = verdict
        return group

    async def _abort(self, tasks: set[asyncio.Task[Group]]) -> None:
        """End all that is in flight; a request that is still on its way to its engine outlives one call."""
        pending = tasks
        try:
            while pending:
                await self._engines.abort_all()
                _, pending = await asyncio.wait(pending, timeout=ABORT_AGAIN_S)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _report_exhausted(self, accepted: int, wanted: int, budget: int, outcomes: list[Outcome]) -> None:
        counts = ", ".join(f"{outcomes.count(o)} {o.value.replace('_', ' ')}" for o in Outcome)
        message = (
            f"{budget} prompts gave {accepted} of the {wanted} groups of a batch ({counts}): the problems are too easy "
            "or too hard for the policy, or algorithm.filtering.max_prompts_per_step is too small"
        )
        if accepted == 0 or self._config.algorithm.filtering.budget_exhausted is BudgetExhausted.raise_error:
            raise SamplingExhausted(message)
        logger.warning("%s; training on what there is", message)
