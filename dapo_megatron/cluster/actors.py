"""The Ray actors: a training rank around MegatronActor, an engine around RolloutEngine; and their handles, which
are what the trainer sees (`TrainingGroup`, `RolloutEngine` in trainer/roles.py)."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from dapo_megatron.cluster.waiting import answer, answers
from dapo_megatron.config.schema import Config, Placement, SamplingConfig
from dapo_megatron.data.types import ActorPlan, Sample, TrainingSample

logger = logging.getLogger(__name__)

SHUTDOWN_DEADLINE_S = 20.0
"""After it an engine is left to Ray, which kills it."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands in the layout: its share of the data, and whether it is the one that answers for it; and
    which kernels it uses."""

    data_parallel_rank: int
    answers_for_share: bool
    kernels: str


class TrainingRank:
    """One training process; methods are called on all ranks at once, since they hold collectives."""

    def __init__(self, config: Config, hf_folder: str, rank: int, world_size: int) -> None:
        self._config = config
        self._hf_folder = hf_folder
        self._rank = rank
        self._world_size = world_size

    def rendezvous(self) -> tuple[str, int]:
        """An address and a free port on this host, for the process group."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def start(self, master_address: str, master_port: int) -> RankPlace:
        """Join the process group, build the model, and leave a shared device to the engines."""
        from dapo_megatron.megatron.actor import MegatronActor

        self._actor = MegatronActor(
            self._config,
            self._hf_folder,
            rank=self._rank,
            world_size=self._world_size,
            master_address=master_address,
            master_port=master_port,
        )
        self._address = master_address
        if self._config.cluster.placement is Placement.colocated:
            self._actor.offload(self._config.cluster.offload)
        return RankPlace(self._actor.data_parallel_rank, self._actor.answers_for_share, str(self._actor.kernels))

    def connect(self, engine_handles: list[Any]) -> None:
        """Set up the weight transfer into the engines."""
        from dapo_megatron.weights.transport import RayVLLMWeightSyncClient, trainer_engine

        self._transfer = trainer_engine(
            self._actor.weight_source(),
            [RayVLLMWeightSyncClient([handle]) for handle in engine_handles],
            self._config.weights,
            rank=self._rank,
            workers_per_engine=self._config.rollout.tensor,
            quantization=self._config.rollout.quantization,
            address=self._address,
        )

    def log_probs(self, micro_batches: list[list[TrainingSample]], reference: bool) -> list[list[np.ndarray]]:
        """See MegatronActor.log_probs."""
        return self._actor.log_probs(micro_batches, reference=reference)

    def update(self, micro_batches: list[list[TrainingSample]], step: int) -> dict[str, float]:
        """See MegatronActor.update."""
        return self._actor.update(micro_batches, step=step)

    def offload(self, phases: list[str]) -> dict[str, int]:
        """See MegatronActor.offload."""
        return self._actor.offload(phases)

    def reload(self, phases: list[str]) -> dict[str, int]:
        """See MegatronActor.reload."""
        return self._actor.reload(phases)

    def sync_weights(self, policy_version: int) -> None:
        """Send all weights to the engines."""
        self._transfer.send_weights(policy_version)

    def export(self, folder: str) -> None:
        """See MegatronActor.export_hf."""
        self._actor.export_hf(Path(folder))


class RayTrainingGroup:
    """All training ranks as one `TrainingGroup`."""

    def __init__(self, ranks: list[Any], config: Config) -> None:
        self._ranks = ranks
        self._deadline_s = config.cluster.phase_deadline_s
        self._places: list[RankPlace] = []
        self.data_parallel_size = config.parallel.data

    async def start(self, deadline_s: float) -> None:
        """Build the model on every rank."""
        address = await answer(self._ranks[0].rendezvous.remote(), "training rank 0", "rendezvous", deadline_s)
        self._places = await self._on_all_ranks("start", *address, deadline_s=deadline_s)
        logger.info("kernels of the training actors: %s", self._places[0].kernels)

    async def connect(self, engine_handles: list[Any], deadline_s: float) -> None:
        """Set up the weight transfer; the engines must be up."""
        await self._on_all_ranks("connect", engine_handles, deadline_s=deadline_s)

    async def log_probs(self, plan: ActorPlan, *, reference: bool = False) -> list[list[list[np.ndarray]]]:
        """See TrainingGroup.log_probs."""
        return self._by_share(await self._on_shares("log_probs", plan, reference))

    async def update(self, plan: ActorPlan, *, step: int) -> dict[str, float]:
        """See TrainingGroup.update."""
        return self._by_share(await self._on_shares("update", plan, step))[0]

    async def offload(self, phases: Sequence[str]) -> dict[str, int]:
        """See TrainingGroup.offload."""
        return _largest(await self._on_all_ranks("offload", list(phases)))

    async def reload(self, phases: Sequence[str]) -> dict[str, int]:
        """See TrainingGroup.reload."""
        return _largest(await self._on_all_ranks("reload", list(phases)))

    async def sync_weights(self, policy_version: int) -> None:
        """See TrainingGroup.sync_weights."""
        await self._on_all_ranks("sync_weights", policy_version)

    async def export(self, folder: Path) -> None:
        """See TrainingGroup.export."""
        shutil.rmtree(folder, ignore_errors=True)
        await self._on_all_ranks("export", str(folder.absolute()))

    async def _on_all_ranks(self, method: str, *args: Any, deadline_s: float | None = None) -> list[Any]:
        calls = {f"training rank {i}": getattr(rank, method).remote(*args) for i, rank in enumerate(self._ranks)}
        return await answers(calls, method, deadline_s or self._deadline_s)

    async def _on_shares(self, method: str, plan: ActorPlan, *args: Any) -> list[Any]:
        """Call each rank with its share only; a share is stored once for all ranks that need it."""
        shares = [ray.put([list(micro_batch) for micro_batch in share]) for share in plan]
        calls = {
            f"training rank {i}": getattr(rank, method).remote(shares[place.data_parallel_rank], *args)
            for i, (rank, place) in enumerate(zip(self._ranks, self._places, strict=True))
        }
        return await answers(calls, method, self._deadline_s)

    def _by_share(self, results: list[Any]) -> list[Any]:
        found = {
            place.data_parallel_rank: result
            for place, result in zip(self._places, results, strict=True)
            if place.answers_for_share
        }
        return [found[share] for share in range(self.data_parallel_size)]


def _largest(of_ranks: list[dict[str, int]]) -> dict[str, int]:
    return {phase: max(sizes[phase] for sizes in of_ranks) for phase in of_ranks[0]}


class RayEngine:
    """One engine actor as a trainer's `RolloutEngine`."""

    def __init__(self, handle: Any, index: int, config: Config) -> None:
        self.handle = handle
        self._name = f"rollout engine {index}"
        self._deadline_s = config.cluster.phase_deadline_s

    async def generate(
        self, prompt_token_ids: Sequence[int], seeds: Sequence[int], sampling: SamplingConfig
    ) -> list[Sample]:
        """See sampling.engine_pool.Engine.generate."""
        return await self._call("generate", list(prompt_token_ids), list(seeds), sampling)

    async def abort_all(self) -> None:
        """See sampling.engine_pool.Engine.abort_all."""
        await self._call("abort_all")

    async def release(self) -> int:
        """See trainer.roles.RolloutEngine.release."""
        return await self._call("release")

    async def wake_weights(self) -> int:
        """See trainer.roles.RolloutEngine.wake_weights."""
        return await self._call("wake_weights")

    async def wake_kv_cache(self) -> int:
        """See trainer.roles.RolloutEngine.wake_kv_cache."""
        return await self._call("wake_kv_cache")

    async def shutdown(self) -> None:
        """End the engine, so that it gives back what would outlive its process: shared memory, processes of its own."""
        await answer(self.handle.shutdown.remote(), self._name, "shutdown", SHUTDOWN_DEADLINE_S)

    async def ready(self, deadline_s: float) -> None:
        """Wait until the engine has loaded its model."""
        await answer(self.handle.__ray_ready__.remote(), self._name, "start", deadline_s)

    async def _call(self, method: str, *args: Any) -> Any:
        return await answer(getattr(self.handle, method).remote(*args), self._name, method, self._deadline_s)


async def start_all(group: RayTrainingGroup, engines: Sequence[RayEngine], deadline_s: float) -> None:
    """Bring up engines and ranks side by side, then connect them."""
    await asyncio.gather(group.start(deadline_s), *(engine.ready(deadline_s) for engine in engines))
    await group.connect([engine.handle for engine in engines], deadline_s)


@asynccontextmanager
async def shutting_down(engines: Sequence[RayEngine]) -> AsyncIterator[None]:
    """End engines with the block, however it ends; one that has died already is no error."""
    try:
        yield
    finally:
        await asyncio.gather(*(engine.shutdown() for engine in engines), return_exceptions=True)
