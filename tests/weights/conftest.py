"""HF folders to convert, and the tensors that they hold."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dapo_megatron.weights.convert import to_megatron
from tests.tiny_models import save, tiny_model

CARRIED = {
    "tokenizer.json": '{"model": {}}',
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"eos_token_id": 3}',
}


def no_progress(written: int, total: int) -> None:
    pass


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an HF folder, by safetensors' own reader."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make(family, tied, layers) -> an HF folder; not to be changed."""
    root = tmp_path_factory.mktemp("hf")

    def make(family: str, tied: bool = False, layers: int = 3) -> Path:
        folder = root / f"{family}-{tied}-{layers}"
        if not folder.exists():
            save(tiny_model(family, tied, layers=layers), folder)
            for name, text in CARRIED.items():
                (folder / name).write_text(text)
        return folder

    return make


@pytest.fixture
def source(made: Callable[..., Path], tmp_path: Path) -> Path:
    """An HF folder to break."""
    return Path(shutil.copytree(made("qwen2"), tmp_path / "source"))


@pytest.fixture
def megatron(source: Path, tmp_path: Path) -> Path:
    """A Megatron checkpoint to break, cut for two ranks."""
    to_megatron(source, tmp_path / "megatron", {"tensor": 2}, no_progress)
    return tmp_path / "megatron"
