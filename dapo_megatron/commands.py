"""What the commands do: reads the problems, starts the actors of the cluster room, hands them to the trainer room.

Everything that can be refused is refused before Ray starts.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dapo_megatron.cluster.actors import shutting_down, start_all
from dapo_megatron.cluster.placement import place_all, place_engines, ray_session
from dapo_megatron.config.compose import to_yaml
from dapo_megatron.config.schema import Config
from dapo_megatron.config.validate_model import validate_model
from dapo_megatron.models.family import Dimensions
from dapo_megatron.models.registry import family_of
from dapo_megatron.reward.scorer import build_scorer
from dapo_megatron.sampling.engine_pool import EnginePool
from dapo_megatron.trainer import evaluate as evaluation
from dapo_megatron.trainer import run
from dapo_megatron.trainer.progress import Progress
from dapo_megatron.trainer.tracking import RunDirectory
from dapo_megatron.weights.hf_folder import HFFolder
from dapo_megatron.weights.model_folder import resolve_model_folder

logger = logging.getLogger(__name__)


def train(config: Config) -> RunDirectory:
    """Run `dapo-megatron train`; returns the run directory.

    Raises:
        ValueError: the configuration, the model folder, the problems or the run directory cannot be used.
    """
    hf_folder, dimensions = _checked_model(config, resolve_model_folder(config.model))
    problems = run.Problems(config, _tokenizer(config, hf_folder))
    scorer = build_scorer(config.reward)
    run_directory = RunDirectory.create(config.trainer.run_dir, to_yaml(config))
    with Progress(config.trainer.steps, name=run_directory.path.name) as progress, ray_session(config):

        async def start_and_train() -> None:
            placed = place_all(config, str(hf_folder))
            async with shutting_down(placed.engines):
                await start_all(placed.training, placed.engines, config.cluster.start_deadline_s)
                await run.train(
                    config, dimensions, problems, run_directory, placed.training, placed.engines, scorer, progress
                )

        progress.phase("start")
        asyncio.run(start_and_train())
    return run_directory


def evaluate(config: Config, model_folder: Path | None = None) -> evaluation.Evaluation:
    """Run `dapo-megatron evaluate` on `evaluation.sets`, with engines only.

    Args:
        config: which sets, how to sample.
        model_folder: the policy as an HF folder; `model.path` if None.

    Raises:
        ValueError: the configuration, the folder or the problems cannot be used.
    """
    hf_folder, _ = _checked_model(config, model_folder or resolve_model_folder(config.model))
    sets = evaluation.load_evaluation_sets(config, _tokenizer(config, hf_folder))
    if not sets:
        raise ValueError("evaluation.sets is empty: name at least one set to evaluate on")
    scorer = build_scorer(config.reward)

    async def start_and_evaluate() -> evaluation.Evaluation:
        engines = place_engines(config, str(hf_folder))
        async with shutting_down(engines):
            await asyncio.gather(*(engine.ready(config.cluster.start_deadline_s) for engine in engines))
            return await evaluation.evaluate(config, sets, EnginePool(engines), scorer, step=0)

    with ray_session(config):
        return asyncio.run(start_and_evaluate())


def _checked_model(config: Config, folder: Path) -> tuple[Path, Dimensions]:
    source = HFFolder(folder)
    dimensions = family_of(source.config).dimensions(source.config)
    validate_model(config, source.config)
    return folder.absolute(), dimensions


def _tokenizer(config: Config, hf_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(config.model.tokenizer_path or hf_folder)
