"""Which layouts are refused, by which rule, and that the suggested ones keep all rules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.config.compose import load_config
from dapo_megatron.config.layout import (
    ModelSizes,
    broken_rules,
    nearest_layouts,
    overrides,
    stage_layers,
    world_size,
)
from dapo_megatron.config.schema import Config, ParallelConfig, RecomputeConfig
from dapo_megatron.config.validate import validate
from dapo_megatron.config.validate_model import validate_model
from dapo_megatron.data.packing import alignment_of
from dapo_megatron.megatron.model import transformer_config
from dapo_megatron.models.dimensions import Dimensions
from dapo_megatron.models.qwen3 import QWEN3, QWEN3_MOE

CONF = Path(__file__).parents[2] / "conf"
DENSE = ModelSizes(layers=64, heads=40, kv_heads=8, ffn_hidden_size=27648)
EXPERTS = ModelSizes(48, 32, 4, 6144, experts=128, moe_ffn_hidden_size=768)


def hf_config(shared: Path, name: str) -> dict[str, Any]:
    return json.loads((shared / "model_configs.json").read_text())[name]["hf_config"]


def sp(tensor: int, **sizes: Any) -> ParallelConfig:
    return ParallelConfig(tensor=tensor, sequence_parallel=tensor > 1, **sizes)


def uniform(layers: int) -> RecomputeConfig:
    return RecomputeConfig(granularity="full", method="uniform", layers=layers)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("Qwen2.5-32B", sp(8, pipeline=2, data=8)),
        ("Qwen2.5-32B", sp(8, pipeline=4, virtual_pipeline=4, context=2)),
        ("Qwen3-30B-A3B", sp(4, data=2, expert=8)),
        ("Qwen3-30B-A3B", sp(1, data=16, expert=8, expert_tensor=2)),
        ("Llama-3.1-70B", sp(8, pipeline=8, data=2)),
        ("DeepSeek-V3", sp(8, pipeline=8, data=8, expert=64)),
        ("Qwen2.5-32B", sp(8, pipeline=2, recompute=uniform(16))),
        ("DeepSeek-V3", sp(1, pipeline=8, recompute=uniform(1))),
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
        (EXPERTS, sp(1, data=4, expert=8), "the nearest product that does is 4"),
        (DENSE, ParallelConfig(sequence_parallel=True), "sequence_parallel=false, or tensor of at least 2"),
        (DENSE, sp(1, virtual_pipeline=2), "virtual_pipeline=null, or pipeline of at least 2"),
        (DENSE, sp(8, context=2, max_tokens_per_micro_batch=15), "must be at least 16"),
        (
            DENSE,
            sp(1, pipeline=2, recompute=uniform(3)),
            "does not divide the 32 layers of a model chunk: possible are",
        ),
        (replace(DENSE, layers=61), sp(1, pipeline=8, recompute=uniform(8)), "the 7 and 8 layers of a model chunk"),
    ],
)
def test_broken_rules_are_named_with_the_numbers(model: ModelSizes, layout: ParallelConfig, reason: str) -> None:
    assert any(reason in problem for problem in broken_rules(layout, model)), broken_rules(layout, model)


def test_the_refusal_says_what_to_write_instead(shared: Path) -> None:
    config = load_config("recipe/dapo_qwen2_5_32b", ["parallel.tensor=16", "parallel.data=4"], [CONF])
    with pytest.raises(ValueError) as error:
        validate_model(config, hf_config(shared, "Qwen2.5-32B"))
    assert "parallel.tensor=16 does not divide the model's 40 attention heads" in str(error.value)
    assert "layouts of 128 ranks that work:\n    parallel.tensor=8 parallel.data=8\n" in str(error.value)


def test_a_suggestion_can_be_pasted_behind_what_was_refused() -> None:
    given = ["parallel.tensor=16", "parallel.data=16"]  # data=128 would leave ranks without a sample
    model = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 320}
    with pytest.raises(ValueError) as error:
        validate_model(load_config("quickstart", given, [CONF]), model)
    _, *suggestions = str(error.value).splitlines()
    assert len(suggestions) == 3
    for suggestion in suggestions:
        config = load_config("quickstart", [*given, *suggestion.split()], [CONF])
        validate(config)
        validate_model(config, model)


def test_fewer_ranks_are_suggested_where_no_layout_has_as_many() -> None:
    model = ModelSizes(layers=3, heads=6, kv_heads=2, ffn_hidden_size=56)
    tensor5 = ParallelConfig(tensor=5, data=2, max_tokens_per_micro_batch=2)  # too few for context parallelism
    assert {world_size(layout) for layout in nearest_layouts(tensor5, model, most_data=1)} == {2}
    assert nearest_layouts(replace(tensor5, recompute=uniform(4)), model) == []


@pytest.mark.parametrize("size", ["tensor", "pipeline", "context", "expert", "expert_tensor", "data"])
def test_sizes_below_one_are_out_of_range_and_no_more(size: str) -> None:
    with pytest.raises(ValueError) as error:
        validate(load_config("quickstart", [f"parallel.{size}=0"], [CONF]))
    assert str(error.value) == f"parallel.{size}=0 must be at least 1"


@given(tensor=st.integers(1, 8), context=st.integers(1, 8), sequence_parallel=st.booleans())
def test_a_micro_batch_holds_what_it_is_padded_to(tensor: int, context: int, sequence_parallel: bool) -> None:
    parallel = ParallelConfig(
        tensor=tensor, context=context, sequence_parallel=sequence_parallel and tensor > 1, max_tokens_per_micro_batch=1
    )
    least = alignment_of(Config(parallel=parallel)).micro_batch
    assert broken_rules(replace(parallel, max_tokens_per_micro_batch=least)) == []
    assert least == 1 or f"must be at least {least}:" in broken_rules(parallel)[0]


@pytest.mark.parametrize(("field", "stages"), [("first_layers_bf16", 2), ("last_layers_bf16", 4)])
def test_bf16_layers_fit_into_a_pipeline_stage(field: str, stages: int) -> None:
    most = 61 // stages
    chosen = ["precision=fp32", "precision.fp8.recipe=blockwise", f"parallel.pipeline={stages}"]
    hf = {"num_hidden_layers": 61, "num_attention_heads": 4, "intermediate_size": 64}
    validate_model(load_config("quickstart", [*chosen, f"precision.fp8.{field}={most}"], [CONF]), hf)
    more = [*chosen, f"precision.fp8.{field}={most + 1}"]
    with pytest.raises(
        ValueError, match=f"{field}={most + 1} is more than a pipeline stage has layers: at most {most}"
    ):
        validate_model(load_config("quickstart", more, [CONF]), hf)
    validate_model(load_config("quickstart", [*more, "precision.fp8.emulate=true"], [CONF]), hf)


powers = st.integers(0, 3).map(lambda power: 2**power) | st.sampled_from([3, 5])


layouts = st.builds(
    ParallelConfig,
    tensor=powers,
    pipeline=powers,
    virtual_pipeline=st.none() | st.integers(1, 4),
    context=powers,
    expert=powers,
    expert_tensor=st.sampled_from([1, 2]),
    data=powers,
    sequence_parallel=st.booleans(),
)


@given(
    layout=layouts,
    model=st.sampled_from([DENSE, EXPERTS, ModelSizes(3, 6, 2, 56)]),
)
def test_suggestions_keep_all_rules_and_the_world_size(layout: ParallelConfig, model: ModelSizes) -> None:
    found = nearest_layouts(layout, model)
    assert found  # data parallelism alone always works
    for each in found:
        assert broken_rules(each, model) == []
        assert world_size(each) == world_size(layout)
    if not broken_rules(layout, model):
        assert overrides(found[0], layout) == ""


@settings(max_examples=50, deadline=None)
@given(layout=layouts, layers=st.integers(1, 13), experts=st.sampled_from([0, 12]))
def test_megatron_takes_what_keeps_all_rules(layout: ParallelConfig, layers: int, experts: int) -> None:
    model = ModelSizes(layers, 12, 4, 0 if experts else 240, experts, 24 if experts else 0)
    of_experts = (experts, 2, 24, True) if experts else ()
    dimensions = Dimensions(layers, 96, 240, 12, 4, 8, 50, 64, 1e-6, 1e4, False, *of_experts)
    for each in nearest_layouts(layout, model):
        family = QWEN3_MOE if experts else QWEN3
        made = transformer_config(family, dimensions, Config(parallel=each), torch.float32, transformer_engine=False)
        counts = stage_layers(layers, each.pipeline, each.virtual_pipeline)
        if made.pipeline_model_parallel_layout is not None:
            held = [
                made.pipeline_model_parallel_layout.layout[chunk % each.pipeline][chunk // each.pipeline]
                for chunk in range(len(counts))
            ]
            assert [sum(layer.name == "decoder" for layer in stage) for stage in held] == counts
        else:
            assert len(set(counts)) == 1


@given(layers=st.integers(1, 130), pipeline=st.integers(1, 8), virtual=st.none() | st.integers(2, 4))
def test_stages_hold_all_layers_as_evenly_as_can_be(layers: int, pipeline: int, virtual: int | None) -> None:
    counts = stage_layers(layers, pipeline, virtual)
    assert len(counts) == pipeline * (virtual or 1) and sum(counts) == layers
    assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)


def test_mlp_columns_count_only_where_a_layer_has_an_mlp(shared: Path) -> None:
    sizes = {name: ModelSizes.of(hf_config(shared, name)) for name in ("Qwen3-8B", "Qwen3-30B-A3B", "DeepSeek-V3")}
    assert {name: each and each.ffn_hidden_size for name, each in sizes.items()} == {
        "Qwen3-8B": 12288,
        "Qwen3-30B-A3B": 0,
        "DeepSeek-V3": 18432,  # in its first three layers
    }


def test_a_config_without_sizes_is_left_to_whoever_reads_the_model() -> None:
    assert ModelSizes.of({"num_hidden_layers": 3}) is None
