"""Which library's kernels serve: Transformer Engine's, NVIDIA Apex's, or torch's.

Megatron takes its Adam and its gradient norm from the first of these that can be imported. What is reported here is
read from what was built, not from what is installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

TRANSFORMER_ENGINE, APEX, TORCH = "Transformer Engine", "Apex", "torch"

_LIBRARIES = {
    "transformer_engine": TRANSFORMER_ENGINE,
    "transformer_engine_torch": TRANSFORMER_ENGINE,
    "apex": APEX,
    "amp_C": APEX,
}
"""First part of a module's name -> whose kernels it holds; everything else here runs on torch's."""


@dataclass(frozen=True)
class Kernels:
    """The library behind each part of the training actor."""

    adam: str
    gradient_norm: str
    layer_norm: str
    attention: str
    linear: str

    def __str__(self) -> str:
        return (
            f"Adam {self.adam}, gradient norm {self.gradient_norm}, layer norms {self.layer_norm}, "
            f"attention {self.attention}, linear layers {self.linear}"
        )


def kernels_in_use(chunks: Sequence[Any], optimizer: Any) -> Kernels:
    """What serves the DDP-wrapped model chunks of this rank and Megatron's optimizer over them."""
    from megatron.core.optimizer import clip_grads

    adams = [part.optimizer for part in optimizer.chained_optimizers if part.optimizer is not None]
    adam = _library(type(adams[0]))
    if adam == TORCH:
        adam += " (fused)" if adams[0].param_groups[0].get("fused") else " (one kernel an operation)"
    layer = chunks[0].module.decoder.layers[0]
    linear = _library(type(layer.self_attention.linear_qkv))
    norm = layer.input_layernorm
    # Transformer Engine's norm is part of the linear layer that follows; an identity is in its place.
    fused_norm = not list(norm.parameters())
    attention = _library(type(layer.self_attention.core_attention))
    return Kernels(
        adam=adam,
        gradient_norm=_library(clip_grads.l2_norm_impl),
        layer_norm=linear if fused_norm else _library(type(norm)),
        attention=f"{TORCH} SDPA" if attention == TORCH else attention,
        linear=linear,
    )


def has_nvidia_apex() -> bool:
    """Whether `apex` is NVIDIA's, with its compiled modules. PyPI's, a web toolkit, is not even imported."""
    spec = importlib.util.find_spec("apex")
    folders = spec.submodule_search_locations if spec is not None else None
    return importlib.util.find_spec("amp_C") is not None and any(
        Path(folder, "normalization").is_dir() for folder in folders or []
    )


def rms_norm_class() -> type[nn.Module]:
    """The RMSNorm of layers that are not Transformer Engine's: Apex's on CUDA where it is installed, else torch's.

    Both are built as RMSNorm(size, eps=...), and torch's has a fused CUDA kernel of its own.
    """
    if torch.cuda.is_available() and has_nvidia_apex():
        from apex.normalization import FusedRMSNorm

        return FusedRMSNorm
    return nn.RMSNorm


def _library(thing: Any) -> str:
    """The library behind a class (its own or a parent's) or a function."""
    parents = thing.__mro__ if isinstance(thing, type) else [thing]
    roots = [(getattr(each, "__module__", None) or "").split(".")[0] for each in parents]
    return next((_LIBRARIES[root] for root in roots if root in _LIBRARIES), TORCH)
