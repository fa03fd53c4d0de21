"""Weights from the training ranks into rollout engines: backends of vLLM's weight-transfer protocol.

`trainer_engine` is the trainer's end of any of them, `engine_backend` the name under which vLLM finds the engine's.
`shared_memory` is ours (both sides); ipc, nccl and nccl_m2n are vLLM's, given what they demand and checked.
Importing this package registers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    VLLMWeightSyncClient,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient as RayVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from dapo_megatron.config.schema import WeightsConfig
from dapo_megatron.weights.transport.block_fp8_source import BlockFP8Source
from dapo_megatron.weights.transport.chunks import WeightSyncError
from dapo_megatron.weights.transport.clients import EngineClients
from dapo_megatron.weights.transport.engine import SharedMemoryWeightEngine
from dapo_megatron.weights.transport.shared_memory import (
    SHARED_MEMORY,
    SharedMemoryTrainerEngine,
    SharedMemoryTrainerInitInfo,
)

__all__ = [
    "ParamMeta",
    "RayVLLMWeightSyncClient",
    "WeightSyncError",
    "WeightTransfer",
    "WeightTransferInitRequest",
    "WeightTransferUpdateRequest",
    "engine_backend",
    "trainer_engine",
]

_CHECKED = {"ipc": "CheckedIPC", "nccl": "CheckedNCCL", "nccl_m2n": "CheckedM2N"}


class WeightTransfer(Protocol):
    """The trainer's end of a transport, on every training rank."""

    def send_weights(self, version: int | None = None) -> None:
        """Push all weights into all engines; `version` becomes their policy version."""

    def shutdown(self) -> None:
        """Give back what the transfer holds."""


class _VLLMTransfer:
    """A trainer engine of vLLM's, which knows neither versions nor deadlines."""

    def __init__(self, clients: EngineClients, source: Any, init_info: TrainerInitInfo) -> None:
        connect = partial(WeightTransferTrainerFactory.trainer_init, init_info, client=clients, source=source)
        self._clients = clients
        self._engine = clients.supervise(connect)
        self.shutdown = self._engine.shutdown

    def send_weights(self, version: int | None = None) -> None:
        from dapo_megatron.weights.transport.cuda import whole_segments

        self._clients.version = None if version is None else str(version)
        with whole_segments():
            self._clients.supervise(self._engine.send_weights)


def engine_backend(transport: str) -> str:
    """What vLLM's WeightTransferConfig must have as `backend` for `weights.transport`."""
    return f"checked_{transport}" if transport in _CHECKED else transport


def trainer_engine(
    source: Any,
    clients: Sequence[VLLMWeightSyncClient],
    settings: WeightsConfig,
    *,
    rank: int,
    workers_per_engine: int = 1,
    quantization: str | None = None,
    address: str = "127.0.0.1",
) -> WeightTransfer:
    """Connect the training ranks and the engines. Called on every rank of the world.

    Args:
        source: a MegatronWeightSource; shared_memory takes any WeightSource.
        clients: one for each engine, the same on every rank.
        settings: the configuration's `weights`.
        workers_per_engine: processes of an engine (`rollout.tensor`).
        quantization: the engines' (`rollout.quantization`).
        address: of rank 0's host, as the engines reach it (nccl, nccl_m2n).

    Raises:
        ValueError: an engine's model is another, or the transport cannot carry this source.
    """
    if quantization == "fp8_block":
        source = BlockFP8Source(source)
    engines = EngineClients(clients, source.metadata(), settings.deadline_s, workers_per_engine)
    if settings.transport == SHARED_MEMORY:
        info = SharedMemoryTrainerInitInfo(settings.buffer_bytes, settings.verify, settings.deadline_s, rank=rank)
        shared: Any = WeightTransferTrainerFactory.trainer_init(info, client=engines, source=source)
        return shared
    from dapo_megatron.weights.transport.cuda import source_and_init_info

    source, vllm_info = source_and_init_info(settings.transport, source, engines, rank, settings.buffer_bytes, address)
    return _VLLMTransfer(engines, source, vllm_info)


WeightTransferEngineFactory.register_engine(SHARED_MEMORY, SharedMemoryWeightEngine)
WeightTransferTrainerFactory.register_engine(SHARED_MEMORY, SharedMemoryTrainerEngine)
for _transport, _name in _CHECKED.items():
    WeightTransferEngineFactory.register_engine(engine_backend(_transport), f"{__name__}.cuda", _name)
