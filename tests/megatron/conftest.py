"""Actors in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import dapo_megatron.megatron  # noqa: F401  (before any test module imports megatron.core)
from tests.tiny_models import one_rank_actor, save, tiny_model


@pytest.fixture
def make_actor() -> Callable:
    """make_actor(config, folder) -> a MegatronActor of one rank."""
    return one_rank_actor


@pytest.fixture
def qwen2_folder(tmp_path: Path) -> str:
    """An untied tiny Qwen2."""
    return save(tiny_model("qwen2", tied=False), tmp_path / "qwen2")
