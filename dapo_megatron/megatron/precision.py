"""FP8 through Transformer Engine: from the configuration to Megatron's settings, and what refuses it.

Numbers of versions and devices are Transformer Engine's own (its `check_fp8_support` and siblings) and megatron-core's
(`fp8_utils.get_fp8_recipe`).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from dapo_megatron.config.schema import FP8Config

HOPPER, BLACKWELL, WORKSTATION_BLACKWELL = (9, 0), (10, 0), (12, 0)

_TRANSFORMER_ENGINE = {"delayed": (1, 0), "tensorwise": (2, 2), "blockwise": (2, 3), "mxfp8": (2, 1)}
"""First version of Transformer Engine with each recipe."""

_CAPABILITY = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": HOPPER, "mxfp8": BLACKWELL}
"""First compute capability whose tensor cores multiply each recipe's operands."""


@dataclass(frozen=True)
class Device:
    """What decides whether FP8 works; None for what is not there.

    Attributes:
        capability: compute capability of the GPU.
        cuda: version of CUDA that torch was built with.
        transformer_engine: installed version.
    """

    capability: tuple[int, int] | None
    cuda: tuple[int, int] | None
    transformer_engine: tuple[int, int] | None

    @classmethod
    def here(cls) -> Device:
        """The device of this process."""
        engine = None
        if importlib.util.find_spec("transformer_engine") is not None:
            from importlib.metadata import version

            engine = _version(version("transformer-engine"))
        has_gpu = torch.cuda.is_available()
        return cls(
            torch.cuda.get_device_capability() if has_gpu else None,
            _version(torch.version.cuda) if has_gpu and torch.version.cuda else None,
            engine,
        )


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def check_fp8(fp8: FP8Config, device: Device) -> None:
    """Refuse a recipe that the device cannot run. Emulation runs anywhere.

    Raises:
        ValueError: what is missing, and what would do.
    """
    recipe = fp8.recipe
    if recipe is None or fp8.emulate:
        return
    instead = "; precision.fp8.emulate=true shows its numerics on any device, slowly"
    if device.capability is None or device.cuda is None:
        raise ValueError(f"precision.fp8.recipe={recipe} needs a GPU, and there is none{instead}")
    if device.transformer_engine is None:
        raise ValueError(
            f"precision.fp8.recipe={recipe} needs Transformer Engine, which is not installed: "
            f"pip install 'dapo-megatron[gpu]'{instead}"
        )
    needed = _TRANSFORMER_ENGINE[recipe]
    if device.transformer_engine < needed:
        raise ValueError(
            f"precision.fp8.recipe={recipe} needs Transformer Engine {_dotted(needed)}, installed is "
            f"{_dotted(device.transformer_engine)}{instead}"
        )
    if not _multiplies(recipe, device.capability):
        below = f" and below {_dotted(WORKSTATION_BLACKWELL)}" if recipe == "mxfp8" else ""
        works = [name for name in _CAPABILITY if _multiplies(name, device.capability)]
        raise ValueError(
            f"precision.fp8.recipe={recipe} needs compute capability {_dotted(_CAPABILITY[recipe])}{below}, this GPU "
            f"has {_dotted(device.capability)}; recipes for it: {', '.join(works) or 'none'}{instead}"
        )
    least_cuda = (12, 9) if recipe == "blockwise" else (12, 1) if device.capability < HOPPER else (12, 0)
    if device.cuda < least_cuda:
        raise ValueError(
            f"precision.fp8.recipe={recipe} needs CUDA {_dotted(least_cuda)}, torch was built with "
            f"{_dotted(device.cuda)}{instead}"
        )


def _multiplies(recipe: str, capability: tuple[int, int]) -> bool:
    # Transformer Engine has mxfp8 in all layouts of operands for 10.x and 11.x only.
    return capability >= _CAPABILITY[recipe] and (recipe != "mxfp8" or capability < WORKSTATION_BLACKWELL)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def transformer_settings(fp8: FP8Config) -> dict[str, Any]:
    """Fields of TransformerConfig; none without FP8 or under emulation, which plugs in by the layer spec."""
    if fp8.recipe is None or fp8.emulate:
        return {}
    settings: dict[str, Any] = {"fp8": fp8.format, "fp8_recipe": fp8.recipe, "fp8_param": fp8.params}
    if fp8.recipe == "delayed":
        settings |= {
            "fp8_margin": fp8.margin,
            "fp8_amax_history_len": fp8.amax_history_len,
            "fp8_amax_compute_algo": fp8.amax_compute_algo,
        }
    if fp8.first_layers_bf16 or fp8.last_layers_bf16:
        settings |= {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": fp8.first_layers_bf16,
            "num_layers_at_end_in_bf16": fp8.last_layers_bf16,
        }
    return settings


def data_parallel_settings(fp8: FP8Config) -> dict[str, Any]:
    """Fields of DistributedDataParallelConfig: FP8 parameters are gathered as such.

    mxfp8 keeps two quantised copies of a weight, so that parameters are gathered in bfloat16 through the gradient
    buffer and quantised afterwards.
    """
    if fp8.recipe is None or not fp8.params:
        return {}
    return {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": fp8.recipe == "mxfp8"}
