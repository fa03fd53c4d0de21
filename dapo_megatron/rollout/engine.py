"""One vLLM engine in this process: token ids and seeds in, samples with log-probs out, weights in between.

vLLM runs on one thread of its own. Everything that touches it is a command in that thread's queue, so callers may be
any number of coroutines; the thread sleeps while there is nothing to do.

Two things decide what is possible. Memory: `awake` -> release -> `released` -> wake_weights -> `without a KV cache` ->
wake_kv_cache -> `awake`. Weights: `whole` -> start_weight_update -> `updating` -> finish_weight_update -> `whole`; they
are `half-updated` after a sync that failed and `dropped` by a release at sleep level 2, and then only a full sync makes
them whole. Generation needs `awake` and `whole`. An exception inside vLLM's step is final: every pending and later call
raises it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dapo_megatron.config.schema import Config, SamplingConfig
from dapo_megatron.data.types import Sample
from dapo_megatron.rollout.vllm_setup import build_vllm_engine, engine_environment

__all__ = ["EngineFailed", "GenerationAborted", "RolloutEngine", "engine_environment"]

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

logger = logging.getLogger(__name__)
T = TypeVar("T")


class GenerationAborted(RuntimeError):
    """`abort_all` ended this generation before it was complete."""


class EngineFailed(RuntimeError):
    """vLLM raised, or the engine was shut down: it cannot be used any more."""


class _Shutdown(BaseException):
    """Ends the engine's thread."""


@dataclass
class _Group:
    """The requests of one `generate` call; `outputs` fills up by place."""

    prompt_token_ids: list[int]
    seeds: list[int]
    sampling: SamplingConfig
    done: Future[list[CompletionOutput]] = field(default_factory=Future)
    request_ids: list[str] = field(default_factory=list)
    outputs: dict[int, CompletionOutput] = field(default_factory=dict)
    policy_version: int = 0


class RolloutEngine:
    """A vLLM engine with deterministic per-sample seeds and exact weight syncs.

    The same seed gives the same response for the same weights in any batch composition and order.
    """

    def __init__(self, config: Config, hf_folder: str) -> None:
        """Load the model and start the engine's thread.

        Args:
            config: read are rollout, data.max_prompt_tokens, precision.rollout_dtype, weights.transport,
                model.tokenizer_path and trainer.seed.
            hf_folder: HF folder of the model; its weights serve until the first sync.

        Raises:
            ValueError: prompt + response do not fit the model's window, or a setting is impossible.
        """
        import torch

        self._config = config
        self._hf_folder = hf_folder
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        if self._device == "cpu" and config.rollout.kv_cache_bytes is None:
            raise ValueError("rollout.kv_cache_bytes is null: a CPU host needs a number (null sizes it on CUDA only)")
        for name, value in engine_environment(self._device, config.rollout.cpu_threads).items():
            os.environ.setdefault(name, value)
        self.policy_version = 0
        self._memory = "awake"
        self._weights = "whole"
        self._failure: EngineFailed | None = None
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._groups: dict[str, tuple[_Group, int]] = {}
        self._request_numbers = itertools.count()
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="rollout-engine", daemon=True)
        self._thread.start()
        started.result()

    # ---- generation ----

    async def generate(
        self, prompt_token_ids: Sequence[int], seeds: Sequence[int], sampling: SamplingConfig
    ) -> list[Sample]:
        """Sample one response per seed; `index` is the seed's place.

        Log-probs are those of the distribution sampled from (temperature, top_p and top_k applied); under greedy
        sampling they are the model's own. The stop token is part of the response.

        Raises:
            ValueError: an empty or overlong prompt, or a seed outside [0, 2**63).
            GenerationAborted: see `abort_all`.
            RuntimeError: the engine is released, or its weights are not whole.
            EngineFailed: vLLM raised, now or earlier.
        """
        limit = self._config.data.max_prompt_tokens
        if not 0 < len(prompt_token_ids) <= limit:
            raise ValueError(
                f"a prompt of {len(prompt_token_ids)} tokens: 1 to {limit} are allowed (data.max_prompt_tokens)"
            )
        if bad := [seed for seed in seeds if not 0 <= seed < 2**63]:
            raise ValueError(f"seed {bad[0]}: 0 to 2**63 - 1 are allowed")
        if not seeds:
            return []
        group = _Group(list(prompt_token_ids), list(seeds), sampling)
        group.done.set_running_or_notify_cancel()
        try:
            await self._call(partial(self._add_group, group))
            outputs = await asyncio.wrap_future(group.done)
        except asyncio.CancelledError:
            self._submit(partial(self._drop, [group], GenerationAborted("generation was cancelled")))
            raise
        tokenizer = self._engine.get_tokenizer()
        return [
            Sample(
                index=index,
                token_ids=list(output.token_ids),
                log_probs=list(output.logprobs.logprobs),
                finish_reason=output.finish_reason,
                text=tokenizer.decode(output.token_ids, skip_special_tokens=True),
                policy_version=group.policy_version,
            )
            for index, output in enumerate(outputs)
        ]

    async def abort_all(self) -> None:
        """End every generation under way: their `generate` calls raise `GenerationAborted`."""
        await self._call(self._abort_all)

    # ---- weights: what vLLM's weight-sync clients call ----

    async def init_weight_transfer_engine(self, request: WeightTransferInitRequest) -> None:
        """Take the trainer's manifest. Raises ValueError if it is not what this model needs."""
        await self._worker("init_weight_transfer_engine", request.init_info)

    async def start_weight_update(self) -> None:
        """Open a sync. Raises RuntimeError while generations are under way."""
        await self._call(self._start_weight_update)

    async def update_weights(self, request: WeightTransferUpdateRequest) -> None:
        """Load one chunk. Raises WeightSyncError, and leaves the engine half-updated, if it breaks the manifest."""
        await self._call(partial(self._during_update, "update_weights", request.update_info))

    async def finish_weight_update(self) -> None:
        """Close a sync: every tensor has come, and the prefix cache of the old weights is gone."""
        await self._call(self._finish_weight_update)

    async def update_weight_version(self, version: str) -> None:
        """Name the weights just synced: the number of updates behind them."""
        await self._call(partial(setattr, self, "policy_version", int(version)))

    async def shutdown_weight_transfer_engine(self) -> None:
        """Release the trainer's connection."""
        await self._worker("shutdown_weight_transfer_engine")

    # ---- memory ----

    async def release(self) -> int:
        """Give memory back while the training ranks work: the KV cache and, as `rollout.sleep_level` says, the weights.

        Returns:
            The bytes by which the memory in use fell: of the device on CUDA, of the workers' processes on the CPU.
        """
        return await self._call(self._release)

    async def wake_weights(self) -> int:
        """Take the weights' memory back, ready for a sync; the bytes by which the memory in use rose.

        On the CPU memory comes back as it is written, and this is 0.
        """
        return await self._call(self._wake_weights)

    async def wake_kv_cache(self) -> int:
        """Take the KV cache's memory back, ready to generate; bytes as `wake_weights`."""
        return await self._call(self._wake_kv_cache)

    def shutdown(self) -> None:
        """End the thread; pending and later calls raise EngineFailed."""
        with contextlib.suppress(EngineFailed):
            self._submit(self._raise_shutdown)
        self._thread.join()

    # ---- commands: run on the engine's thread ----

    def _add_group(self, group: _Group) -> None:
        from vllm.inputs import tokens_input

        if self._memory != "awake":
            raise RuntimeError(
                f"the engine is {self._memory}: no generation before wake_weights, a sync and wake_kv_cache"
            )
        if self._weights != "whole":
            raise RuntimeError(f"the engine's weights are {self._weights}: no generation before a full weight sync")
        group.policy_version = self.policy_version
        prompt = tokens_input(group.prompt_token_ids)
        try:
            for index, seed in enumerate(group.seeds):
                request_id = str(next(self._request_numbers))
                self._groups[request_id] = (group, index)
                group.request_ids.append(request_id)
                self._engine.add_request(request_id, prompt, self._sampling_params(group.sampling, seed))
        except Exception as error:
            self._drop([group], error)
            raise

    def _sampling_params(self, sampling: SamplingConfig, seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        stop = list(self._config.rollout.stop)
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            max_tokens=self._config.rollout.max_response_tokens,
            logprobs=0,
            flat_logprobs=True,
            stop=stop,
            detokenize=bool(stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    def _deliver(self, output: RequestOutput) -> None:
        entry = self._groups.pop(output.request_id, None)
        if entry is None:
            return
        group, index = entry
        group.outputs[index] = output.outputs[0]
        if len(group.outputs) == len(group.seeds):
            group.done.set_result([group.outputs[i] for i in range(len(group.seeds))])

    def _drop(self, groups: Sequence[_Group], error: BaseException) -> None:
        for group in groups:
            self._engine.abort_request([key for key in group.request_ids if self._groups.pop(key, None)])
            if not group.done.done():
                group.done.set_exception(error)

    def _abort_all(self) -> None:
        groups = {id(group): group for group, _ in self._groups.values()}
        self._drop(list(groups.values()), GenerationAborted("all generations were aborted"))

    def _start_weight_update(self) -> None:
        if self._groups:
            raise RuntimeError(f"{len(self._groups)} samples are being generated: await or abort them before a sync")
        if self._memory == "released":
            raise RuntimeError("the engine is released: no sync before wake_weights")
        self._on_workers("abandon_weight_update")
        self._weights = "updating"
        self._during_update("start_weight_update")

    def _during_update(self, method: str, *args: Any) -> None:
        if self._weights != "updating":
            raise RuntimeError(f"{method} while the engine's weights are {self._weights}, not updating")
        try:
            self._on_workers(method, *args)
        except BaseException:
            self._weights = "half-updated"
            raise

    def _finish_weight_update(self) -> None:
        self._during_update("finish_weight_update")
        self._weights = "half-updated"
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset after a weight sync")
        self._weights = "whole"

    def _release(self) -> int:
        if self._groups or self._memory != "awake":
            raise RuntimeError(f"release while the engine is {self._memory} with {len(self._groups)} samples under way")
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset before a release")
        level = self._config.rollout.sleep_level
        before = self._bytes_in_use()
        self._memory = "released"
        if level == 2:
            self._weights = "dropped"
        if self._device == "cpu":
            self._on_workers("release_memory", level)
        else:
            self._engine.sleep(level)
        return before - self._bytes_in_use()

    def _wake_weights(self) -> int:
        return self._wake("weights", "released", "without a KV cache")

    def _wake_kv_cache(self) -> int:
        return self._wake("kv_cache", "without a KV cache", "awake")

    def _wake(self, tag: str, before: str, after: str) -> int:
        if self._memory != before:
            raise RuntimeError(f"wake_{tag} while the engine is {self._memory}, not {before}")
        taken = -self._bytes_in_use()
        if self._device != "cpu":
            self._engine.wake_up([tag])
        self._memory = after
        return taken + self._bytes_in_use()

    def _on_workers(self, method: str, *args: Any) -> None:
        """Call a method of every worker; raises what the first of those that failed raised."""
        for errors in self._engine.collective_rpc("attempt", args=(method, args)):
            for error in errors:
                raise error

    def _bytes_in_use(self) -> int:
        return sum(self._engine.collective_rpc("bytes_in_use"))

    def _raise_shutdown(self) -> None:
        raise _Shutdown

    # ---- the thread ----

    def _build(self) -> Any:
        return build_vllm_engine(self._config, self._hf_folder, self._device)

    def _submit(self, command: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._failure is not None:
                raise EngineFailed(str(self._failure)) from self._failure.__cause__
            self._commands.put((command, future))
        return future

    async def _call(self, command: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._submit(command))

    async def _worker(self, method: str, *args: Any) -> None:
        await self._call(partial(self._on_workers, method, *args))

    def _run(self, started: Future[None]) -> None:
        try:
            self._engine = self._build()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while True:
                self._execute_commands()
                if self._engine.has_unfinished_requests():
                    for output in self._engine.step():
                        self._deliver(output)
        except BaseException as error:
            self._fail(error)

    def _execute_commands(self) -> None:
        """Run what is queued; wait for a command when there is nothing to generate."""
        wait = not self._engine.has_unfinished_requests()
        while True:
            try:
                command, future = self._commands.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(command())
            except _Shutdown as error:
                future.set_exception(error)
                raise
            except Exception as error:
                future.set_exception(error)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, _Shutdown):
            self._engine.engine_core.shutdown()
            failure = EngineFailed("the rollout engine was shut down")
        else:
            logger.error("the rollout engine failed", exc_info=error)
            failure = EngineFailed(f"the rollout engine failed: {error!r}")
            failure.__cause__ = error
        with self._lock:
            self._failure = failure
        for group, _ in self._groups.values():
            if not group.done.done():
                group.done.set_exception(failure)
        self._groups.clear()
        while not self._commands.empty():
            _, future = self._commands.get()
            if future.set_running_or_notify_cancel():
                future.set_exception(failure)
