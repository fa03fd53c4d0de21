"""FP8 on a GPU with Transformer Engine: every recipe that the device has, and the emulation of it."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import numpy as np
import pytest

from dapo_megatron.config.schema import FP8Config
from tests.gpu.random_policy import RandomPolicy, configuration, samples

POLICY = {"layers": 4, "hidden_size": 512, "heads": 8, "kv_heads": 4, "vocab_size": 8192}


@pytest.fixture(autouse=True)
def _transformer_engine() -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine, which is not installed")


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_log_probs_and_an_update(recipe: str, make_actor: Callable) -> None:
    from dapo_megatron.megatron.precision import Device, check_fp8

    fp8 = FP8Config(recipe=recipe)
    try:
        check_fp8(fp8, Device.here())
    except ValueError as refusal:
        pytest.skip(str(refusal))
    batch = samples(8, 96, POLICY["vocab_size"])
    log_probs = {}
    for name, setting in {
        "bf16": FP8Config(),
        "fp8": fp8,
        "emulated": FP8Config(recipe=recipe, emulate=True),
    }.items():
        config = configuration("bfloat16")
        config.precision.fp8 = setting
        actor = make_actor(config, RandomPolicy(**POLICY))
        log_probs[name] = np.concatenate(actor.log_probs([batch])[0])
        result = actor.update([batch], step=1)
        assert math.isfinite(result["grad_norm"]) and result["skipped"] == 0
    against = {name: np.abs(log_probs["fp8"] - log_probs[name]).mean() for name in ("bf16", "emulated")}
    print(f"\n{recipe}: mean log-prob difference to bf16 {against['bf16']:.3f}, to emulation {against['emulated']:.3f}")
    assert 0 < against["bf16"] < 0.2
    if recipe != "delayed":  # whose first scales are not the tensor's own
        assert against["emulated"] < against["bf16"]
