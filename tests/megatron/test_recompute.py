"""Recomputing activations changes no gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dapo_megatron.config.schema import RecomputeConfig
from dapo_megatron.weights.load import named_local_parameters
from tests.tiny_models import random_samples, tiny_config


@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeConfig("selective", ["core_attn"]),
        RecomputeConfig("selective", ["core_attn", "mlp", "layernorm"]),
        RecomputeConfig("full", method="uniform", layers=1),
        RecomputeConfig("full", method="block", layers=2),
    ],
    ids=["core_attn", "modules", "uniform", "block"],
)
def test_gradients_are_the_same(recompute: RecomputeConfig, qwen2_folder: str, make_actor: Callable) -> None:
    config = tiny_config(distributed=False)
    samples = random_samples(5)
    kept = make_actor(config, qwen2_folder)
    kept.update([samples[:3], samples[3:]], step=1)
    config.parallel.recompute = recompute
    again = make_actor(config, qwen2_folder)
    again.update([samples[:3], samples[3:]], step=1)
    assert again.chunks[0].config.recompute_granularity == recompute.granularity
    for (name, want), (_, got) in zip(
        named_local_parameters(kept.chunks), named_local_parameters(again.chunks), strict=True
    ):
        assert want.main_grad.abs().max() > 0, name
        torch.testing.assert_close(got.main_grad, want.main_grad, rtol=1e-5, atol=1e-7, msg=name)
