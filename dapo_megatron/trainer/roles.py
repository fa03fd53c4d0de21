"""What the trainer asks of the other rooms, as protocols: the cluster hands it the real ones, tests hand it fakes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from dapo_megatron.data.types import ActorPlan
from dapo_megatron.sampling.engine_pool import Engine


class TrainingGroup(Protocol):
    """All training ranks as one."""

    @property
    def data_parallel_size(self) -> int:
        """Number of shares a batch is dealt into."""

    async def log_probs(self, plan: ActorPlan, *, reference: bool = False) -> list[list[list[np.ndarray]]]:
        """Log-probs of the response tokens, float32 [R] a sample, nested as the plan."""

    async def update(self, plan: ActorPlan, *, step: int) -> dict[str, float]:
        """One optimizer update; the loss sums of algorithm/loss.py over all ranks, and grad_norm, lr, skipped."""

    async def offload(self, phases: Sequence[str]) -> dict[str, int]:
        """Free the device memory of `params`, `grads`, `optimizer`, `reference`; bytes freed on the fullest rank."""

    async def reload(self, phases: Sequence[str]) -> dict[str, int]:
        """Bring phases back; bytes taken on the fullest rank."""

    async def sync_weights(self, policy_version: int) -> None:
        """Bring the engines to the actors' weights; afterwards they sample as `policy_version`."""

    async def export(self, folder: Path) -> None:
        """Write the policy as an HF folder."""


class RolloutEngine(Engine, Protocol):
    """A rollout engine that shares its devices with training."""

    async def release(self) -> int:
        """Give the device's memory to training; bytes freed."""

    async def wake_weights(self) -> int:
        """Take the weights' memory back, ready for a sync; bytes taken."""

    async def wake_kv_cache(self) -> int:
        """Take the KV cache's memory back, ready to generate; bytes taken."""
