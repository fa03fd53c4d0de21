from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dapo_megatron.megatron.kernels import has_nvidia_apex, kernels_in_use, rms_norm_class
from tests.tiny_models import tiny_config

PROJECT_ROOT = Path(__file__).resolve().parents[2]

WITH_ANOTHER_APEX = """
import sys
import dapo_megatron.megatron
from megatron.core.optimizer import Adam, clip_grads
from dapo_megatron.megatron.kernels import has_nvidia_apex
print(has_nvidia_apex(), Adam.__module__.split(".")[0], clip_grads.l2_norm_impl.__module__.split(".")[0])
"""


def write(folder: Path, name: str, text: str = "") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_other_libraries_torch_serves(qwen2_folder: str, make_actor: Callable) -> None:
    actor = make_actor(tiny_config(), qwen2_folder)
    kernels = kernels_in_use(actor.chunks, actor._optimizer)
    assert str(kernels) == (
        "Adam torch (fused), gradient norm torch, layer norms torch, attention torch SDPA, linear layers torch"
    )


def test_the_libraries_behind_the_classes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    base = type("Linear", (torch.nn.Module,), {"__module__": "transformer_engine.pytorch.module.linear"})
    wrapped = type("TELinear", (base,), {"__module__": "megatron.core.extensions.transformer_engine"})
    adam = type("FusedAdam", (), {"__module__": "apex.optimizers.fused_adam"})()
    attention = SimpleNamespace(linear_qkv=wrapped(), core_attention=wrapped())
    layer = SimpleNamespace(self_attention=attention, input_layernorm=torch.nn.Identity())
    chunk = SimpleNamespace(module=SimpleNamespace(decoder=SimpleNamespace(layers=[layer])))
    optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=None), SimpleNamespace(optimizer=adam)])
    norm = SimpleNamespace(__module__="amp_C")
    monkeypatch.setattr("megatron.core.optimizer.clip_grads.l2_norm_impl", norm)
    kernels = kernels_in_use([chunk], optimizer)
    assert (kernels.adam, kernels.gradient_norm) == ("Apex", "Apex")
    assert {kernels.layer_norm, kernels.attention, kernels.linear} == {"Transformer Engine"}


def test_the_apex_of_pypi_is_not_taken_for_nvidias(tmp_path: Path) -> None:
    """A web toolkit of the same name: a package without optimizers, normalization or compiled modules."""
    write(tmp_path, "apex/__init__.py")
    write(tmp_path, "apex/views.py")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{PROJECT_ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", WITH_ANOTHER_APEX]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "torch", "megatron"]


def test_nvidias_apex_gives_the_norm_on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rms_norm_class() is torch.nn.RMSNorm and not has_nvidia_apex()
    write(tmp_path, "apex/__init__.py")
    write(tmp_path, "apex/normalization/__init__.py", "class FusedRMSNorm: pass")
    write(tmp_path, "amp_C.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert has_nvidia_apex() and rms_norm_class() is torch.nn.RMSNorm
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert rms_norm_class().__name__ == "FusedRMSNorm"
    del sys.modules["apex.normalization"], sys.modules["apex"]
