"""Megatron's optimizer from the configuration, and the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from torch import nn

from dapo_megatron.config.schema import OptimizerConfig


def build_optimizer(chunks: Sequence[nn.Module], settings: OptimizerConfig, params_dtype: torch.dtype) -> Any:
    """AdamW over DDP-wrapped model chunks; norms and biases are not decayed, as is Megatron's rule.

    With bfloat16 parameters the optimizer keeps float32 main parameters.
    """
    config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=params_dtype == torch.bfloat16,
        params_dtype=params_dtype,
        use_distributed_optimizer=settings.distributed,
    )
    optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        # Megatron leaves it to its own scheduler to apply the multiplier: without one, everything would be decayed.
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        if "fused" in group:
            # Torch's AdamW, for want of a fused one from Transformer Engine or Apex: one kernel instead of ten.
            group["fused"], group["foreach"] = True, False
    return optimizer


def learning_rate(settings: OptimizerConfig, step: int) -> float:
    """Linear warm-up over steps (not updates), constant afterwards; `step` counts from 1."""
    assert step >= 1, step
    return settings.lr * min(1.0, step / max(1, settings.warmup_steps))
