"""The engine's side of every backend: what came is checked against the manifest, and loaded layer by layer."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from dapo_megatron.models.dimensions import Dimensions
from dapo_megatron.models.family import Family
from dapo_megatron.models.registry import family_of
from dapo_megatron.weights.block_fp8 import scale_shapes
from dapo_megatron.weights.hf_folder import HFFolder
from dapo_megatron.weights.transport.chunks import Slot, WeightSyncError, check_manifest, checksum, chunk_bytes, some_of


class Checked:
    """Stands before a WeightTransferEngine: each tensor of the manifest comes once, with its shape, or the sync raises.

    On the CPU it also takes the two steps that vLLM's layerwise reload lacks there.
    """

    expected: dict[str, tuple[int, ...]] | None = None
    model: torch.nn.Module
    model_config: Any
    vllm_config: Any
    device: torch.device

    def checkpoint(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the tensors that this engine's model folder holds, quantised as the engine is."""
        shapes = {name: self._folder.shape(name) for name in self._folder.names()}
        block_wise = getattr(self.vllm_config.quant_config, "weight_block_size", None)
        return shapes | (scale_shapes(shapes) if block_wise else {})

    def optional(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor or not: a tied output weight, what no model needs."""
        family, dimensions = self._family
        return (dimensions.tied_embeddings and name == "lm_head.weight") or family.is_ignored(name, dimensions)

    @cached_property
    def _folder(self) -> HFFolder:
        return HFFolder(self.model_config.model)

    @cached_property
    def _family(self) -> tuple[Family, Dimensions]:
        family = family_of(self._folder.config)
        return family, family.dimensions(self._folder.config)

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """Take `manifest`, [name, shape] of every tensor of each sync under HF names; the rest is the backend's.

        Raises:
            ValueError: they are not what this engine's model folder holds.
        """
        self._take_manifest(init_dict["manifest"])
        of_backend = {key: value for key, value in init_dict.items() if key != "manifest"}
        return super().parse_init_info(of_backend)  # type: ignore[misc]

    def _take_manifest(self, manifest: Iterable[tuple[str, Iterable[int]]]) -> None:
        pairs = [(name, tuple(shape)) for name, shape in manifest]
        shapes = dict(pairs)
        if len(shapes) != len(pairs):
            raise ValueError("the weight source's metadata names a tensor twice")
        check_manifest(shapes, self.checkpoint(), self.optional)
        self.expected = shapes

    def start_weight_update(self) -> None:
        """Open a sync; what an abandoned one left behind is dropped."""
        from vllm.model_executor.model_loader.reload import layerwise

        if self.expected is None:
            raise WeightSyncError("start_weight_update before init_weight_transfer_engine")
        self.received: set[str] = set()
        for module in self.model.modules():
            info = layerwise.get_layerwise_info(module)
            if info.can_load():  # a layer that an abandoned sync left incomplete
                layerwise._place_kernel_tensors(module, info)
                info.reset()
            method: Any = getattr(module, "quant_method", None)
            if self.device.type == "cpu" and getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None  # else the experts are not packed again
        super().start_weight_update()  # type: ignore[misc]

    def receive_weights(self, update_info: Any) -> None:
        """Tick tensors off the manifest, and load them.

        Raises:
            WeightSyncError: one is unknown, comes twice or has the wrong shape (of nccl_m2n: at the start).
        """
        assert self.expected is not None
        shapes = getattr(update_info, "shapes", None) or map(self.expected.get, update_info.names)
        for name, shape in zip(update_info.names, shapes, strict=True):
            if name not in self.expected:
                raise WeightSyncError(f"{name} is not in the manifest")
            if name in self.received:
                raise WeightSyncError(f"{name} was sent twice in one sync")
            if tuple(shape) != self.expected[name]:
                raise WeightSyncError(f"{name}: expected {self.expected[name]}, received {tuple(shape)}")
            self.received.add(name)
        super().receive_weights(update_info)  # type: ignore[misc]

    def finish_weight_update(self) -> None:
        """Close a sync.

        Raises:
            WeightSyncError: some tensor of the manifest never came.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        assert self.expected is not None
        missing = [name for name in self.expected if name not in self.received]
        if missing:
            raise WeightSyncError(f"the sync ended without {len(missing)} tensors: {some_of(missing)}")
        super().finish_weight_update()  # type: ignore[misc]
        if self.device.type == "cpu":
            # A tied head keeps its packed copy of the old embedding unless it is packed again.
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """`buffers`: [path, size in bytes]."""

    buffers: list[tuple[str, int]]


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """One chunk: which buffer it is in, and what lies where."""

    buffer: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets_bytes: list[int]
    checksums: list[int] | None = None

    def slots(self) -> list[Slot]:
        """The chunk's slots, in the order of `names`."""
        columns = zip(self.names, self.dtype_names, self.shapes, self.offsets_bytes, strict=True)
        return [Slot(name, getattr(torch, dtype), tuple(shape), offset) for name, dtype, shape, offset in columns]


class _FromSharedMemory(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Loads chunks from the trainer's buffers into one worker's model, in the reload that vLLM's own engines use."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo
    _files: list[Any] = []

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Open the trainer's buffers.

        Raises:
            ValueError: the trainer is on another host.
        """
        self.shutdown()
        try:
            self._files = [open(path, "rb") for path, _ in init_info.buffers]
        except FileNotFoundError as error:
            raise ValueError(
                "weights.transport=shared_memory: this engine is on another host than training rank 0; "
                "choose nccl for engines on other hosts"
            ) from error

    def start_weight_update(self) -> None:
        """Open a reload."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Close it."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Load one chunk; nothing refers to the buffer afterwards.

        Raises:
            WeightSyncError: bytes changed on the way, or vLLM keeps the buffer.
        """
        slots = update_info.slots()
        # A private mapping: what a loader might write stays out of the buffer.
        file = self._files[update_info.buffer]
        mapping = mmap.mmap(file.fileno(), chunk_bytes(slots), access=mmap.ACCESS_COPY)
        self._load(mapping, slots, update_info.checksums)
        try:
            mapping.close()
        except BufferError as error:
            raise WeightSyncError(
                "vLLM still refers to weights that it has loaded; the buffer cannot be reused"
            ) from error

    def _load(self, mapping: mmap.mmap, slots: list[Slot], checksums: list[int] | None) -> None:
        # Through numpy, whose arrays keep the mapping from being closed as long as a tensor refers to it.
        buffer = torch.from_numpy(np.frombuffer(mapping, np.uint8))
        weights = [(slot.name, slot.view(buffer)) for slot in slots]
        if checksums is not None:
            for (name, weight), sent in zip(weights, checksums, strict=True):
                if checksum(weight) != sent:
                    raise WeightSyncError(f"{name}: the bytes received are not those sent (CRC-32 differs)")
        if self.device.type != "cpu":
            weights = [(name, weight.to(self.device)) for name, weight in weights]
        self.model.load_weights(iter(weights))
        self._keep_pending(buffer)

    def _keep_pending(self, buffer: torch.Tensor) -> None:
        """Copy what vLLM holds back: layers are loaded when complete, padded ones (vocabulary) when the sync ends."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        start = buffer.untyped_storage().data_ptr()
        for module in self.model.modules():
            for _, bound in get_layerwise_info(module).loaded_weights:
                for key, value in bound.arguments.items():
                    if isinstance(value, torch.Tensor) and not value.is_meta:
                        if value.untyped_storage().data_ptr() == start:
                            bound.arguments[key] = value.clone()

    def shutdown(self) -> None:
        """Close the trainer's buffers."""
        for file in self._files:
            file.close()
        self._files = []


class SharedMemoryWeightEngine(Checked, _FromSharedMemory):
    """The engine's side of the shared-memory backend."""
