"""Fixtures that every room's tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# A test's time on a busy machine says nothing about what it tests.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")

PROJECT_ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real problems, tokenizers and model configs (DAPO_MEGATRON_SHARED, default ../shared)."""
    folder = Path(os.environ.get("DAPO_MEGATRON_SHARED", PROJECT_ROOT.parent / "shared"))
    if folder.is_dir():
        return folder
    message = f"{folder} is missing: set DAPO_MEGATRON_SHARED to the folder of problems and tokenizers"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)
