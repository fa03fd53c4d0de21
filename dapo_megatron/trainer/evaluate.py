"""Validation: k samples a problem, mean@k and pass@k by prompt uid."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np

from dapo_megatron.config.schema import Config
from dapo_megatron.data.prompts import load_prompts, sample_seed
from dapo_megatron.data.types import Group, Prompt
from dapo_megatron.sampling.engine_pool import EnginePool
from dapo_megatron.sampling.group_sampler import Scorer
from dapo_megatron.trainer.records import sample_record


@dataclass(frozen=True)
class EvaluationSet:
    """Prompts of one validation set and the number of samples a prompt."""

    name: str
    prompts: list[Prompt]
    samples_per_prompt: int


@dataclass(frozen=True)
class Evaluation:
    """Metrics `val/<set>/...` of all sets, and the rollouts by set."""

    metrics: dict[str, float]
    records: dict[str, list[dict[str, Any]]]


def load_evaluation_sets(config: Config, tokenizer: Any) -> list[EvaluationSet]:
    """Load every configured set; see data/prompts.py for what is raised."""
    return [
        EvaluationSet(
            name,
            load_prompts(
                settings.dataset,
                tokenizer,
                max_prompt_tokens=config.data.max_prompt_tokens,
                overlong_prompts=config.data.overlong_prompts,
                bad_rows=config.data.bad_rows,
            ).prompts,
            settings.samples_per_prompt,
        )
        for name, settings in config.evaluation.sets.items()
    ]


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased estimate of the chance that k samples hold a right one (Chen et al., arXiv 2107.03374, eq. 1)."""
    assert 0 <= right <= samples and 1 <= k <= samples
    return 1.0 - comb(samples - right, k) / comb(samples, k)


async def evaluate(
    config: Config,
    sets: list[EvaluationSet],
    engines: EnginePool,
    scorer: Scorer,
    step: int,
) -> Evaluation:
    """Sample and score every set with the engines' current weights.

    The same problems get the same seeds at every evaluation, so two policies are compared on the same noise.
    """
    metrics: dict[str, float] = {}
    records: dict[str, list[dict[str, Any]]] = {}
    for evaluation_set in sets:
        began = time.perf_counter()
        groups = await asyncio.gather(
            *(
                _sample_group(
                    config,
                    engines,
                    scorer,
                    prompt,
                    position,
                    evaluation_set.samples_per_prompt,
                )
                for position, prompt in enumerate(evaluation_set.prompts)
            )
        )
        metrics |= _set_metrics(evaluation_set, groups)
        metrics[f"val/{evaluation_set.name}/time_s"] = time.perf_counter() - began
        records[evaluation_set.name] = [sample_record(step, group, s) for group in groups for s in group.samples]
    return Evaluation(metrics, records)


async def _sample_group(
    config: Config,
    engines: EnginePool,
    scorer: Scorer,
    prompt: Prompt,
    position: int,
    n: int,
) -> Group:
    seeds = [sample_seed(config.evaluation.seed, position, index) for index in range(n)]
    group = Group(
        prompt,
        position,
        await engines.generate(prompt.token_ids, seeds, config.evaluation.sampling),
    )
    verdicts = await asyncio.to_thread(scorer.score, group)
    for sample, verdict in zip(group.samples, verdicts, strict=True):
        sample.verdict = verdict
    return group


def _set_metrics(evaluation_set: EvaluationSet, groups: list[Group]) -> dict[str, float]:
    k = evaluation_set.samples_per_prompt
    samples = [sample for group in groups for sample in group.samples]
    right = [sum(accuracy == 1.0 for accuracy in group.accuracies) for group in groups]
    values = {
        f"mean@{k}": float(np.mean([np.mean(group.accuracies) for group in groups])),
        f"pass@{k}": float(np.mean([pass_at_k(k, count, k) for count in right])),
        "response_length": float(np.mean([len(sample.token_ids) for sample in samples])),
        "clipped_fraction": float(np.mean([sample.finish_reason == "length" for sample in samples])),
    }
    return {f"val/{evaluation_set.name}/{name}": value for name, value in values.items()}
