"""A whole set of actors without processes: what the trainer's protocols ask for, and a log of the calls."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dapo_megatron.config.schema import Config, SamplingConfig
from dapo_megatron.data.types import ActorPlan, Group, Sample, TrainingSample, Verdict
from dapo_megatron.models.registry import family_of

LOG_PROB = -1.5
HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 50,
}
DIMENSIONS = family_of(HF_CONFIG).dimensions(HF_CONFIG)


class FakeEngine:
    """Samples are a function of their seeds; a response is truncated when it is 8 tokens long."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls
        self.policy_version = 0

    async def generate(
        self, prompt_token_ids: Sequence[int], seeds: Sequence[int], sampling: SamplingConfig
    ) -> list[Sample]:
        return [self._sample(index, seed) for index, seed in enumerate(seeds)]

    def _sample(self, index: int, seed: int) -> Sample:
        draw = random.Random(seed)
        length = draw.randrange(1, 9)
        tokens = [draw.randrange(50) for _ in range(length)]
        return Sample(
            index, tokens, [LOG_PROB] * length, "length" if length == 8 else "stop", str(tokens), self.policy_version
        )

    async def abort_all(self) -> None:
        self._calls.append("abort_all")

    async def release(self) -> int:
        self._calls.append("release")
        return 100

    async def wake_weights(self) -> int:
        self._calls.append("wake_weights")
        return 60

    async def wake_kv_cache(self) -> int:
        self._calls.append("wake_kv_cache")
        return 40


class FakeTraining:
    """Two data-parallel shares; log-probs equal the engine's, so the mismatch is 0."""

    data_parallel_size = 2

    def __init__(self, calls: list[str], engine: FakeEngine) -> None:
        self._calls = calls
        self._engine = engine
        self.plans: list[ActorPlan] = []
        self.updates: list[list[TrainingSample]] = []

    async def log_probs(self, plan: ActorPlan, *, reference: bool = False) -> list[list[list[np.ndarray]]]:
        self._calls.append("reference_log_probs" if reference else "log_probs")
        return [
            [[np.full(s.response_tokens, LOG_PROB, np.float32) for s in members] for members in share] for share in plan
        ]

    async def update(self, plan: ActorPlan, *, step: int) -> dict[str, float]:
        assert len(plan) == self.data_parallel_size and len({len(share) for share in plan}) == 1
        self._calls.append("update")
        self.plans.append(plan)
        samples = [s for share in plan for members in share for s in members]
        self.updates.append(samples)
        tokens = float(sum(s.response_tokens for s in samples if s.trained))
        sums = {"tokens": tokens, "loss": 0.25, "kl_old": 0.0, "ratio": tokens, "entropy": 2.0 * tokens}
        sums |= {"clip_low": 0.0, "clip_high": 1.0, "clip_dual": 0.0}
        return sums | {"grad_norm": 3.0, "lr": 1e-4, "skipped": 0.0}

    async def offload(self, phases: Sequence[str]) -> dict[str, int]:
        self._calls += [f"offload {phase}" for phase in phases]
        return dict.fromkeys(phases, 8)

    async def reload(self, phases: Sequence[str]) -> dict[str, int]:
        self._calls += [f"reload {phase}" for phase in phases]
        return dict.fromkeys(phases, 0)

    async def sync_weights(self, policy_version: int) -> None:
        self._calls.append("sync")
        self._engine.policy_version = policy_version

    async def export(self, folder: Path) -> None:
        self._calls.append("export")
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")


class ParityScorer:
    """Right iff the first token is even."""

    def score(self, group: Group) -> list[Verdict]:
        return [
            Verdict("right", 1.0, str(s.token_ids[0])) if s.token_ids[0] % 2 == 0 else Verdict("wrong", 0.0)
            for s in group.samples
        ]


class SilentScorer:
    """Finds no answer anywhere; right by the coin, so that groups are kept."""

    def score(self, group: Group) -> list[Verdict]:
        return [Verdict("no answer", float(s.index % 2)) for s in group.samples]


def small_config() -> Config:
    config = Config()
    config.trainer.train_batch_size = 4
    config.trainer.update_batch_size = 8
    config.trainer.steps = 3
    config.rollout.samples_per_prompt = 4
    config.rollout.max_response_tokens = 8
    config.algorithm.overlong.buffer_tokens = 4
    config.parallel.max_tokens_per_micro_batch = 40
    return config
