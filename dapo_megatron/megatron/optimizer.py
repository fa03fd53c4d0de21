"""Megatron's optimizer from the configuration, and the learning-rate schedule."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from dapo_megatron.config.schema import OptimizerConfig

STATE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    # Bytes are what Transformer Engine's Adam stores FP8 moments as.
    "float8": torch.uint8,
}


def build_optimizer(chunks: Sequence[Any], settings: OptimizerConfig, params_dtype: torch.dtype) -> Any:
    """AdamW over DDP-wrapped model chunks; norms and biases are not decayed, as is Megatron's rule.

    With bfloat16 parameters the optimizer keeps float32 main parameters.

    Raises:
        ValueError: precision-aware states without Transformer Engine.
    """
    config = megatron_settings(settings, params_dtype, chunks[0].config, chunks[0].ddp_config)
    optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        # Megatron leaves it to its own scheduler to apply the multiplier: without one, everything would be decayed.
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        if "fused" in group:
            # Torch's AdamW, for want of a fused one from Transformer Engine or Apex: one kernel instead of ten.
            group["fused"], group["foreach"] = True, False
    return optimizer


def megatron_settings(
    settings: OptimizerConfig,
    params_dtype: torch.dtype,
    transformer: TransformerConfig,
    ddp: DistributedDataParallelConfig,
) -> MegatronOptimizerConfig:
    """Megatron's own configuration of the optimizer.

    Args:
        settings: ours.
        params_dtype: of the model's parameters.
        transformer: the model's configuration, for its FP8 recipe.
        ddp: what the gradient and parameter buffers were built with.

    Raises:
        ValueError: precision-aware states without Transformer Engine.
    """
    if settings.precision_aware and importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(
            "optimizer.precision_aware=true needs the Adam of Transformer Engine, which is not installed on this host"
        )
    assert ddp.use_distributed_optimizer == settings.distributed
    assert ddp.grad_reduce_in_fp32 == (settings.main_grads_dtype == "float32")
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=params_dtype == torch.bfloat16,
        params_dtype=params_dtype,
        fp8_recipe=transformer.fp8_recipe if transformer.fp8 else None,
        reuse_grad_buf_for_mxfp8_param_ag=ddp.reuse_grad_buf_for_mxfp8_param_ag,
        overlap_param_gather=ddp.overlap_param_gather,
        use_distributed_optimizer=settings.distributed,
        use_precision_aware_optimizer=settings.precision_aware,
        main_grads_dtype=STATE_DTYPES[settings.main_grads_dtype],
        main_params_dtype=STATE_DTYPES[settings.main_params_dtype],
        exp_avg_dtype=STATE_DTYPES[settings.exp_avg_dtype],
        exp_avg_sq_dtype=STATE_DTYPES[settings.exp_avg_sq_dtype],
    )


def learning_rate(settings: OptimizerConfig, step: int) -> float:
    """Linear warm-up over steps (not updates) to the peak, then constant or down to `min_lr`; `step` counts from 1."""
    assert step >= 1, step
    if step < settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    if settings.decay == "constant":
        return settings.lr
    assert settings.decay_steps is not None
    progress = min(1.0, (step - settings.warmup_steps) / (settings.decay_steps - settings.warmup_steps))
    remaining = 1 - progress if settings.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.min_lr + (settings.lr - settings.min_lr) * remaining
