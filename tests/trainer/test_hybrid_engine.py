"""The order of phases: what the devices' two users may do when, colocated and disaggregated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from dapo_megatron.config.schema import Config, Placement
from dapo_megatron.trainer.hybrid_engine import HybridEngine, Phase, PhaseError
from tests.trainer.fakes import FakeEngine, FakeTraining, small_config

ROUND = ["release", "log_probs", "update", "wake_weights", "sync", "wake_kv_cache"]


class FailingTraining(FakeTraining):
    """The first sync fails."""

    failures = 1

    async def sync_weights(self, policy_version: int) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("rollout engine 0 died")
        await super().sync_weights(policy_version)


class Round:
    """A hybrid engine over fakes, driven by the names of phases."""

    def __init__(self, config: Config | None = None, training: type[FakeTraining] = FakeTraining) -> None:
        self.calls: list[str] = []
        engines = [FakeEngine(self.calls), FakeEngine(self.calls)]
        self.hybrid = HybridEngine(config or small_config(), training(self.calls, engines[0]), engines)

    def go(self, *phases: str) -> None:
        arguments: dict[str, Callable[[], Awaitable[object]]] = {
            "log_probs": lambda: self.hybrid.log_probs([[], []]),
            "update": lambda: self.hybrid.update([[], []], step=1),
            "sync": lambda: self.hybrid.sync(1),
        }
        for phase in phases:
            asyncio.run(arguments.get(phase, getattr(self.hybrid, phase))())  # type: ignore[arg-type]


def after(*phases: str) -> Round:
    there = Round()
    there.go(*phases)
    return there


def test_memory_moves_so_that_the_two_never_need_the_device_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        one = after(*ROUND)
    assert [message.partition(":")[0] for message in caplog.messages] == ["release", "wake_weights", "wake_kv_cache"]
    assert "ranks_freed_grads 0.0 MB" in caplog.messages[1]
    engines = {method: [method, method] for method in ("release", "wake_weights", "wake_kv_cache")}
    expected = [*engines["release"], "reload params", "log_probs", "reload grads", "reload optimizer", "update"]
    expected += ["offload grads", "offload optimizer", *engines["wake_weights"], "sync"]
    expected += ["offload params", *engines["wake_kv_cache"]]
    assert one.calls == expected
    assert one.hybrid.phase is Phase.generate
    assert one.hybrid.metrics() == {
        "memory_bytes/engines_freed_by_release": 200,
        "memory_bytes/engines_taken_by_wake_weights": 120,
        "memory_bytes/engines_taken_by_wake_kv_cache": 80,
        "memory_bytes/ranks_freed_grads": 8,
        "memory_bytes/ranks_freed_optimizer": 8,
        "memory_bytes/ranks_freed_params": 8,
        "memory_bytes/ranks_taken_grads": 0,
        "memory_bytes/ranks_taken_optimizer": 0,
        "memory_bytes/ranks_taken_params": 0,
    }


def test_several_updates_bring_the_optimizer_once_and_some_phases_may_be_left_out() -> None:
    one = after("release", "log_probs", "log_probs", "update", "update")
    assert one.calls.count("reload optimizer") == 1
    after("release", "update", "wake_weights", "sync", "sync", "wake_kv_cache", "release")
    after("release", "wake_weights", "sync", "wake_kv_cache")


def test_disaggregated_nothing_moves() -> None:
    config = small_config()
    config.cluster.placement = Placement.disaggregated
    one = Round(config)
    one.go(*ROUND, *ROUND)
    assert one.calls == ["log_probs", "update", "sync"] * 2
    assert one.hybrid.metrics() == {}


@pytest.mark.parametrize("done", range(len(ROUND)))
def test_every_other_order_is_an_error_that_names_both_phases(done: int) -> None:
    names = ["generate", *ROUND]
    allowed = {
        0: ["release"],
        1: ["log_probs", "update", "wake_weights"],
        2: ["log_probs", "update", "wake_weights"],
        3: ["update", "wake_weights"],
        4: ["sync"],
        5: ["sync", "wake_kv_cache"],
    }[done]
    for phase in ROUND:
        one = after(*ROUND[:done])
        if phase in allowed:
            one.go(phase)
            continue
        calls = list(one.calls)
        with pytest.raises(PhaseError, match=f"{phase} is not possible after {names[done]}: it follows"):
            one.go(phase)
        assert one.calls == calls


def test_after_a_failed_sync_only_another_sync_is_possible() -> None:
    one = Round(training=FailingTraining)
    one.go("release", "update", "wake_weights")
    with pytest.raises(RuntimeError, match="rollout engine 0 died"):
        one.go("sync")
    for phase in ("wake_kv_cache", "release", "update", "log_probs", "wake_weights"):
        with pytest.raises(PhaseError, match=f"{phase} is not possible after failed_sync.*a part of the new weights"):
            one.go(phase)
    one.go("sync", "wake_kv_cache")
    assert one.hybrid.phase is Phase.generate
