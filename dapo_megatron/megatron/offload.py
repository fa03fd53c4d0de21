"""Training state that leaves the device while others use it, as named phases.

A phase is moved storage by storage: the bytes go to pinned host memory and the storage is resized to nothing. Every
view keeps its place in its storage (parameters in Megatron's parameter buffer, `main_grad` in its gradient buffer, the
optimizer's shards in both), so that nobody has to be told where the bytes went. Gradients are not copied: every update
begins by zeroing them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

PHASES = ("params", "grads", "optimizer", "reference")
"""Parameters; gradients; the optimizer's moments and main parameters; the reference policy."""


@dataclass(frozen=True)
class _Emptied:
    """A storage that was resized to nothing, and the bytes to fill it with again (none: zeros)."""

    storage: torch.UntypedStorage
    size_bytes: int
    host: Tensor | None


class OffloadableState:
    """The parameters, gradients and optimizer state of this rank.

    On the CPU there is no other place to bring them to: there only the gradients are freed, and the rest stays.

    Args:
        chunks: the DDP-wrapped model chunks.
        optimizer: Megatron's optimizer over them.
        reference: the tensors of the reference policy.
        host_copies: whether parameters, optimizer state and reference are copied to the host and freed; by default on
            CUDA only.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        reference: Iterable[Tensor] = (),
        *,
        host_copies: bool | None = None,
    ) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._reference = list(reference)
        self._host_copies = torch.cuda.is_available() if host_copies is None else host_copies
        self._emptied: dict[str, list[_Emptied]] = {}
        # Pinning takes longer than copying: a phase keeps its host memory for the next time.
        self._host: dict[str, list[Tensor]] = {phase: [] for phase in PHASES}

    @property
    def resident(self) -> frozenset[str]:
        """The phases that are on the device."""
        return frozenset(PHASES) - self._emptied.keys()

    def bytes_on_device(self) -> dict[str, int]:
        """Phase -> bytes that it takes on the device now."""
        return {phase: sum(each.nbytes() for each in storages) for phase, storages in self._storages().items()}

    def offload(self, phases: Iterable[str]) -> dict[str, int]:
        """Free the device memory of phases; those that are offloaded already stay so.

        Returns:
            Phase -> bytes freed: 0 for one that was offloaded already, or that has nowhere to go.

        Raises:
            ValueError: an unknown phase.
        """
        return {phase: self._offload(phase) for phase in _checked(phases)}

    def reload(self, phases: Iterable[str]) -> dict[str, int]:
        """Bring phases back to the device as they were, the gradients as zeros.

        Returns:
            Phase -> bytes allocated: 0 for one that was on the device.

        Raises:
            ValueError: an unknown phase.
        """
        return {phase: self._reload(phase) for phase in _checked(phases)}

    def require(self, *phases: str) -> None:
        """Refuse to go on without phases: reading an emptied storage would crash the process.

        Raises:
            RuntimeError: names the phases that are offloaded.
        """
        missing = [phase for phase in _checked(phases) if phase in self._emptied]
        if missing:
            raise RuntimeError(
                f"this needs {', '.join(phases)} on the device, and offloaded are: {', '.join(missing)}; "
                f"reload({missing}) first"
            )

    @contextlib.contextmanager
    def on_device(self, *phases: str) -> Iterator[None]:
        """Have phases on the device for a while; those that had to be brought leave again."""
        brought = [phase for phase in _checked(phases) if phase in self._emptied]
        self.reload(brought)
        try:
            yield
        finally:
            self.offload(brought)

    @torch.no_grad()
    def _offload(self, phase: str) -> int:
        if phase in self._emptied or (phase != "grads" and not self._host_copies):
            return 0
        began = time.perf_counter()
        storages = self._storages()[phase]
        hosts: Sequence[Tensor | None] = [None] * len(storages)
        if phase != "grads":
            hosts = self._copy_to_host(phase, storages)
        # The copies, and whatever else still reads: another stream's collectives.
        torch.cuda.synchronize()
        self._emptied[phase] = [
            _Emptied(storage, storage.nbytes(), host) for storage, host in zip(storages, hosts, strict=True)
        ]
        for storage in storages:
            storage.resize_(0)
        torch.cuda.empty_cache()
        return self._report("offload", phase, "freed", began)

    @torch.no_grad()
    def _reload(self, phase: str) -> int:
        if phase not in self._emptied:
            return 0
        began = time.perf_counter()
        for each in self._emptied[phase]:
            each.storage.resize_(each.size_bytes)
            if each.host is None:
                _bytes_of(each.storage).zero_()
            else:
                _bytes_of(each.storage).copy_(each.host, non_blocking=True)
        torch.cuda.synchronize()
        size_bytes = self._report("reload", phase, "allocated", began)
        del self._emptied[phase]
        return size_bytes

    def _report(self, what: str, phase: str, done: str, began: float) -> int:
        size_bytes = sum(each.size_bytes for each in self._emptied[phase])
        level = logging.INFO if not dist.is_initialized() or dist.get_rank() == 0 else logging.DEBUG
        took_s = time.perf_counter() - began
        logger.log(level, "%s %s: %s %s in %.2f s", what, phase, done, _readable(size_bytes), took_s)
        return size_bytes

    def _copy_to_host(self, phase: str, storages: list[torch.UntypedStorage]) -> list[Tensor]:
        hosts = self._host[phase]
        # The optimizer makes its state in its first step.
        del hosts[len(storages) :]
        for place, storage in enumerate(storages):
            if place == len(hosts) or hosts[place].numel() != storage.nbytes():
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
                hosts[place : place + 1] = [host]
            hosts[place].copy_(_bytes_of(storage), non_blocking=True)
        return list(hosts)

    def _storages(self) -> dict[str, list[torch.UntypedStorage]]:
        """Phase -> its storages, each in one phase only: shards of float32 parameters belong to the parameters."""
        tensors = {
            "grads": self._grads(),
            "params": self._params(),
            "optimizer": self._optimizer_state(),
            "reference": iter(self._reference),
        }
        seen: set[int] = set()
        storages: dict[str, list[torch.UntypedStorage]] = {}
        for phase, found in tensors.items():
            storages[phase] = []
            for tensor in found:
                for storage in _storages_of(tensor):
                    if storage._cdata not in seen:
                        seen.add(storage._cdata)
                        storages[phase].append(storage)
        return storages

    def _buffers(self) -> Iterator[Any]:
        for chunk in self._chunks:
            yield from chunk.buffers + chunk.expert_parallel_buffers

    def _grads(self) -> Iterator[Tensor]:
        yield from (buffer.grad_data for buffer in self._buffers())
        for chunk in self._chunks:
            yield from (parameter.main_grad for parameter in chunk.parameters() if hasattr(parameter, "main_grad"))

    def _params(self) -> Iterator[Tensor]:
        yield from (buffer.param_data for buffer in self._buffers() if buffer.param_data is not None)
        for chunk in self._chunks:
            yield from chunk.parameters()

    def _optimizer_state(self) -> Iterator[Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]
        for part in self._optimizer.chained_optimizers:
            if part.optimizer is None:  # no parameters of this kind on this rank
                continue
            for state in part.optimizer.state.values():
                # Counters of steps are a few bytes each.
                yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0)


def _checked(phases: Iterable[str]) -> list[str]:
    phases = list(phases)
    unknown = [phase for phase in phases if phase not in PHASES]
    if unknown:
        raise ValueError(f"no such phase: {', '.join(map(repr, unknown))}; there are {', '.join(PHASES)}")
    return phases


def _storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """The storages of a tensor: several for Transformer Engine's quantised ones, which wrap others."""
    wrapped = getattr(tensor, "get_data_tensors", None)
    parts = [tensor] if wrapped is None else [part for part in wrapped() if part is not None]
    return [part.untyped_storage() for part in parts]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The whole storage as uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _readable(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.2f} MB"
