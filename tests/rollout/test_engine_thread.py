"""The engine's thread, driven by a fake vLLM: nothing hangs, nothing spins, errors reach everybody."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dapo_megatron.config.schema import Config, SamplingConfig
from dapo_megatron.rollout.engine import EngineFailed, RolloutEngine

pytest.importorskip("vllm")


class FakeVLLM:
    """Finishes every request at the third step after it came, unless `blocked`; `error` is raised by the next step."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.steps = 0
        self.error: Exception | None = None
        self.released = threading.Event()
        self.released.set()
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        self.requests[request_id] = 3

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self.requests[request_id]

    def step(self) -> list[Any]:
        self.released.wait()
        self.steps += 1
        if self.error is not None:
            raise self.error
        self.requests = {request_id: left - 1 for request_id, left in self.requests.items()}
        done = [request_id for request_id, left in self.requests.items() if left == 0]
        for request_id in done:
            del self.requests[request_id]
        completion = SimpleNamespace(token_ids=[1], logprobs=SimpleNamespace(logprobs=[-1.0]), finish_reason="stop")
        return [SimpleNamespace(request_id=request_id, outputs=[completion]) for request_id in done]

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(decode=lambda tokens, skip_special_tokens: "")


class EngineOnFake(RolloutEngine):
    def _build(self) -> FakeVLLM:
        self.fake = FakeVLLM()
        return self.fake


@pytest.fixture
def engine() -> Any:
    config = Config()
    config.rollout.kv_cache_bytes = 1
    engine = EngineOnFake(config, "")
    yield engine
    engine.fake.released.set()
    engine.shutdown()


def test_an_idle_engine_does_not_step(engine: EngineOnFake) -> None:
    asyncio.run(engine.generate([1], [1, 2], SamplingConfig()))
    steps = engine.fake.steps
    asyncio.run(engine.abort_all())
    assert engine.fake.steps == steps == 3


def test_an_error_in_a_step_reaches_pending_and_later_calls(engine: EngineOnFake) -> None:
    async def scenario() -> None:
        engine.fake.released.clear()
        pending = [asyncio.create_task(engine.generate([1], [1], SamplingConfig())) for _ in range(3)]
        await asyncio.sleep(0.05)
        engine.fake.error = MemoryError("no room")
        engine.fake.released.set()
        for result in await asyncio.gather(*pending, return_exceptions=True):
            assert isinstance(result, EngineFailed)
            assert "no room" in str(result)
        for later in (engine.generate([1], [1], SamplingConfig()), engine.abort_all(), engine.start_weight_update()):
            with pytest.raises(EngineFailed, match="no room"):
                await later

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_cancelled_generation_leaves_the_engine(engine: EngineOnFake) -> None:
    async def scenario() -> None:
        engine.fake.released.clear()
        task = asyncio.create_task(engine.generate([1], [1, 2, 3], SamplingConfig()))
        await asyncio.sleep(0.05)
        task.cancel()
        engine.fake.released.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.abort_all()
        assert not engine.fake.requests

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_no_sync_and_no_release_under_running_samples(engine: EngineOnFake) -> None:
    async def scenario() -> None:
        engine.fake.released.clear()
        task = asyncio.create_task(engine.generate([1], [1], SamplingConfig()))
        await asyncio.sleep(0.05)
        refused = [asyncio.create_task(call) for call in (engine.start_weight_update(), engine.release())]
        await asyncio.sleep(0.05)
        engine.fake.released.set()
        results = await asyncio.gather(*refused, return_exceptions=True)
        assert all(isinstance(result, RuntimeError) for result in results), results
        assert len(await task) == 1

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_calls_after_shutdown_fail(engine: EngineOnFake) -> None:
    engine.shutdown()
    with pytest.raises(EngineFailed, match="shut down"):
        asyncio.run(engine.generate([1], [1], SamplingConfig()))
