"""What an engine's worker can do beside vLLM's own methods (`worker_extension_cls`)."""

from __future__ import annotations

import ctypes
import logging
import mmap
import pickle
from typing import Any

import psutil

import dapo_megatron.rollout.block_fp8_loader  # noqa: F401  (registers the loader in the worker's process)
import dapo_megatron.weights.transport  # noqa: F401  (registers the transports there)

MADV_DONTNEED = 4
logger = logging.getLogger(__name__)


class RolloutWorkerExtension:
    """Mixed into vLLM's worker class by vLLM; `self` is the worker."""

    device: Any
    model_runner: Any
    _weight_update_active: bool

    def attempt(self, method: str, arguments: tuple[Any, ...]) -> list[Exception]:
        """Call a method of the worker; what it raised is the answer, in a list.

        An exception would end vLLM's call at the first worker that fails: it would take the other workers' answers for
        those to its next calls.
        """
        try:
            getattr(self, method)(*arguments)
        except Exception as error:
            logger.exception("%s failed", method)
            try:
                return [pickle.loads(pickle.dumps(error))]
            except Exception:
                return [RuntimeError(repr(error))]
        return []

    def abandon_weight_update(self) -> None:
        """Let the next `start_weight_update` begin afresh after a sync that failed while it was being finished."""
        self._weight_update_active = False

    def bytes_in_use(self) -> int:
        """Memory in use: resident in this process on CPU hosts, on the device (by anybody) elsewhere."""
        import torch

        if self.device.type == "cpu":
            return psutil.Process().memory_info().rss
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def release_memory(self, level: int) -> None:
        """What vLLM's `sleep` leaves out on CPU hosts: return pages to the system, which then read as zeros.

        Args:
            level: 1 for the KV cache's, 2 for those of the weights too.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        released = _tensors(self.model_runner.kv_caches)
        if level == 2:
            released += [parameter.data for parameter in self.model_runner.model.parameters()]
            for module in self.model_runner.model.modules():
                if hasattr(module, "cpu_linear"):
                    module.cpu_linear = None  # holds the packed weight; loading makes another
            libc.malloc_trim(0)
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in released}
        for address, size in storages.items():
            start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
            if end > start and libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "madvise on an engine's memory")


def _tensors(caches: Any) -> list[Any]:
    """The tensors of vLLM's KV caches: a list of tensors, or of lists of tensors."""
    return [tensor for cache in caches for tensor in (cache if isinstance(cache, (list, tuple)) else [cache])]
