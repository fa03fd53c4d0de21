"""Runs a function in several processes that form one gloo world."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROJECT_ROOT = Path(__file__).resolve().parents[2]


def run_ranks(function: Callable, world_size: int, folder: Path, *arguments: Any, deadline_s: float = 180) -> list[Any]:
    """function(rank, world_size, port, *arguments) in each process -> what each returned.

    Raises:
        RuntimeError: a rank failed; with its output.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    call = (function.__module__, function.__qualname__, world_size, port, arguments)
    (folder / "call.pickle").write_bytes(pickle.dumps(call))
    of_test = Path(inspect.getfile(function)).parent
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{PROJECT_ROOT}{os.pathsep}{of_test}"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(folder), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=deadline_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [rank for rank, process in enumerate(processes) if process.returncode != 0]
    if failed:
        # The one that raised first may not be the first: others fail when it leaves them.
        said = "\n".join(f"rank {rank} said:\n{outputs[rank]}" for rank in failed)
        raise RuntimeError(f"ranks {failed} failed\n{said}")
    return [pickle.loads((folder / f"result-{rank}.pickle").read_bytes()) for rank in range(world_size)]


def _main(folder: Path, rank: int) -> None:
    import importlib

    import torch.distributed as dist

    module, name, world_size, port, arguments = pickle.loads((folder / "call.pickle").read_bytes())
    result = getattr(importlib.import_module(module), name)(rank, world_size, port, *arguments)
    (folder / f"result-{rank}.pickle").write_bytes(pickle.dumps(result))
    # Rank 0 holds the store, and all hold ends of connections: nobody leaves while another needs them, unless a rank
    # has died, on purpose or not, which is not this one's failure.
    with contextlib.suppress(RuntimeError):
        if dist.is_initialized():
            dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():
        child.kill()  # those of Megatron's checkpoints hold this process's output open
    # Not by the interpreter's teardown, which finds the running threads of whatever groups the function left behind and
    # then sometimes aborts the process ("terminate called without an active exception").
    os._exit(0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
