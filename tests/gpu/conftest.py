"""Tests that need a GPU, and nothing but torch, numpy, pytest and megatron-core (run by `make test-gpu`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs CUDA, and there is no GPU"))


@pytest.fixture
def make_actor() -> Callable:
    """make_actor(config, policy) -> a MegatronActor alone on the GPU."""
    from dapo_megatron.megatron.actor import MegatronActor

    def make(config: object, policy: object) -> MegatronActor:
        place = {"rank": 0, "world_size": 1, "master_address": "127.0.0.1", "master_port": 29517}
        return MegatronActor(config, policy, **place)  # type: ignore[arg-type]

    return make
