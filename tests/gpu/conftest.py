"""Tests that need a GPU, and nothing but torch, numpy, pytest and megatron-core (run by `make test-gpu`).

Parts that need Transformer Engine skip where it is missing. Test files of one name in two folders would be one module
to pytest: hence test_gpu_*.py.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs CUDA, and there is no GPU"))


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """What a test held on the GPU leaves with it."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(params=["Transformer Engine", "torch"])
def layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose linear layers and attention the actors of a test are built of."""
    find_spec = importlib.util.find_spec
    if request.param == "torch":

        def without_transformer_engine(name: str, package: str | None = None) -> Any:
            return None if name == "transformer_engine" else find_spec(name, package)

        monkeypatch.setattr(importlib.util, "find_spec", without_transformer_engine)
    elif find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine, which is not installed")
    return request.param
