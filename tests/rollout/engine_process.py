"""A `RolloutEngine` in a process of its own: vLLM changes torch for the whole process that it runs in."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from dapo_megatron.config.schema import Config
from dapo_megatron.rollout.engine import RolloutEngine, engine_environment

START_DEADLINE_S = 400.0
CALL_DEADLINE_S = 60.0


class EngineProcess:
    """Calls cross a pipe; `submit` may be called while others are pending. `prepare` runs there before the engine."""

    def __init__(self, config: Config, hf_folder: str, prepare: Callable[[], None] | None = None) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._keys = itertools.count(1)
        self._pending: dict[int, Future[Any]] = {0: Future()}
        self._started = self._pending[0]
        context = multiprocessing.get_context("spawn")
        kept = dict(os.environ)
        os.environ.update(engine_environment("cpu", config.rollout.cpu_threads))
        try:
            # A daemon may have no children, and the workers of a larger engine are such.
            alone = config.rollout.tensor == 1
            self._process = context.Process(target=_serve, args=(theirs, config, hf_folder, prepare), daemon=alone)
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(kept)
        theirs.close()
        threading.Thread(target=self._receive, daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        assert self._process.pid is not None
        return self._process.pid

    def wait_until_started(self) -> None:
        """Raises what the engine's constructor raised."""
        self._started.result(START_DEADLINE_S)

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Start a call of one of the engine's methods."""
        key = next(self._keys)
        future = self._pending[key] = Future()
        self._pipe.send((key, method, args))
        return future

    def call(self, method: str, *args: Any) -> Any:
        """Call and wait; the engine's exceptions are raised here."""
        return self.submit(method, *args).result(CALL_DEADLINE_S)

    def stop(self) -> None:
        """End the process; one with workers gets time to clean up after them."""
        if not self._process.daemon:
            with contextlib.suppress(OSError):
                self._pipe.send((0, "stop", ()))
            self._process.join(CALL_DEADLINE_S)
        self._process.kill()
        self._process.join()

    def _receive(self) -> None:
        while True:
            try:
                key, result, error = self._pipe.recv()
            except (EOFError, OSError):
                for future in self._pending.values():
                    future.set_exception(RuntimeError("the engine's process has ended"))
                return
            future = self._pending.pop(key)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


def _serve(pipe: Connection, config: Config, hf_folder: str, prepare: Callable[[], None] | None) -> None:
    def reply(key: int, result: Any = None, error: Exception | None = None) -> None:
        try:
            pipe.send((key, result, pickle.loads(pickle.dumps(error))))
        except Exception:
            pipe.send((key, None, RuntimeError(repr(error))))

    async def answer(engine: RolloutEngine, key: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            reply(key, await getattr(engine, method)(*args))
        except Exception as error:
            reply(key, error=error)

    async def serve(engine: RolloutEngine) -> None:
        tasks = set()
        while True:
            key, method, args = await asyncio.to_thread(pipe.recv)
            if method == "stop":
                return engine.shutdown()
            tasks.add(asyncio.create_task(answer(engine, key, method, args)))

    try:
        if prepare is not None:
            prepare()
        engine = RolloutEngine(config, hf_folder)
    except Exception as error:
        reply(0, error=error)
        return
    reply(0)
    asyncio.run(serve(engine))
