"""FLOPs against what torch counts on an HF model, and against published sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dapo_megatron.models.flops import SequenceCost, sequence_cost, training_flops
from dapo_megatron.models.registry import family_of
from tests.tiny_models import tiny_model


@pytest.fixture
def real_models(shared: Path) -> dict[str, Any]:
    return json.loads((shared / "model_configs.json").read_text())


@pytest.mark.parametrize("family", ["qwen2", "llama", "mixtral", "qwen3_moe", "deepseek_v3", "moonlight"])
@pytest.mark.parametrize("tokens", [5, 16])
def test_equals_what_torch_counts_on_the_hf_model(family: str, tokens: int) -> None:
    """Eager attention computes the whole square, of which a causal one needs half."""
    model = tiny_model(family, tied=False).train()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, tokens, dtype=torch.int64)).logits.sum().backward()
    hf_config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    cost = sequence_cost(family_of(hf_config).dimensions(hf_config))
    assert counter.get_total_flops() == cost.linear * tokens + 2 * cost.quadratic * tokens**2


def test_packed_sequences_add_up_and_do_not_see_each_other(real_models: dict[str, Any]) -> None:
    hf_config = real_models["Qwen2.5-32B"]["hf_config"]
    dimensions = family_of(hf_config).dimensions(hf_config)
    cost = sequence_cost(dimensions)
    lengths = [1000, 20480, 3]
    assert training_flops(dimensions, lengths) == pytest.approx(sum(map(cost, lengths)))
    assert cost(2000) > 2 * cost(1000)
    assert training_flops(dimensions, []) == 0


@pytest.mark.parametrize("name", ["Qwen2.5-32B", "Qwen2.5-7B-Instruct", "Qwen2.5-0.5B"])
def test_six_flops_a_parameter_and_token(name: str, real_models: dict[str, Any]) -> None:
    """Every weight but an embedding of its own takes part in one multiply-add a token; norms and biases are few."""
    entry = real_models[name]
    dimensions = family_of(entry["hf_config"]).dimensions(entry["hf_config"])
    embedding = 0 if dimensions.tied_embeddings else dimensions.hidden_size * dimensions.vocab_size
    weights = entry["parameters_counted_with_transformers_5.19.0"] - embedding
    assert sequence_cost(dimensions).linear == pytest.approx(6 * weights, rel=2e-4)


def test_cost_of_a_sequence_is_its_polynomial() -> None:
    assert SequenceCost(3, 0.5)(10) == 80
