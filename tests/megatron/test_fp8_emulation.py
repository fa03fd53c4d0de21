"""The emulation against plain loops, and what it leaves alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.config.schema import FP8Config
from dapo_megatron.megatron.fp8_emulation import Quantiser, Scaling, _QuantisedProduct, quantise, scaling
from tests.distributed.ranks import run_ranks
from tests.megatron import emulated_layers
from tests.tiny_models import random_samples, save, tiny_config, tiny_model

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
            with np.errstate(over="ignore"):
                scale = np.float32(largest) / np.float32(amax) if amax else np.float32(1)
            scale = min(scale, np.finfo(np.float32).max)
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
    exponent=st.integers(-40, 30),
    seed=st.integers(0, 99),
)
def test_quantise_equals_a_plain_loop(m: int, k: int, recipe: str, operand: str, exponent: int, seed: int) -> None:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    x = (x.double() * 10.0**exponent).float()
    x[0, 0] = 0
    how = scaling(FP8Config(recipe=recipe, format="hybrid"), operand)
    if how.block is not None:  # small blocks, cut the same way
        how = Scaling(how.fp8, (min(how.block[0], 2), 3), how.power_of_two)
    torch.testing.assert_close(quantise(x, how), plain(x, how), rtol=1e-6, atol=0)


def test_blocks_of_the_recipes() -> None:
    blockwise, mxfp8 = FP8Config(recipe="blockwise"), FP8Config(recipe="mxfp8")
    assert (scaling(blockwise, "input").block, scaling(blockwise, "weight").block) == ((1, 128), (128, 128))
    assert scaling(mxfp8, "weight").block == (1, 32) and scaling(mxfp8, "input").power_of_two
    assert not scaling(blockwise, "input").power_of_two
    assert scaling(FP8Config(recipe="blockwise", power_of_two_scales=True), "input").power_of_two
    hybrid = FP8Config(recipe="tensorwise", format="hybrid")
    assert [scaling(hybrid, x).fp8 for x in ("input", "gradient")] == [torch.float8_e4m3fn, torch.float8_e5m2]


def test_an_outlier_spoils_its_own_block_only() -> None:
    x = torch.full((1, 256), 1e-3)
    x[0, 0] = 1e4
    blockwise = quantise(x, scaling(FP8Config(recipe="blockwise"), "input"))
    tensorwise = quantise(x, scaling(FP8Config(recipe="tensorwise"), "input"))
    assert (blockwise[0, 1:128] == 0).all() and (tensorwise[0, 1:] == 0).all()
    torch.testing.assert_close(blockwise[0, 128:], x[0, 128:], rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_stays_so(value: float) -> None:
    x = torch.ones(2, 64)
    x[0, 0] = value
    for recipe in RECIPES:
        assert quantise(x, scaling(FP8Config(recipe=recipe), "gradient"))[0, 0].isnan()


def rounded(x: torch.Tensor, how: Scaling, amax: float) -> torch.Tensor:
    """With the scale of another tensor where the recipe has one for the whole tensor."""
    if how.block is not None:
        return plain(x.contiguous(), how).double()
    largest = torch.finfo(how.fp8).max
    scale = torch.tensor(largest) / amax
    return ((x * scale).clamp(-largest, largest).to(how.fp8).float() / scale).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_product_and_gradients_are_those_of_rounded_operands(recipe: str, dtype: torch.dtype) -> None:
    """Of two micro-batches: with `delayed`, all products of the second are scaled by the first, exceeded or not."""
    torch.manual_seed(0)
    fp8 = FP8Config(recipe=recipe, format="hybrid", margin=1)
    margin = 2.0 if recipe == "delayed" else 1.0
    quantiser = Quantiser(fp8, None)
    weight = torch.randn(40, 70).to(dtype).requires_grad_()
    amax: dict[str, float] = {}
    for size in (1.0, 7.0, 0.1):
        x, dy = (size * torch.randn(6, 1, 70)).to(dtype).requires_grad_(), (size * torch.randn(6, 1, 40)).to(dtype)
        weight.grad = None
        y = _QuantisedProduct.apply(x, weight, quantiser, True)
        y.backward(dy)

        flat, flat_dy, w = x.detach()[:, 0].float(), dy[:, 0].float(), weight.detach().float()
        now = {"input": float(flat.abs().max()), "weight": float(w.abs().max()), "gradient": float(flat_dy.abs().max())}
        if recipe != "delayed" or not amax:
            amax = dict(now)
        scales = {operand: (scaling(fp8, operand), margin * largest) for operand, largest in amax.items()}
        expected = rounded(flat, *scales["input"]) @ rounded(w, *scales["weight"]).T
        dx = rounded(flat_dy, *scales["gradient"]) @ rounded(w.T, *scales["weight"]).T
        dw = rounded(flat_dy.T, *scales["gradient"]) @ rounded(flat.T, *scales["input"]).T
        amax = {operand: max(amax[operand], now[operand]) for operand in now}
        assert y.shape == (6, 1, 40) and y.dtype == x.grad.dtype == weight.grad.dtype == dtype
        bound = 1e-5 if dtype == torch.float32 else 2**-8
        for got, want in ((y[:, 0], expected), (x.grad[:, 0], dx), (weight.grad, dw)):
            assert (got.double() - want).abs().max() <= bound * want.abs().max()
        if size == 1.0:  # rounding is there, and is small
            error = (expected - (flat.double() @ w.double().T)).norm() / expected.norm()
            assert 1e-3 < error < 0.06


def test_delayed_scales_follow_earlier_micro_batches_of_training() -> None:
    quantiser = Quantiser(FP8Config(recipe="delayed", amax_history_len=2), None)

    def scaled_by(largest: float, *, training: bool) -> float:
        amax = quantiser.amax(torch.full((1, 4), largest), "input", training=training)
        assert amax is not None
        return float(amax)

    assert scaled_by(448, training=False) == 448  # nothing before it
    assert scaled_by(448, training=True) == 448
    assert scaled_by(1000, training=False) == 448  # log-probs leave no trace
    assert scaled_by(math.inf, training=True) == 448  # nor does what is not finite
    assert scaled_by(896, training=True) == 448
    assert scaled_by(5, training=True) == 896
    assert scaled_by(5, training=True) == 896
    assert scaled_by(5, training=True) == 5  # two micro-batches are remembered
    most_recent = Quantiser(FP8Config(recipe="delayed", amax_compute_algo="most_recent"), None)
    found = [float(most_recent.amax(torch.full((1, 4), x), "input", training=True)) for x in (8.0, 4.0, 2.0)]
    assert found == [8, 8, 4]


def test_layers_give_the_same_on_two_ranks(tmp_path: Path) -> None:
    (one,) = run_ranks(emulated_layers.run, 1, tmp_path)
    both = run_ranks(emulated_layers.run, 2, tmp_path)
    for case, (wanted, dims) in one.items():
        for place, (want, dim) in enumerate(zip(wanted, dims * 2, strict=True)):
            got = [rank[case][0][place] for rank in both]
            whole = got[0] if dim is None else np.concatenate(got, dim)
            assert np.abs(whole - want).max() <= 1e-5 * np.abs(want).max(), (case, place)


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


def test_experts_are_emulated_and_router_and_output_are_not(tmp_path: Path, make_actor: Callable) -> None:
    folder = save(tiny_model("qwen3_moe", tied=False), tmp_path / "moe")
    config, samples = tiny_config(), random_samples(6)
    exact = np.concatenate(make_actor(config, folder).log_probs([samples])[0])
    config.precision.fp8 = FP8Config(recipe="delayed", emulate=True)
    actor = make_actor(config, folder)
    model = actor.chunks[0].module
    layer = model.decoder.layers[0]
    expert = layer.mlp.experts.local_experts[0]
    linear = [layer.self_attention.linear_qkv, layer.self_attention.linear_proj, expert.linear_fc1, expert.linear_fc2]
    assert all(type(each).__name__.startswith("Emulated") for each in linear)
    assert type(model.output_layer).__name__ == "ColumnParallelLinear"
    # A token may go to another expert.
    assert 1e-4 < np.abs(np.concatenate(actor.log_probs([samples])[0]) - exact).mean() < 0.2
    for step in (1, 2):
        result = actor.update([samples[:3], samples[3:], []], step=step)  # experts without a token
        assert math.isfinite(result["grad_norm"]) and result["skipped"] == 0
