"""The loop: steps, evaluations, checkpoints, and what is written about them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dapo_megatron.config.schema import Config
from dapo_megatron.data.prompts import PromptStream, load_prompts
from dapo_megatron.models.family import Dimensions
from dapo_megatron.sampling.engine_pool import EnginePool
from dapo_megatron.sampling.group_sampler import GroupSampler, Scorer
from dapo_megatron.trainer.evaluate import EvaluationSet, evaluate, load_evaluation_sets
from dapo_megatron.trainer.progress import Progress
from dapo_megatron.trainer.roles import RolloutEngine, TrainingGroup
from dapo_megatron.trainer.step import StepRunner
from dapo_megatron.trainer.tracking import RunDirectory, samples_name

logger = logging.getLogger(__name__)


class Problems:
    """Everything that a run reads before anything heavy starts: training prompts and validation sets."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.train = load_prompts(
            config.data.train,
            tokenizer,
            max_prompt_tokens=config.data.max_prompt_tokens,
            overlong_prompts=config.data.overlong_prompts,
            bad_rows=config.data.bad_rows,
        )
        self.evaluation = load_evaluation_sets(config, tokenizer)


async def train(
    config: Config,
    dimensions: Dimensions,
    problems: Problems,
    run_directory: RunDirectory,
    training: TrainingGroup,
    engines: Sequence[RolloutEngine],
    scorer: Scorer,
    progress: Progress,
) -> None:
    """Train for `trainer.steps` steps; evaluations and checkpoints as configured, both at the end in any case."""
    pool = EnginePool(engines)
    stream = PromptStream(problems.train.prompts, config.trainer.seed, config.data.shuffle)
    runner = StepRunner(
        config,
        dimensions,
        GroupSampler(config, stream, pool, scorer),
        training,
        engines,
        announce=progress.phase,
    )
    if config.evaluation.before_training:
        await _evaluate(
            config,
            problems.evaluation,
            pool,
            scorer,
            0,
            run_directory,
            progress,
            {"step": 0},
        )
    for step in range(1, config.trainer.steps + 1):
        result = await runner.run(step)
        metrics = result.metrics
        last = step == config.trainer.steps
        if _due(step, config.trainer.save_samples_every_steps) or last:
            limit = config.trainer.samples_per_file or None
            run_directory.write_samples(samples_name(step), result.records[:limit])
        progress.step_done(metrics)
        if _due(step, config.evaluation.every_steps) or last:
            await _evaluate(
                config,
                problems.evaluation,
                pool,
                scorer,
                step,
                run_directory,
                progress,
                metrics,
            )
        else:
            run_directory.log_metrics(metrics)
        if _due(step, config.trainer.checkpoint_every_steps) or last:
            progress.phase("checkpoint")
            await _checkpoint(training, run_directory.checkpoint_folder(step))


def _due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0


async def _checkpoint(training: TrainingGroup, folder: Path) -> None:
    """Write the policy under a temporary name and rename it when it is whole."""
    unfinished = folder.with_name(f".{folder.name}.tmp")
    await training.export(unfinished / "hf")
    unfinished.rename(folder)


async def _evaluate(
    config: Config,
    sets: list[EvaluationSet],
    engines: EnginePool,
    scorer: Scorer,
    step: int,
    run_directory: RunDirectory,
    progress: Progress,
    metrics: dict[str, float],
) -> None:
    """Evaluate after `step` and write the step's one metrics line, evaluation included."""
    progress.phase("evaluate")
    evaluation = await evaluate(config, sets, engines, scorer, step)
    for name, records in evaluation.records.items():
        run_directory.write_samples(samples_name(step, name), records)
    run_directory.log_metrics(metrics | evaluation.metrics)
    if evaluation.metrics:
        progress.evaluated({"step": step} | evaluation.metrics)
