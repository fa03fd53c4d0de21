"""The engines as one vLLM weight-sync client, and deadlines for what waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any, TypeVar

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, VLLMWeightSyncClient

from dapo_megatron.weights.transport.chunks import WeightSyncError

T = TypeVar("T")


class EngineClients:
    """What vLLM's trainer engines take as their client: calls all engines at once.

    Args:
        clients: one for each engine.
        manifest: what every sync will bring; the engines get it before all else.
        deadline_s: longest wait for the answers to one call.
        workers_per_engine: in NCCL groups the workers of an engine follow those of the engine before it.
    """

    def __init__(
        self,
        clients: Sequence[VLLMWeightSyncClient],
        manifest: Sequence[ParamMeta],
        deadline_s: float,
        workers_per_engine: int = 1,
    ) -> None:
        self.clients = list(clients)
        self.deadline_s = deadline_s
        self.workers_per_engine = workers_per_engine
        self.version: str | None = None
        self._manifest = [[meta.name, list(meta.shape)] for meta in manifest]
        self._failed: Future[None] = Future()

    def supervise(self, action: Callable[[], T]) -> T:
        """Run what waits for engines or other ranks without a deadline of its own, as NCCL does.

        Raises:
            Exception: what a call to an engine raised meanwhile, at once.
            WeightSyncError: twice the deadline has passed, in which rank 0 has heard of a silent engine. NCCL's groups
                are lost then, and the transfer cannot be used again.
        """
        self._failed = Future()
        running = _in_thread(action)
        both: list[Future[Any]] = [self._failed, running]
        done, _ = wait(both, 2 * self.deadline_s, return_when=FIRST_COMPLETED)
        if self._failed in done:
            self._failed.result()
        if running not in done:
            raise WeightSyncError(f"engines or training ranks did not meet within {2 * self.deadline_s:g} s")
        return running.result()

    def begin(self, method: str, *arguments: Any) -> Callable[[], None]:
        """Start a call on all engines; calling the result waits for it.

        The wait raises what the first engine to fail raised, or WeightSyncError at the deadline.
        """
        return self._begin([partial(getattr(client, method), *arguments) for client in self.clients], method)

    def _begin(self, calls: Sequence[Callable[[], None]], method: str) -> Callable[[], None]:
        def run(number: int, call: Callable[[], None]) -> None:
            try:
                call()
            except Exception as error:
                error.add_note(f"{method} of rollout engine {number}")
                raise

        started = time.monotonic()
        futures = [_in_thread(partial(run, number, call)) for number, call in enumerate(calls)]

        def finish() -> None:
            left_s = max(0.0, started + self.deadline_s - time.monotonic())
            done, _ = wait(futures, left_s, return_when=FIRST_EXCEPTION)
            try:
                for future in done:
                    future.result()
                silent = [str(number) for number, future in enumerate(futures) if future not in done]
                if silent:
                    raise WeightSyncError(
                        f"rollout engine {', '.join(silent)} did not answer {method} within {self.deadline_s:g} s"
                    )
            except BaseException as error:
                if not self._failed.done():
                    self._failed.set_exception(error)
                raise

        return finish

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See VLLMWeightSyncClient; each engine gets the manifest, and ranks of its own in an NCCL group."""
        infos = [init_info | {"manifest": self._manifest} for _ in self.clients]
        if "rank_offset" in init_info:
            for number, info in enumerate(infos):
                info["rank_offset"] += number * self.workers_per_engine
        calls = [
            partial(client.init_weight_transfer_engine, info) for client, info in zip(self.clients, infos, strict=True)
        ]
        self._begin(calls, "init_weight_transfer_engine")()

    def start_weight_update(self) -> None:
        """See VLLMWeightSyncClient."""
        self.begin("start_weight_update")()

    def update_weights(self, update_info: Any) -> None:
        """See VLLMWeightSyncClient."""
        self.begin("update_weights", update_info)()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See VLLMWeightSyncClient; `version` is for callers that name none."""
        self.begin("finish_weight_update", weight_version or self.version)()


def _in_thread(call: Callable[[], T]) -> Future[T]:
    """Run a call in a thread that does not keep the process alive, as an executor's would; on the current device."""
    future: Future[T] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weight-sync", daemon=True).start()
    return future
