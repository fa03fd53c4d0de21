"""Real models at full size on the meta device: what the ranks of a cluster's layout hold is what transformers has."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dapo_megatron.config.layout import ModelSizes, stage_layers
from dapo_megatron.config.schema import ParallelConfig
from dapo_megatron.models.registry import family_of
from dapo_megatron.weights.block_fp8 import scale_shapes
from tests.distributed.ranks import run_ranks
from tests.tiny_models import tiny_config

# Totals of the models' safetensors on the Hugging Face Hub. DeepSeek-V3's counts 671B without its layer 61.
PUBLISHED = {
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Mistral-7B-v0.1": 7_241_732_096,
    "DeepSeek-V3": 684_531_386_000,
    "Moonlight-16B-A3B": 15_960_111_936,
}

Shapes = dict[str, tuple[int, ...]]


def layouts(hf_config: dict[str, Any]) -> list[ParallelConfig]:
    """TP8 x PP8 with an uneven last stage, as far as heads and layers go; and EP8 where there are experts."""
    sizes = ModelSizes.of(hf_config)
    assert sizes is not None
    tensor = max(size for size in (1, 2, 4, 8) if sizes.kv_heads % size == 0)
    pipeline = next(size for size in (8, 7, 6) if sizes.layers % size)
    assert len(set(stage_layers(sizes.layers, pipeline))) == 2
    found = [ParallelConfig(tensor=tensor, sequence_parallel=True, pipeline=pipeline)]
    if sizes.experts:
        found[0].expert = found[0].tensor
        found.append(ParallelConfig(data=8, expert=8))
    else:
        found.append(ParallelConfig(data=2, pipeline=2, virtual_pipeline=2 if sizes.layers % 4 == 0 else None))
    return found


def held_by_ranks(rank: int, world_size: int, port: int, hf_configs: dict[str, Any]) -> dict[str, list[Shapes]]:
    """Model -> for each layout, the HF tensors behind what one rank of each stage and expert part holds."""
    return {name: [held(hf_config, layout) for layout in layouts(hf_config)] for name, hf_config in hf_configs.items()}


def held(hf_config: dict[str, Any], layout: ParallelConfig) -> Shapes:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dapo_megatron.megatron.actor import initialize_parallel, parallel_state
    from dapo_megatron.megatron.model import build_chunks
    from dapo_megatron.weights.load import hf_shapes, named_local_tensors, shard_group

    family = family_of(hf_config)
    dimensions = family.dimensions(hf_config)
    mappings = {mapping.megatron: mapping for mapping in family.tensors(dimensions)}
    config = tiny_config()
    config.parallel = layout
    stage = layout.tensor * layout.data
    shapes: Shapes = {}
    for rank in (first + part for first in range(0, stage * layout.pipeline, stage) for part in range(layout.expert)):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=stage * layout.pipeline)
        initialize_parallel(layout, rank, stage * layout.pipeline, "")
        with torch.device("meta"):
            chunks = build_chunks(family, dimensions, config, torch.bfloat16)
        for name, tensor in named_local_tensors(chunks):
            assert tensor.device.type == "meta" or not isinstance(tensor, torch.nn.Parameter)
            mapping = mappings[name]
            shards = shard_group(chunks, mapping).size()
            of_hf = dict(
                zip(mapping.hf, hf_shapes(mapping.split, tuple(tensor.shape), shards, dimensions), strict=True)
            )
            assert all(shapes.get(hf_name, shape) == shape for hf_name, shape in of_hf.items())
            shapes |= of_hf
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return shapes


def of_transformers(hf_config: dict[str, Any]) -> Shapes:
    """Names and shapes of a checkpoint: transformers 5 holds all experts of a layer in two tensors."""
    known = {key: value for key, value in hf_config.items() if key != "quantization_config"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**known))
    shapes: Shapes = {}
    for name, tensor in model.state_dict().items():
        head, _, kind = name.partition(".experts.")
        if not kind:
            shapes[name] = tuple(tensor.shape)
            continue
        experts, rows, columns = tensor.shape
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for expert in range(experts):
            for part in parts:
                shapes[f"{head}.experts.{expert}.{part}.weight"] = (rows // len(parts), columns)
    if model.config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


@pytest.fixture(scope="module")
def hf_configs(shared: Path) -> dict[str, dict[str, Any]]:
    models = json.loads((shared / "model_configs.json").read_text())
    assert models.keys() == PUBLISHED.keys()
    return {name: model["hf_config"] for name, model in models.items()}


@pytest.fixture(scope="module")
def results(hf_configs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Shapes]]:
    return run_ranks(held_by_ranks, 1, tmp_path_factory.mktemp("meta"), hf_configs)[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_ranks_hold_the_published_model(
    name: str, hf_configs: dict[str, Any], results: dict[str, list[Shapes]]
) -> None:
    hf_config = hf_configs[name]
    expected = of_transformers(hf_config)
    assert len(results[name]) == 2
    for shapes in results[name]:
        assert shapes == expected
    family = family_of(hf_config)
    tensors = family.tensors(family.dimensions(hf_config))
    assert sorted(key for mapping in tensors if mapping.exported for key in mapping.hf) == sorted(expected)
    counted = sum(map(math.prod, expected.values()))
    assert counted + beside_the_model(name, expected) == PUBLISHED[name]


def beside_the_model(name: str, shapes: Shapes) -> int:
    """Numbers that the published files hold, and that are no part of the model."""
    if name == "DeepSeek-V3":
        hidden, vocabulary = 7168, 129280
        last = {key: shape for key, shape in shapes.items() if key.startswith("model.layers.60.")}
        # Layer 61: one like the last, embedding and output weight again, three norms and a projection of two states.
        extra = sum(map(math.prod, last.values())) + 2 * vocabulary * hidden + 3 * hidden + 2 * hidden * hidden
        scales = [*scale_shapes(shapes).values(), *scale_shapes(last).values()]
        return extra + sum(map(math.prod, scales))
    return 27 * 64 if name == "Moonlight-16B-A3B" else 0
