"""The emulation against plain loops, and what it leaves alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.config.schema import FP8Config
from dapo_megatron.megatron.fp8_emulation import Quantiser, Scaling, _QuantisedProduct, quantise, scaling
from tests.tiny_models import random_samples, tiny_config

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


def plain(x: torch.Tensor, how: Scaling) -> torch.Tensor:
    """Block by block, value by value, in Python floats."""
    m, k = x.shape
    rows, columns = how.block or (m, k)
    largest = torch.finfo(how.fp8).max
    result = torch.empty_like(x)
    for i in range(0, m, rows):
        for j in range(0, k, columns):
            block = x[i : i + rows, j : j + columns]
            amax = float(block.abs().max())
            scale = np.float32(largest) / np.float32(amax) if amax else np.float32(1)
            if how.power_of_two:
                scale = np.float32(2.0 ** math.floor(math.log2(scale)))
            for a in range(block.shape[0]):
                for b in range(block.shape[1]):
                    scaled = min(max(np.float32(block[a, b]) * scale, -largest), largest)
                    rounded = torch.tensor(float(scaled)).to(how.fp8).float()
                    result[i + a, j + b] = float(np.float32(rounded) / scale)
    return result


@settings(deadline=None, max_examples=30)
@given(
    m=st.integers(1, 5),
    k=st.integers(1, 9),
    recipe=st.sampled_from(RECIPES),
    operand=st.sampled_from(["input", "weight", "gradient"]),
    exponent=st.integers(-12, 12),
    seed=st.integers(0, 99),
)
def test_quantise_equals_a_plain_loop(m: int, k: int, recipe: str, operand: str, exponent: int, seed: int) -> None:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    how = scaling(FP8Config(recipe=recipe, format="hybrid"), operand)
    if how.block is not None:  # small blocks, cut the same way
        how = Scaling(how.fp8, (min(how.block[0], 2), 3), how.power_of_two)
    torch.testing.assert_close(quantise(x, how), plain(x, how), rtol=1e-6, atol=0)


def test_blocks_of_the_recipes() -> None:
    blockwise, mxfp8 = FP8Config(recipe="blockwise"), FP8Config(recipe="mxfp8")
    assert (scaling(blockwise, "input").block, scaling(blockwise, "weight").block) == ((1, 128), (128, 128))
    assert scaling(mxfp8, "weight").block == (1, 32) and scaling(mxfp8, "input").power_of_two
    hybrid = FP8Config(recipe="tensorwise", format="hybrid")
    assert [scaling(hybrid, x).fp8 for x in ("input", "gradient")] == [torch.float8_e4m3fn, torch.float8_e5m2]


def test_an_outlier_spoils_its_own_block_only() -> None:
    x = torch.full((1, 256), 1e-3)
    x[0, 0] = 1e4
    blockwise = quantise(x, scaling(FP8Config(recipe="blockwise"), "input"))
    tensorwise = quantise(x, scaling(FP8Config(recipe="tensorwise"), "input"))
    assert (blockwise[0, 1:128] == 0).all() and (tensorwise[0, 1:] == 0).all()
    torch.testing.assert_close(blockwise[0, 128:], x[0, 128:], rtol=1e-6, atol=0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_product_and_gradients_are_those_of_rounded_operands(recipe: str) -> None:
    torch.manual_seed(0)
    fp8 = FP8Config(recipe=recipe, format="hybrid")
    x, weight = torch.randn(6, 1, 70, requires_grad=True), torch.randn(40, 70, requires_grad=True)
    gradient = torch.randn(6, 1, 40)
    y = _QuantisedProduct.apply(x, weight, Quantiser(fp8, None), True)
    y.backward(gradient)

    def rounded(tensor: torch.Tensor, operand: str) -> torch.Tensor:
        return quantise(tensor, scaling(fp8, operand)).double()

    flat, dy = x.detach()[:, 0], gradient[:, 0]
    w = weight.detach()
    expected = rounded(flat, "input") @ rounded(w, "weight").T
    dx = rounded(dy, "gradient") @ rounded(w.T, "weight").T
    dw = rounded(dy.T, "gradient") @ rounded(flat.T, "input").T
    assert y.shape == (6, 1, 40)
    for got, want in ((y[:, 0], expected), (x.grad[:, 0], dx), (weight.grad, dw)):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    # Rounding is there, and is small.
    error = (expected - (flat.double() @ w.double().T)).norm() / expected.norm()
    assert 1e-3 < error < 0.06


def test_delayed_scales_follow_earlier_micro_batches_of_training() -> None:
    quantiser = Quantiser(FP8Config(recipe="delayed", amax_history_len=2, amax_compute_algo="max"), None)
    ones = torch.ones(1, 4)
    quantiser(ones * 448, "input", remember=True)
    quantiser(ones * 1000, "input")  # a log-prob pass leaves no trace
    saturated = quantiser(ones * 896, "input", remember=True)
    assert saturated.max() == 448  # scaled by the first
    assert quantiser(ones * 896, "input", remember=True).max() == 896  # the largest of the last two


@pytest.mark.parametrize("recipe", RECIPES)
def test_log_probs_differ_a_little_and_training_runs(
    recipe: str, qwen2_folder: str, make_actor: Callable, record_property: Callable
) -> None:
    config = tiny_config(lr=1e-3)
    samples = random_samples(6)
    exact = np.concatenate(make_actor(config, qwen2_folder).log_probs([samples])[0])
    config.precision.fp8 = FP8Config(recipe=recipe, emulate=True)
    actor = make_actor(config, qwen2_folder)
    emulated = np.concatenate(actor.log_probs([samples])[0])
    difference = np.abs(emulated - exact)
    record_property("mean_log_prob_difference", float(difference.mean()))
    assert 1e-4 < difference.mean() < 0.1
    result = actor.update([samples], step=1)
    assert math.isfinite(result["grad_norm"]) and result["skipped"] == 0


def test_first_and_last_layers_are_left_alone(qwen2_folder: str, make_actor: Callable) -> None:
    config = tiny_config()
    config.precision.fp8 = FP8Config(recipe="blockwise", emulate=True, first_layers_bf16=1, last_layers_bf16=1)
    layers = make_actor(config, qwen2_folder).chunks[0].module.decoder.layers
    names = [type(layer.mlp.linear_fc1).__name__ for layer in layers]
    assert names == ["ColumnParallelLinear", "EmulatedColumnParallelLinear", "ColumnParallelLinear"]
    config.precision.fp8.first_layers_bf16 = config.precision.fp8.last_layers_bf16 = 3
    samples = random_samples(3)
    untouched = make_actor(config, qwen2_folder).log_probs([samples])
    exact = make_actor(tiny_config(), qwen2_folder).log_probs([samples])
    for got, want in zip(untouched[0], exact[0], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
