"""Block-wise FP8: the quantiser against plain loops, and what a quantised checkpoint consists of."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
import pytest
import torch

from dapo_megatron.weights.block_fp8 import (
    is_quantised,
    quantise_blocks,
    quantization_config,
    scale_shapes,
)
from dapo_megatron.weights.export import TensorDescription

E4M3 = [torch.tensor(bits, dtype=torch.uint8).view(torch.float8_e4m3fn).float().item() for bits in range(127)]
"""The values from 0 to 448; those at even places have an even mantissa."""


def nearest(x: float) -> float:
    """Of the values in E4M3, with its sign; of two equally near the even one."""
    magnitude = min(abs(x), E4M3[-1])
    above = bisect_left(E4M3, magnitude)
    below = max(above - 1, 0)
    gaps = E4M3[above] - magnitude, magnitude - E4M3[below]
    chosen = above if gaps[0] < gaps[1] or (gaps[0] == gaps[1] and above % 2 == 0) else below
    return E4M3[chosen] if x >= 0 else -E4M3[chosen]


@pytest.mark.parametrize("shape", [(1, 1), (128, 256), (130, 75), (31, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_quantiser_equals_plain_loops(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(sum(shape))
    weight = (torch.randn(shape) * torch.logspace(-6, 3, shape[1])).to(dtype)
    weight[: shape[0] // 4] = 0
    values, scales = quantise_blocks(weight)
    assert values.shape == shape and values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    assert list(scales.shape) == [-(-size // 128) for size in shape]
    plain, found = weight.float().numpy(), values.float().numpy()
    for top in range(0, shape[0], 128):
        for left in range(0, shape[1], 128):
            block = plain[top : top + 128, left : left + 128]
            scale = np.float32(np.abs(block).max()) / np.float32(448)
            assert scales[top // 128, left // 128] == scale
            expected = [[nearest(float(x / scale)) for x in row] for row in block]
            assert np.array_equal(found[top : top + 128, left : left + 128], expected)


def test_zeros_and_the_smallest_numbers_stay_finite() -> None:
    tiny = torch.finfo(torch.float32).tiny
    values, scales = quantise_blocks(torch.tensor([[0.0], [tiny / 2]]))
    assert (values.float() * scales)[0] == 0 and torch.isfinite(values.float() * scales).all()


NAMES = {
    "model.embed_tokens.weight": ((300, 64), False),
    "model.layers.0.self_attn.q_proj.weight": ((130, 64), True),
    "model.layers.0.self_attn.q_proj.bias": ((130,), False),
    "model.layers.0.self_attn.q_norm.weight": ((32,), False),
    "model.layers.1.mlp.gate.weight": ((8, 64), False),
    "model.layers.1.mlp.gate.e_score_correction_bias": ((8,), False),
    "model.layers.1.mlp.gate_proj.weight": ((96, 64), True),
    "model.layers.1.mlp.experts.7.down_proj.weight": ((64, 257), True),
    "model.layers.1.block_sparse_moe.gate.weight": ((8, 64), False),
    "model.layers.1.block_sparse_moe.experts.7.w2.weight": ((64, 96), True),
    "model.norm.weight": ((64,), False),
    "lm_head.weight": ((300, 64), False),
}


def test_linear_weights_are_quantised_and_nothing_else() -> None:
    shapes = {name: shape for name, (shape, _) in NAMES.items()}
    assert {name for name, shape in shapes.items() if is_quantised(name, shape)} == {
        n for n, (_, q) in NAMES.items() if q
    }
    assert scale_shapes(shapes)["model.layers.1.mlp.experts.7.down_proj.weight_scale_inv"] == (1, 3)
    assert quantization_config(shapes)["modules_to_not_convert"] == [
        "model.embed_tokens",
        "model.layers.1.mlp.gate",
        "model.layers.1.block_sparse_moe.gate",
        "lm_head",
    ]


def test_a_source_yields_what_its_metadata_says() -> None:
    class Plain:
        def metadata(self) -> list[TensorDescription]:
            return [TensorDescription(name, torch.bfloat16, shape) for name, (shape, _) in NAMES.items()]

        def __iter__(self) -> Any:
            return ((name, torch.randn(shape, dtype=torch.bfloat16)) for name, (shape, _) in NAMES.items())

    pytest.importorskip("vllm")
    from dapo_megatron.weights.transport.block_fp8_source import BlockFP8Source

    source: Any = BlockFP8Source(Plain())  # type: ignore[arg-type]
    yielded = [TensorDescription(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
    assert yielded == source.metadata()
    assert len(yielded) == len(NAMES) + sum(quantised for _, quantised in NAMES.values())
