"""Weights in block-wise FP8, as checkpoints of DeepSeek-V3's kind hold them and vLLM loads them.

A linear weight is e4m3 values under its own name and, under that name with `_scale_inv`, one float32 scale for each
block of 128 x 128: weight = values x scale. Embeddings, the output weight, norms, biases and routers stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
SCALES = "_scale_inv"
"""Behind the name of the values."""

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def is_quantised(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor under this HF name is a linear weight that block-wise FP8 covers."""
    return len(shape) == 2 and bool(re.search(r"\.layers\.\d+\..*(?<!\.gate)\.weight$", name))


def quantise_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[n, k] -> e4m3 values [n, k] and float32 scales [ceil(n / 128), ceil(k / 128)]: a block's largest value / 448."""
    rows, columns = weight.shape
    padded = pad(weight.detach().float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = (blocks.abs().amax((1, 3)) / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    values = (blocks / scales[:, None, :, None]).clamp_(-LARGEST, LARGEST).view_as(padded)
    return values[:rows, :columns].to(torch.float8_e4m3fn), scales


def dequantise_blocks(values: Tensor, scales: Tensor) -> Tensor:
    """The inverse: values [n, k] and their scales -> bfloat16 [n, k]."""
    result = torch.empty(values.shape, dtype=torch.bfloat16)
    for i, row in enumerate(scales.float().repeat_interleave(BLOCK, 1)[:, : values.shape[1]]):
        rows = slice(i * BLOCK, (i + 1) * BLOCK)
        torch.mul(values[rows].float(), row, out=result[rows])
    return result


def scales_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the scales of values of that shape."""
    return tuple(-(-size // BLOCK) for size in shape)


def scale_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of the scales that go with a checkpoint's tensors."""
    return {f"{name}{SCALES}": scales_of(shape) for name, shape in shapes.items() if is_quantised(name, shape)}


def quantization_config(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The `quantization_config` of an HF config whose checkpoint is quantised so."""
    kept = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [name for name in kept if not is_quantised(f"{name}.weight", (1, 1))],
    }


def quantised(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's tensors by name, with values and scales in place of each linear weight."""
    for name, tensor in tensors:
        if is_quantised(name, tensor.shape):
            values, scales = quantise_blocks(tensor)
            yield name, values
            yield f"{name}{SCALES}", scales
        else:
            yield name, tensor
