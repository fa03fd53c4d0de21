"""A folder gets its name only when it is complete: until then its files lie in a hidden sibling."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

_CHECKPOINT_FILES = ("config.json", "latest_checkpointed_iteration.txt", ".metadata")
_SPARE_BYTES = 64 * 1024 * 1024


@contextmanager
def staged_folder(target: Path, overwrite: bool = False, needed_bytes: int = 0) -> Iterator[Path]:
    """The folder to write into. It becomes `target` at the end, and is removed after an error or interrupt.

    Args:
        overwrite: `target` may be an earlier checkpoint, which is replaced at the end; what interrupted writers left
            beside it is removed.
        needed_bytes: what will be written, which has to be free on the disk.

    Raises:
        ValueError: the folder exists, or is no checkpoint, or another process writes it; too little disk.
    """
    target = target.absolute()
    if target.exists() and not overwrite:
        raise ValueError(f"{target} exists: choose another folder, remove it, or overwrite it (--overwrite)")
    if target.exists() and not _is_replaceable(target):
        raise ValueError(f"{target} is neither a checkpoint nor an empty folder, and is not overwritten")
    target.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(target, overwrite)
    free = shutil.disk_usage(target.parent).free
    if needed_bytes and free < needed_bytes + _SPARE_BYTES:
        raise ValueError(
            f"no space for {target}: it takes {needed_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free"
        )
    staging = _sibling(target, "incomplete")
    staging.mkdir()
    try:
        yield staging
        _flush(staging)
        if target.exists():
            replaced = _sibling(target, "replaced")
            target.rename(replaced)
            staging.rename(target)
            shutil.rmtree(replaced)
        else:
            staging.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(f"no space left while writing {target}: nothing was kept") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _sibling(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}-{os.getpid()}")


def _is_replaceable(folder: Path) -> bool:
    return folder.is_dir() and (
        any((folder / name).exists() for name in _CHECKPOINT_FILES) or not any(folder.iterdir())
    )


def _clear_leftovers(target: Path, remove: bool) -> None:
    for path in sorted(target.parent.iterdir()):
        match = re.fullmatch(rf"\.{re.escape(target.name)}\.(incomplete|replaced)-(\d+)", path.name)
        if match is None:
            continue
        process = int(match[2])
        if _is_written_by(process, path):
            raise ValueError(f"process {process} is writing {target} ({path})")
        if remove or process == os.getpid():
            shutil.rmtree(path)
        else:
            logger.warning("%s is left of an interrupted write, and may be removed", path)


def _is_written_by(process: int, folder: Path) -> bool:
    """Numbers of processes return: one that started after the last change is another."""
    try:
        return process != os.getpid() and psutil.Process(process).create_time() <= folder.stat().st_mtime
    except psutil.NoSuchProcess:
        return False


def _flush(folder: Path) -> None:
    """To the disk, so that the name never outlives the bytes."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
