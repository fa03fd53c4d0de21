"""The group sampler with fake engines: the batch never depends on timing or on the number of engines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from dapo_megatron.algorithm.filtering import Outcome
from dapo_megatron.config.schema import BudgetExhausted, Config, SamplingConfig
from dapo_megatron.data.prompts import PromptStream
from dapo_megatron.data.types import Group, Prompt, Sample, Verdict
from dapo_megatron.sampling.engine_pool import EnginePool
from dapo_megatron.sampling.group_sampler import GroupSampler, SampledStep, SamplingExhausted


class FakeEngine:
    """Samples are a function of their seeds alone; they finish in an order of the engine's own."""

    def __init__(self, order: int) -> None:
        self._order = random.Random(order)
        self._aborts: set[asyncio.Event] = set()
        self.in_flight = 0

    async def generate(
        self, prompt_token_ids: Sequence[int], seeds: Sequence[int], sampling: SamplingConfig
    ) -> list[Sample]:
        # As with an engine in another process, cancelling the wait does not end the work.
        return await asyncio.shield(asyncio.ensure_future(self._generate(seeds)))

    async def _generate(self, seeds: Sequence[int]) -> list[Sample]:
        for _ in range(self._order.randrange(40)):
            await asyncio.sleep(0)  # on its way: not yet within reach of abort_all
        self.in_flight += 1
        aborted = asyncio.Event()
        self._aborts.add(aborted)
        try:
            for _ in range(self._order.randrange(20)):
                await asyncio.sleep(0)
                if aborted.is_set():
                    raise RuntimeError("aborted")
        finally:
            self.in_flight -= 1
            self._aborts.discard(aborted)
        return [self._sample(index, seed) for index, seed in enumerate(seeds)]

    @staticmethod
    def _sample(index: int, seed: int) -> Sample:
        draw = random.Random(seed)
        length = draw.randrange(1, 9)
        return Sample(index, [draw.randrange(50) for _ in range(length)], [-1.0] * length, "stop", "", 0)

    async def abort_all(self) -> None:
        for aborted in self._aborts:
            aborted.set()


class ParityScorer:
    """Right iff the first token is even; a prompt whose uid is listed is always wrong."""

    def __init__(self, hopeless: set[str] | None = None) -> None:
        self._hopeless = hopeless or set()

    def score(self, group: Group) -> list[Verdict]:
        return [
            Verdict("right", 1.0)
            if s.token_ids[0] % 2 == 0 and group.prompt.uid not in self._hopeless
            else Verdict("wrong", 0.0)
            for s in group.samples
        ]


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(i), (i,), f"{i}?", str(i)) for i in range(count)]


def config(**filtering: object) -> Config:
    result = Config()
    result.trainer.train_batch_size = 6
    result.rollout.samples_per_prompt = 3
    for name, value in filtering.items():
        setattr(result.algorithm.filtering, name, value)
    return result


def run_steps(engines: list[FakeEngine], steps: int = 3, settings: Config | None = None) -> list[SampledStep]:
    async def drive() -> list[SampledStep]:
        settings_ = settings or config()
        sampler = GroupSampler(
            settings_, PromptStream(prompts(17), 5, True), EnginePool(engines), ParityScorer({"1", "2", "3"})
        )
        return [await sampler.next_step() for _ in range(steps)]

    return asyncio.run(drive())


def fingerprint(steps: list[SampledStep]) -> list[list[tuple[int, str, list[list[int]]]]]:
    return [[(g.position, g.prompt.uid, [s.token_ids for s in g.samples]) for g in step.batch] for step in steps]


def test_batches_do_not_depend_on_timing_or_engines() -> None:
    reference = fingerprint(run_steps([FakeEngine(0)]))
    assert all(len(batch) == 6 for batch in reference)
    for order in range(1, 6):
        assert fingerprint(run_steps([FakeEngine(order)])) == reference
        assert fingerprint(run_steps([FakeEngine(order), FakeEngine(order + 100)])) == reference


def test_nothing_is_in_flight_after_a_step() -> None:
    """Requests that were on their way when the batch filled would meet an engine that has given its memory away."""

    async def drive() -> None:
        for order in range(20):
            engine = FakeEngine(order)
            sampler = GroupSampler(config(), PromptStream(prompts(17), 5, True), EnginePool([engine]), ParityScorer())
            for _ in range(3):
                sampler.acceptance_rate = 0.2  # far ahead, so that much is surplus
                await sampler.next_step()
                for _ in range(10):
                    await asyncio.sleep(0)
                    assert engine.in_flight == 0

    asyncio.run(drive())


def test_judged_groups_tile_the_stream() -> None:
    """Every prompt of the stream is consumed once: nothing lost, nothing twice."""
    steps = run_steps([FakeEngine(3), FakeEngine(4)], steps=5)
    positions = [group.position for step in steps for group, _ in step.judged]
    assert positions == list(range(len(positions)))


def test_metrics_count_outcomes_and_waste() -> None:
    step = run_steps([FakeEngine(1)], steps=1)[0]
    metrics = step.metrics()
    assert metrics["sampling/accepted"] == 6
    assert metrics["sampling/prompts"] == len(step.judged)
    rejected = sum(outcome is not Outcome.accepted for _, outcome in step.judged)
    assert metrics["sampling/rejected_all_right"] + metrics["sampling/rejected_all_wrong"] == rejected
    kept = sum(len(s.token_ids) for g in step.batch for s in g.samples)
    assert metrics["sampling/wasted_tokens_fraction"] == 1 - kept / metrics["sampling/generated_tokens"]


def test_budget_trains_partial_or_raises() -> None:
    few = config(max_prompts_per_step=7)
    step = run_steps([FakeEngine(1)], steps=1, settings=few)[0]
    assert len(step.judged) == 7 and 0 < len(step.batch) < 6
    few.algorithm.filtering.budget_exhausted = BudgetExhausted.raise_error
    with pytest.raises(SamplingExhausted, match="7 prompts gave"):
        run_steps([FakeEngine(1)], steps=1, settings=few)


def test_a_failing_engine_fails_the_step_and_leaves_nothing_in_flight() -> None:
    class Failing(FakeEngine):
        async def generate(
            self, prompt_token_ids: Sequence[int], seeds: Sequence[int], sampling: SamplingConfig
        ) -> list[Sample]:
            if prompt_token_ids[0] == 4:
                raise RuntimeError("engine died")
            return await super().generate(prompt_token_ids, seeds, sampling)

    engine = Failing(0)
    with pytest.raises(RuntimeError, match="engine died"):
        run_steps([engine])
    assert engine.in_flight == 0
