"""Which layouts are refused, by which rule, and that the suggested ones keep all rules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.config.compose import load_config
from dapo_megatron.config.layout import ModelSizes, broken_rules, nearest_layouts, overrides, stage_layers
from dapo_megatron.config.schema import ParallelConfig
from dapo_megatron.config.validate import validate_model

CONF = Path(__file__).parents[2] / "conf"
DENSE = ModelSizes(layers=64, heads=40, kv_heads=8, ffn_hidden_size=27648)
EXPERTS = ModelSizes(48, 32, 4, 6144, experts=128, moe_ffn_hidden_size=768)


def hf_config(shared: Path, name: str) -> dict[str, Any]:
    return json.loads((shared / "model_configs.json").read_text())[name]["hf_config"]


def sp(tensor: int, **sizes: Any) -> ParallelConfig:
    return ParallelConfig(tensor=tensor, sequence_parallel=tensor > 1, **sizes)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("Qwen2.5-32B", sp(8, pipeline=2, data=8)),
        ("Qwen2.5-32B", sp(8, pipeline=4, virtual_pipeline=4, context=2)),
        ("Qwen3-30B-A3B", sp(4, data=2, expert=8)),
        ("Qwen3-30B-A3B", sp(1, data=16, expert=8, expert_tensor=2)),
        ("Llama-3.1-70B", sp(8, pipeline=8, data=2)),
        ("DeepSeek-V3", sp(8, pipeline=8, data=8, expert=64)),
    ],
)
def test_layouts_of_real_models_that_work(model: str, layout: ParallelConfig, shared: Path) -> None:
    sizes = ModelSizes.of(hf_config(shared, model))
    assert sizes is not None and broken_rules(layout, sizes) == []


@pytest.mark.parametrize(
    ("model", "layout", "reason"),
    [
        (DENSE, sp(16), "does not divide the model's 40 attention heads"),
        (DENSE, sp(10), "does not divide the model's 8 key/value heads"),
        (replace(DENSE, kv_heads=40), sp(5), "does not divide the model's 27648 columns"),
        (DENSE, sp(1, pipeline=128), "128 model chunks are more than the model's 64 layers"),
        (DENSE, sp(1, pipeline=32, virtual_pipeline=4), "= 128 model chunks"),
        (DENSE, sp(1, data=2, expert=2), "the model has no experts"),
        (EXPERTS, sp(1, data=3, expert=3), "parallel.expert=3 does not divide the model's 128 experts"),
        (EXPERTS, sp(1, data=10, expert_tensor=5), "does not divide the 768 columns of an expert"),
        (EXPERTS, ParallelConfig(tensor=2), "needs parallel.sequence_parallel=true"),
        (EXPERTS, sp(1, data=4, expert=8), "= 8 does not divide the 4 ranks of a pipeline stage"),
    ],
)
def test_broken_rules_are_named_with_the_numbers(model: ModelSizes, layout: ParallelConfig, reason: str) -> None:
    assert any(reason in problem for problem in broken_rules(layout, model)), broken_rules(layout, model)


def test_the_refusal_says_what_to_write_instead(shared: Path) -> None:
    config = load_config("recipe/dapo_qwen2_5_32b", ["parallel.tensor=16", "parallel.data=4"], [CONF])
    with pytest.raises(ValueError) as error:
        validate_model(config, hf_config(shared, "Qwen2.5-32B"))
    assert "parallel.tensor=16 does not divide the model's 40 attention heads" in str(error.value)
    assert "parallel.tensor=8 parallel.data=8" in str(error.value)


powers = st.integers(0, 3).map(lambda power: 2**power) | st.sampled_from([3, 5])


@given(
    layout=st.builds(
        ParallelConfig,
        tensor=powers,
        pipeline=powers,
        virtual_pipeline=st.none() | st.integers(1, 4),
        context=powers,
        expert=powers,
        expert_tensor=st.sampled_from([1, 2]),
        data=powers,
        sequence_parallel=st.booleans(),
    ),
    model=st.sampled_from([DENSE, EXPERTS, ModelSizes(3, 6, 2, 56)]),
)
def test_suggestions_keep_all_rules_and_the_world_size(layout: ParallelConfig, model: ModelSizes) -> None:
    world = layout.tensor * layout.pipeline * layout.context * layout.data
    found = nearest_layouts(layout, model)
    assert found  # data parallelism alone always works
    for each in found:
        assert broken_rules(each, model) == []
        assert each.tensor * each.pipeline * each.context * each.data == world
    if not broken_rules(layout, model):
        assert overrides(found[0], layout) == ""


@given(layers=st.integers(1, 130), pipeline=st.integers(1, 8), virtual=st.none() | st.integers(2, 4))
def test_stages_hold_all_layers_as_evenly_as_can_be(layers: int, pipeline: int, virtual: int | None) -> None:
    counts = stage_layers(layers, pipeline, virtual)
    assert len(counts) == pipeline * (virtual or 1) and sum(counts) == layers
    assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)


def test_a_config_without_sizes_is_left_to_whoever_reads_the_model() -> None:
    assert ModelSizes.of({"num_hidden_layers": 3}) is None
