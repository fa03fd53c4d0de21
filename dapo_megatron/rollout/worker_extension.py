"""What an engine's worker can do beside vLLM's own methods (`worker_extension_cls`)."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import dapo_megatron.weights.transport  # noqa: F401  (registers the transport in the worker's process)

MADV_DONTNEED = 4


class RolloutWorkerExtension:
    """Mixed into vLLM's worker class by vLLM; `self` is the worker."""

    model_runner: Any
    _weight_update_active: bool

    def abandon_weight_update(self) -> None:
        """Let the next `start_weight_update` begin afresh after a sync that failed while it was being finished."""
        self._weight_update_active = False

    def release_kv_cache(self) -> int:
        """Return the pages of the KV cache to the system (CPU hosts); they read as zeros. Returns the bytes."""
        libc = ctypes.CDLL(None, use_errno=True)
        released_bytes = 0
        storages = {
            cache.untyped_storage().data_ptr(): cache.untyped_storage()
            for cache in _tensors(self.model_runner.kv_caches)
        }
        for address, storage in storages.items():
            start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (address + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
            if end > start:
                if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED):
                    raise OSError(ctypes.get_errno(), "madvise on the KV cache")
                released_bytes += end - start
        return released_bytes


def _tensors(caches: Any) -> list[Any]:
    """The tensors of vLLM's KV caches: a list of tensors, or of lists of tensors."""
    return [tensor for cache in caches for tensor in (cache if isinstance(cache, (list, tuple)) else [cache])]
