"""vLLM's own CUDA backends: what each demands of the trainer, and its engine's side with the manifest checked.

- ipc: every rank shares its device with an engine's worker and yields the full tensors there.
- nccl: rank 0 yields the full tensors and broadcasts them to the workers, one NCCL group of rank 0 and all workers.
- nccl_m2n: every rank sends its own parts, NCCL reshards them; needs layouts of data and tensor parallelism alone.

Not checked here, because the bytes never pass through the host: checksums.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from vllm.device_allocator import alloc_conf
from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCWeightTransferEngine
from vllm.distributed.weight_transfer.m2n_common import REPLICATE, REPLICATED, M2NMesh, M2NParamMeta
from vllm.distributed.weight_transfer.m2n_engine import M2NWeightTransferEngine
from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource
from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLWeightTransferEngine

from dapo_megatron.weights.export import MegatronWeightSource
from dapo_megatron.weights.transport.clients import EngineClients
from dapo_megatron.weights.transport.engine import Checked


def source_and_init_info(
    transport: str, source: Any, clients: EngineClients, rank: int, buffer_bytes: int, address: str
) -> tuple[Any, TrainerInitInfo]:
    """The source as the backend needs it, and the trainer's init info. Called on every rank.

    Raises:
        ValueError: nccl_m2n with several engines, a quantised source, or a layout that it cannot describe.
    """
    workers = len(clients.clients) * clients.workers_per_engine
    if transport == "ipc":
        return source.on_every_rank(), IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=buffer_bytes, rank=rank)
    if transport == "nccl":
        return source, NCCLTrainerInitInfo(
            master_address=address,
            master_port=_free_port(address) if rank == 0 else 0,
            world_size=1 + workers,
            packed_buffer_size_bytes=buffer_bytes,
            rank=rank,
        )
    if len(clients.clients) > 1:
        raise ValueError("weights.transport=nccl_m2n drives one engine; choose nccl for several")
    parts = LocalParts(source)
    meeting = [(address, _free_port(address) if rank == 0 else 0)]
    if dist.is_initialized():
        dist.broadcast_object_list(meeting, 0)
    return parts, M2NTrainerInitInfo(
        master_address=meeting[0][0],
        master_port=meeting[0][1],
        world_size=parts.mesh().size + workers,
        num_trainer_ranks=parts.mesh().size,
        dst_mesh_dims=(1, workers),
        rank=rank,
    )


@contextlib.contextmanager
def whole_segments() -> Iterator[None]:
    """Memory that is allocated meanwhile can be opened by other processes, which expandable segments make slow."""
    settings = alloc_conf.current_alloc_conf()
    if not alloc_conf.conf_flag_enabled(settings, alloc_conf.EXPANDABLE_SEGMENTS):
        yield
        return
    alloc_conf.set_alloc_conf(alloc_conf.with_conf_flag(settings, alloc_conf.EXPANDABLE_SEGMENTS, False))
    try:
        yield
    finally:
        alloc_conf.set_alloc_conf(settings)


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


class LocalParts(M2NWeightSource):
    """Each rank's own parts of the HF tensors, for a backend that reshards them."""

    def __init__(self, source: MegatronWeightSource) -> None:
        if not isinstance(source, MegatronWeightSource):
            raise ValueError("weights.transport=nccl_m2n cannot send quantised weights: choose nccl or ipc")
        self._source = source
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        try:
            shards, self._dims = source.shard_layout()
        except ValueError as error:
            raise ValueError(f"weights.transport=nccl_m2n needs data and tensor parallelism alone: {error}") from None
        self._mesh = M2NMesh((ranks // shards, shards), 0)

    def mesh(self) -> M2NMesh:
        """Copies of the model x tensor-parallel ranks."""
        return self._mesh

    def metadata(self) -> list[Any]:
        """Name, dtype, full shape and the dimension that tensor-parallel ranks share."""
        return [
            M2NParamMeta(
                tensor.name,
                tensor.dtype,
                tensor.shape,
                REPLICATED if (dim := self._dims[tensor.name]) is None else (REPLICATE, dim),
            )
            for tensor in self._source.metadata()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._source.local_parts()


class CheckedIPC(Checked, IPCWeightTransferEngine):
    """vLLM's `ipc` engine under the trainer's manifest."""


class CheckedNCCL(Checked, NCCLWeightTransferEngine):
    """vLLM's `nccl` engine under the trainer's manifest."""


class CheckedM2N(Checked, M2NWeightTransferEngine):
    """vLLM's `nccl_m2n` engine under the trainer's manifest."""
