from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from dapo_megatron.config.schema import Config, OptimizerConfig
from dapo_megatron.config.validate import validate
from dapo_megatron.megatron.optimizer import learning_rate, megatron_settings

LOW_PRECISION = {
    "precision_aware": True,
    "main_grads_dtype": "bfloat16",
    "main_params_dtype": "float16",
    "exp_avg_dtype": "float8",
    "exp_avg_sq_dtype": "bfloat16",
}


def problem(**optimizer: object) -> str:
    config = Config(optimizer=OptimizerConfig(**optimizer))
    config.data.train.path = "problems.jsonl"
    try:
        validate(config)
    except ValueError as error:
        return "\n".join(line for line in str(error).splitlines() if "optimizer." in line)
    return ""


def megatron(settings: OptimizerConfig, **ddp: object) -> object:
    transformer = SimpleNamespace(fp8=None, fp8_recipe="delayed")
    buffers = DistributedDataParallelConfig(use_distributed_optimizer=settings.distributed, **ddp)
    return megatron_settings(settings, torch.bfloat16, transformer, buffers)


@given(
    step=st.integers(1, 300),
    warmup=st.integers(0, 100),
    decaying=st.integers(1, 100),
    decay=st.sampled_from(["constant", "linear", "cosine"]),
    low=st.floats(0, 1),
)
def test_learning_rate_is_megatrons_schedule_counted_in_steps(
    step: int, warmup: int, decaying: int, decay: str, low: float
) -> None:
    settings = OptimizerConfig(
        lr=2.0,
        warmup_steps=warmup,
        decay=decay,
        decay_steps=warmup + decaying,
        min_lr=low if decay != "constant" else 0,
    )
    group: dict = {"params": []}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=0.0,
        max_lr=2.0,
        min_lr=2.0 if decay == "constant" else low,
        lr_warmup_steps=warmup,
        lr_decay_steps=warmup + decaying,
        lr_decay_style=decay,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
    scheduler.step(step)
    assert learning_rate(settings, step) == pytest.approx(group["lr"], rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"decay": "exponential"}, "optimizer.decay='exponential' is not one of: constant, linear, cosine"),
        (
            {"decay": "cosine"},
            "needs optimizer.decay_steps, the step that reaches optimizer.min_lr: 1000 is trainer.st",
        ),
        ({"decay": "linear", "decay_steps": 20}, "decay_steps=20 must be above optimizer.warmup_steps=20"),
        ({"decay": "linear", "decay_steps": 30, "min_lr": 1.0}, "min_lr=1.0 must be at most optimizer.lr=1e-06"),
        ({"exp_avg_dtype": "float16"}, "exp_avg_dtype=float16 needs optimizer.precision_aware=true"),
        ({"main_grads_dtype": "float16"}, "main_grads_dtype='float16' is not one of: float32, bfloat16"),
        ({"precision_aware": True}, "needs the Adam of Transformer Engine, which is not installed"),
        ({"precision_aware": True, "distributed": False}, "needs optimizer.distributed=true (it is False) and"),
    ],
)
def test_what_is_refused(settings: dict, expected: str) -> None:
    assert expected in problem(**settings)


def test_what_is_allowed() -> None:
    assert problem(decay="cosine", decay_steps=1000, min_lr=1e-7) == ""


def test_precision_aware_states_are_refused_without_transformer_engine() -> None:
    with pytest.raises(ValueError, match="not installed on this host"):
        megatron(OptimizerConfig(precision_aware=True), grad_reduce_in_fp32=True)


def test_precision_aware_states_reach_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    class FusedAdam:
        def __init__(self, master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype, use_decoupled_grad) -> None:
            pass

    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__version__ = "2.8.0"
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["transformer_engine.pytorch.optimizers"].FusedAdam = FusedAdam
    monkeypatch.setattr("megatron.core.utils._te_version", None)

    settings = OptimizerConfig(**LOW_PRECISION)
    assert problem(**LOW_PRECISION) == ""
    config = megatron(settings, grad_reduce_in_fp32=False)
    assert config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 and config.store_param_remainders
    dtypes = (config.main_grads_dtype, config.main_params_dtype, config.exp_avg_dtype, config.exp_avg_sq_dtype)
    assert dtypes == (torch.bfloat16, torch.float16, torch.uint8, torch.bfloat16)


def test_the_defaults_keep_everything_in_float32() -> None:
    config = megatron(OptimizerConfig(), grad_reduce_in_fp32=True)
    assert config.bf16 and config.use_distributed_optimizer and not config.use_precision_aware_optimizer
    dtypes = (config.main_grads_dtype, config.main_params_dtype, config.exp_avg_dtype, config.exp_avg_sq_dtype)
    assert dtypes == (torch.float32,) * 4
