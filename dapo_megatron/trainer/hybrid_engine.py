"""The hybrid engine: training ranks and rollout engines that take turns, as one state machine.

    generate -> release -> log_probs -> update -> wake_weights -> sync -> wake_kv_cache -> generate

Colocated, both stand on the same devices and each switch moves memory: the ranks' gradients and optimizer state are on
the device for the updates alone, the ranks' parameters from `release` to the end of the sync, the engines' weights from
`wake_weights` on and their KV cache while they generate. Disaggregated, the order is the same and nothing moves.

A sync that fails leaves the engines with weights of no policy: nothing but another sync is possible then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum

import numpy as np

from dapo_megatron.config.schema import Config, Placement
from dapo_megatron.data.types import ActorPlan
from dapo_megatron.trainer.roles import RolloutEngine, TrainingGroup

logger = logging.getLogger(__name__)


class Phase(StrEnum):
    """What the hybrid engine did last; `generate` is where it starts."""

    generate = "generate"
    release = "release"
    log_probs = "log_probs"
    update = "update"
    wake_weights = "wake_weights"
    sync = "sync"
    failed_sync = "failed_sync"


_TRAINING = (Phase.release, Phase.log_probs, Phase.update)

_FOLLOWS: dict[str, tuple[Phase, ...]] = {
    "release": (Phase.generate,),
    "log_probs": (Phase.release, Phase.log_probs),
    "update": _TRAINING,
    "wake_weights": _TRAINING,
    "sync": (Phase.wake_weights, Phase.sync, Phase.failed_sync),
    "wake_kv_cache": (Phase.sync,),
}
"""What each method may follow."""


class PhaseError(RuntimeError):
    """Phases in an order in which one would overwrite what another needs."""


class HybridEngine:
    """The order of phases, and the memory that moves between them.

    Attributes:
        phase: what was done last.
        moved_bytes: of the switches since `release`, by name: what they freed and took, on the fullest rank and over
            the engines.
    """

    def __init__(self, config: Config, training: TrainingGroup, engines: Sequence[RolloutEngine]) -> None:
        self.phase = Phase.generate
        self.moved_bytes: dict[str, int] = {}
        self._training = training
        self._engines = list(engines)
        self._colocated = config.cluster.placement is Placement.colocated
        self._offloaded = set(config.cluster.offload) if self._colocated else set()

    async def release(self) -> None:
        """End generation: the engines give their memory to the ranks, whose parameters come back."""
        self._require("release")
        self.moved_bytes = {}
        with self._logged("release"):
            await self._switch_engines("release", "freed")
            await self._reload("params")
        self.phase = Phase.release

    async def log_probs(self, plan: ActorPlan, *, reference: bool = False) -> list[list[list[np.ndarray]]]:
        """See TrainingGroup.log_probs."""
        self._require("log_probs")
        self.phase = Phase.log_probs
        return await self._training.log_probs(plan, reference=reference)

    async def update(self, plan: ActorPlan, *, step: int) -> dict[str, float]:
        """See TrainingGroup.update; the first one brings gradients and optimizer state back."""
        self._require("update")
        if self.phase is not Phase.update:
            with self._logged("update"):
                await self._reload("grads", "optimizer")
            self.phase = Phase.update
        return await self._training.update(plan, step=step)

    async def wake_weights(self) -> None:
        """End training: gradients and optimizer state leave, the engines' weights come."""
        self._require("wake_weights")
        with self._logged("wake_weights"):
            await self._offload("grads", "optimizer")
            await self._switch_engines("wake_weights", "taken")
        self.phase = Phase.wake_weights

    async def sync(self, policy_version: int) -> None:
        """Bring all engines to the ranks' weights; after an error it can be tried again, and nothing else."""
        self._require("sync")
        self.phase = Phase.failed_sync
        await self._training.sync_weights(policy_version)
        self.phase = Phase.sync

    async def wake_kv_cache(self) -> None:
        """The ranks' parameters leave, the engines' KV caches come, and generation is possible again."""
        self._require("wake_kv_cache")
        with self._logged("wake_kv_cache"):
            await self._offload("params")
            await self._switch_engines("wake_kv_cache", "taken")
        self.phase = Phase.generate

    def metrics(self) -> dict[str, float]:
        """`memory_bytes/...` of the switches since `release`."""
        return {f"memory_bytes/{name}": float(size) for name, size in self.moved_bytes.items()}

    def _require(self, method: str) -> None:
        allowed = _FOLLOWS[method]
        if self.phase not in allowed:
            raise PhaseError(
                f"{method} is not possible after {self.phase}: it follows {' or '.join(allowed)}"
                + ("; the engines hold a part of the new weights" if self.phase is Phase.failed_sync else "")
            )

    async def _switch_engines(self, method: str, what: str) -> None:
        if self._colocated:
            moved = await asyncio.gather(*(getattr(engine, method)() for engine in self._engines))
            self.moved_bytes[f"engines_{what}_by_{method}"] = sum(moved)

    async def _offload(self, *parts: str) -> None:
        chosen = [part for part in parts if part in self._offloaded]
        if chosen:
            freed = await self._training.offload(chosen)
            self.moved_bytes |= {f"ranks_freed_{part}": size for part, size in freed.items()}

    async def _reload(self, *parts: str) -> None:
        chosen = [part for part in parts if part in self._offloaded]
        if chosen:
            taken = await self._training.reload(chosen)
            self.moved_bytes |= {f"ranks_taken_{part}": size for part, size in taken.items()}

    @contextmanager
    def _logged(self, switch: str) -> Iterator[None]:
        """One line for what a switch moves, none if it moves nothing."""
        before = set(self.moved_bytes)
        yield
        moved = [
            f"{name} {size / 1e6:.1f} MB" for name, size in self.moved_bytes.items() if name not in before and size
        ]
        if moved:
            logger.info("%s: %s", switch, ", ".join(moved))
