"""Tensors that lie in files, read without a copy and without filling the memory with the files; and writing them."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

# Since Linux 5.14; Python names it since 3.13.
_MADV_POPULATE_READ = 22
_PIECE_BYTES = 1024 * 1024


class MappedFiles:
    """Memory-mapped files. May be used by several threads.

    Pages of a mapping that were read count as this process's memory until the mapping goes. So once tensors of
    `resident_bytes` were handed out, files are mapped afresh; an old mapping goes with the last tensor that lies in it.
    """

    def __init__(self, resident_bytes: int = 128 * 1024 * 1024) -> None:
        self._resident_bytes = resident_bytes
        self._handed_out_bytes = 0
        self._mappings: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    def tensor(self, file: Path, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """The tensor that lies at a byte offset; writing to it does not reach the file."""
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(tuple(shape), dtype=dtype)
        mapping = self._mapping(file, size)
        page = offset // mmap.PAGESIZE * mmap.PAGESIZE
        # All pages at once: half of the time would go into one fault after the other. Elsewhere they come one by one.
        with contextlib.suppress(OSError):
            mapping.madvise(_MADV_POPULATE_READ, page, offset + size - page)
        values = torch.frombuffer(mapping, dtype=torch.uint8, offset=offset, count=size)
        if values.data_ptr() % dtype.itemsize:
            values = values.clone()
        return values.view(dtype).view(tuple(shape))

    def _mapping(self, file: Path, wanted_bytes: int) -> mmap.mmap:
        with self._lock:
            if self._handed_out_bytes > self._resident_bytes:
                self._mappings.clear()
                self._handed_out_bytes = 0
            self._handed_out_bytes += wanted_bytes
            if file not in self._mappings:
                with file.open("rb") as stream:
                    self._mappings[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            return self._mappings[file]


class WriteThrough:
    """A stream for large buffers: piece by piece, each on its way to the disk while the next is copied.

    So the last flush is short; and one large write would ask for large pages, which come slowly where free memory has
    been given back to the host of a virtual machine.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            written = self._stream.write(view[start : start + _PIECE_BYTES])
            if written == _PIECE_BYTES:
                self._stream.flush()
                # The kernel drops pages that are clean, and writes the others first.
                offset = self._stream.tell() - written
                os.posix_fadvise(self._stream.fileno(), offset, written, os.POSIX_FADV_DONTNEED)
        return len(view)

    def flush(self) -> None:
        self._stream.flush()
