"""FP8 on a GPU: Transformer Engine's recipes, as far as the device has them, and the emulation of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dapo_megatron.config.schema import FP8Config
from tests.gpu.random_policy import TENTH_OF_A_BILLION, RandomPolicy, actor_alone, configuration, samples

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


def observe(fp8: FP8Config, layers: int = 8) -> tuple[np.ndarray, float]:
    """Log-probs after two updates without a step, and the gradient norm of the second; a last update takes a step.

    After two updates `delayed` has seen what it scales by. With steps, however small, weights that stand midway between
    two FP8 numbers would all go the way of the gradient, and comparing would tell nothing.
    """
    config = configuration("bfloat16")
    config.precision.fp8 = fp8
    actor = actor_alone(config, RandomPolicy(**TENTH_OF_A_BILLION | {"layers": layers}))
    batch = samples(8, 96, TENTH_OF_A_BILLION["vocab_size"])

    def update(step: int, lr: float) -> float:
        config.optimizer.lr = lr
        for sample, log_probs in zip(batch, actor.log_probs([batch])[0], strict=True):
            sample.old_log_probs = np.array(log_probs)
        result = actor.update([batch], step=step)
        assert math.isfinite(result["grad_norm"]) and result["grad_norm"] > 0 and result["skipped"] == 0
        return result["grad_norm"]

    update(1, 0.0)
    grad_norm = update(2, 0.0)
    log_probs = np.concatenate(actor.log_probs([batch])[0])
    update(3, 1e-3)
    assert np.abs(np.concatenate(actor.log_probs([batch])[0]) - log_probs).mean() > 0.05
    return log_probs, grad_norm


@pytest.fixture(scope="module")
def bfloat16() -> tuple[np.ndarray, float]:
    return observe(FP8Config())


def distance(ones: np.ndarray, others: np.ndarray) -> float:
    return float(np.abs(ones - others).mean())


def check_near(found: tuple[np.ndarray, float], bfloat16: tuple[np.ndarray, float], what: str) -> None:
    """Not too far, nor so near that nothing can have been rounded to FP8: two ways of bfloat16 are 0.007 apart."""
    difference, norm = distance(found[0], bfloat16[0]), abs(found[1] / bfloat16[1] - 1)
    print(f"\n{what}, to bfloat16: log-probs {difference:.4f} on average, gradient norm {norm:.2%}")
    assert 0.015 < difference < 0.08
    assert norm < 0.05


@pytest.mark.parametrize("recipe", RECIPES)
def test_emulation_is_near_bfloat16(recipe: str, bfloat16: tuple[np.ndarray, float]) -> None:
    check_near(observe(FP8Config(recipe=recipe, emulate=True)), bfloat16, f"{recipe}, emulated")


@pytest.mark.parametrize("params", [False, True], ids=["", "fp8-params"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_transformer_engine_is_near_bfloat16_and_emulation(
    recipe: str, params: bool, bfloat16: tuple[np.ndarray, float]
) -> None:
    from dapo_megatron.megatron.precision import Device, check_fp8

    fp8 = FP8Config(recipe=recipe, params=params)
    try:
        check_fp8(fp8, Device.here())
    except ValueError as refusal:
        pytest.skip(str(refusal))
    check_near(observe(fp8), bfloat16, f"{recipe}, FP8 parameters {params}")
    # Roundings of unlike inputs soon have nothing in common, and would be 1.4 times as far from each other as from
    # bfloat16: hence one layer. There the emulation on float32 activations is 0.65 times as far from that on bfloat16.
    settings = fp8, FP8Config(recipe=recipe, emulate=True), FP8Config()
    found, emulated, plain = (observe(each, layers=1)[0] for each in settings)
    print(f"one layer: to emulation {distance(found, emulated):.4f}, to bfloat16 {distance(found, plain):.4f}")
    assert distance(found, emulated) < 0.9 * distance(found, plain)
