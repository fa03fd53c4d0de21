"""Several rollout engines behind one `generate`: each group goes whole to the engine with the least outstanding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dapo_megatron.config.schema import SamplingConfig
from dapo_megatron.data.types import Sample


class Engine(Protocol):
    """What sampling needs of a rollout engine."""

    async def generate(
        self, prompt_token_ids: Sequence[int], seeds: Sequence[int], sampling: SamplingConfig
    ) -> list[Sample]:
        """One sample a seed, in the order of the seeds."""

    async def abort_all(self) -> None:
        """Abort what is in flight."""


class EnginePool:
    """Balances groups over engines; the samples do not depend on the choice (seeds decide them)."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        assert engines, "no engine"
        self._engines = list(engines)
        self._outstanding_samples = [0] * len(engines)

    async def generate(
        self, prompt_token_ids: Sequence[int], seeds: Sequence[int], sampling: SamplingConfig
    ) -> list[Sample]:
        """See Engine.generate."""
        chosen = self._outstanding_samples.index(min(self._outstanding_samples))
        self._outstanding_samples[chosen] += len(seeds)
        try:
            return await self._engines[chosen].generate(prompt_token_ids, seeds, sampling)
        finally:
            self._outstanding_samples[chosen] -= len(seeds)

    async def abort_all(self) -> None:
        """Abort what is in flight on every engine."""
        for engine in self._engines:
            await engine.abort_all()
