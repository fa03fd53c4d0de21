"""From kept groups to the updates of a step: rewards, advantages, masks, loss weights, correction.

Samples are assigned to updates in stream order, never by length. All that depends on more than one sample (group
statistics, denominators) is computed here, over the whole update, before anything is split over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dapo_megatron.algorithm.advantage import group_advantages
from dapo_megatron.algorithm.correction import correction_weights
from dapo_megatron.algorithm.loss import token_weights
from dapo_megatron.algorithm.shaping import is_trained, shaped_reward
from dapo_megatron.config.schema import Config
from dapo_megatron.data.types import Group, TrainingSample


@dataclass(frozen=True)
class ScoredGroup:
    """A kept group with its shaped rewards and advantages, one a sample."""

    group: Group
    rewards: list[float]
    advantages: list[float]


def score_groups(groups: Sequence[Group], config: Config) -> list[ScoredGroup]:
    """Shape the rewards of each group and normalise them inside it."""
    scored = []
    for group in groups:
        rewards = [
            shaped_reward(accuracy, len(sample.token_ids), config.rollout.max_response_tokens, config.algorithm)
            for accuracy, sample in zip(group.accuracies, group.samples, strict=True)
        ]
        scored.append(ScoredGroup(group, rewards, group_advantages(rewards, config.algorithm.advantage)))
    return scored


def build_updates(scored: Sequence[ScoredGroup], config: Config) -> list[list[TrainingSample]]:
    """Split a step's groups, in stream order, into updates of `trainer.update_batch_size` samples.

    A batch cut short by the sampling budget makes fewer updates, the last one possibly smaller.
    """
    groups_per_update = config.trainer.update_batch_size // config.rollout.samples_per_prompt
    return [
        _build_update(scored[first : first + groups_per_update], config)
        for first in range(0, len(scored), groups_per_update)
    ]


def _build_update(scored: Sequence[ScoredGroup], config: Config) -> list[TrainingSample]:
    algorithm = config.algorithm
    samples: list[TrainingSample] = []
    group_ids: list[int] = []
    for group_id, item in enumerate(scored):
        prompt = item.group.prompt.token_ids
        for sample, advantage in zip(item.group.samples, item.advantages, strict=True):
            samples.append(
                TrainingSample(
                    token_ids=np.asarray((*prompt, *sample.token_ids), np.int64),
                    prompt_tokens=len(prompt),
                    trained=is_trained(sample.finish_reason, algorithm.overlong),
                    advantage=advantage,
                    rollout_log_probs=np.asarray(sample.log_probs, np.float32),
                )
            )
            group_ids.append(group_id)
    weights = token_weights(
        algorithm.aggregation,
        [sample.response_tokens if sample.trained else 0 for sample in samples],
        group_ids,
        algorithm.loss_norm_tokens or config.rollout.max_response_tokens,
    )
    for row, weight in zip(samples, weights, strict=True):
        row.loss_weight = weight
    return samples


def set_old_log_probs(samples: Sequence[TrainingSample], old: Sequence[np.ndarray], config: Config) -> None:
    """Store the log-probs before the step's updates, and the correction weights that follow from them."""
    for sample, log_probs in zip(samples, old, strict=True):
        assert len(log_probs) == sample.response_tokens
        # A copy: what comes out of an object store is read-only, which torch does not take.
        sample.old_log_probs = np.array(log_probs)
        weights = correction_weights(
            torch.from_numpy(sample.old_log_probs),
            torch.from_numpy(sample.rollout_log_probs),
            config.algorithm.correction,
        )
        sample.correction_weights = None if weights is None else weights.numpy()
