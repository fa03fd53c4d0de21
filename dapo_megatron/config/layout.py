"""Which layouts a model can be trained in, and the nearest ones when the given one is impossible.

World size = data x tensor x pipeline x context. Experts have a layout of their own over the ranks of a pipeline stage:
expert x expert_tensor of them hold all experts once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dapo_megatron.config.schema import ParallelConfig

_SIZES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor", "data")


@dataclass(frozen=True)
class ModelSizes:
    """What of a model a layout has to divide; `experts` is 0 for a dense one."""

    layers: int
    heads: int
    kv_heads: int
    ffn_hidden_size: int
    experts: int = 0
    moe_ffn_hidden_size: int = 0

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> ModelSizes | None:
        """From an HF config; None if that lacks a size, which whoever reads the model will say better."""
        needed = ("num_hidden_layers", "num_attention_heads", "intermediate_size")
        if not all(isinstance(hf_config.get(key), int) for key in needed):
            return None
        experts = next(
            (hf_config[key] for key in ("num_experts", "n_routed_experts", "num_local_experts") if hf_config.get(key)),
            0,
        )
        layers, heads, ffn = (hf_config[key] for key in needed)
        return cls(
            layers=layers,
            heads=heads,
            kv_heads=hf_config.get("num_key_value_heads") or heads,
            ffn_hidden_size=ffn,
            experts=experts,
            moe_ffn_hidden_size=(hf_config.get("moe_intermediate_size") or ffn) if experts else 0,
        )


def stage_layers(layers: int, pipeline: int, virtual_pipeline: int | None = None) -> list[int]:
    """Layers of each model chunk, in the order of the layers: as even as can be, the first chunks take one more.

    Chunk i belongs to pipeline rank i % pipeline.
    """
    chunks = pipeline * (virtual_pipeline or 1)
    return [layers // chunks + (chunk < layers % chunks) for chunk in range(chunks)]


def broken_rules(parallel: ParallelConfig, model: ModelSizes | None = None) -> list[str]:
    """Each rule that a layout breaks, with the numbers; without a model only those that need none."""
    return list(_rules(parallel)) if model is None else [*_rules(parallel), *_model_rules(parallel, model)]


def _rules(p: ParallelConfig) -> Iterator[str]:
    if p.sequence_parallel and p.tensor == 1:
        yield "parallel.sequence_parallel=true shares sequences among tensor-parallel ranks, and parallel.tensor=1"
    if p.virtual_pipeline is not None and p.virtual_pipeline < 2:
        yield f"parallel.virtual_pipeline={p.virtual_pipeline} must be at least 2, or null for one chunk a stage"
    if p.virtual_pipeline is not None and p.pipeline == 1:
        yield f"parallel.virtual_pipeline={p.virtual_pipeline} interleaves pipeline stages, and parallel.pipeline=1"
    ranks = p.tensor * p.context * p.data
    if ranks % (p.expert * p.expert_tensor):
        yield (
            f"parallel.expert={p.expert} x expert_tensor={p.expert_tensor} = {p.expert * p.expert_tensor} does not "
            f"divide the {ranks} ranks of a pipeline stage (tensor {p.tensor} x context {p.context} x data {p.data})"
        )


def _model_rules(p: ParallelConfig, model: ModelSizes) -> Iterator[str]:
    for what, size in (
        ("attention heads", model.heads),
        ("key/value heads", model.kv_heads),
        ("columns of the MLP", model.ffn_hidden_size),
    ):
        if size % p.tensor:
            yield f"parallel.tensor={p.tensor} does not divide the model's {size} {what}"
    chunks = p.pipeline * (p.virtual_pipeline or 1)
    if chunks > model.layers:
        yield (
            f"parallel.pipeline={p.pipeline} x virtual_pipeline={p.virtual_pipeline or 1} = {chunks} model chunks are "
            f"more than the model's {model.layers} layers"
        )
    if not model.experts:
        for name in ("expert", "expert_tensor"):
            if getattr(p, name) > 1:
                yield f"parallel.{name}={getattr(p, name)}, but the model has no experts"
        return
    if model.experts % p.expert:
        yield f"parallel.expert={p.expert} does not divide the model's {model.experts} experts"
    if model.moe_ffn_hidden_size % p.expert_tensor:
        yield (
            f"parallel.expert_tensor={p.expert_tensor} does not divide the {model.moe_ffn_hidden_size} columns of an "
            "expert"
        )
    if p.tensor > 1 and not p.sequence_parallel:
        yield (
            f"parallel.tensor={p.tensor} of a model with experts needs parallel.sequence_parallel=true: else every "
            "rank would route all tokens"
        )


def nearest_layouts(parallel: ParallelConfig, model: ModelSizes, count: int = 3) -> list[ParallelConfig]:
    """Layouts of the same world size that break no rule, the ones most like the given first."""
    world = parallel.tensor * parallel.pipeline * parallel.context * parallel.data
    found = [layout for layout in _layouts(world, parallel, model) if not broken_rules(layout, model)]
    return sorted(found, key=lambda layout: _distance(layout, parallel))[:count]


def _layouts(world: int, like: ParallelConfig, model: ModelSizes) -> Iterator[ParallelConfig]:
    for tensor in _divisors(world):
        if model.heads % tensor or model.kv_heads % tensor or model.ffn_hidden_size % tensor:
            continue
        sequence_parallel = tensor > 1 and (like.sequence_parallel or model.experts > 0)
        for pipeline in _divisors(world // tensor):
            if pipeline > model.layers:
                break
            virtual_pipelines = {None, like.virtual_pipeline} if pipeline > 1 else {None}
            for context in _divisors(world // tensor // pipeline):
                stage = world // pipeline
                experts = [e for e in _divisors(math.gcd(stage, model.experts)) if model.experts] or [1]
                for expert in experts:
                    expert_tensors = {1, like.expert_tensor} if model.experts else {1}
                    for expert_tensor in expert_tensors:
                        for virtual_pipeline in virtual_pipelines:
                            yield dataclasses.replace(
                                like,
                                tensor=tensor,
                                pipeline=pipeline,
                                virtual_pipeline=virtual_pipeline,
                                context=context,
                                expert=expert,
                                expert_tensor=expert_tensor,
                                data=stage // tensor // context,
                                sequence_parallel=sequence_parallel,
                            )


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _distance(layout: ParallelConfig, given: ParallelConfig) -> tuple[float, float]:
    """How many sizes differ and by how much; of equals the one with more data parallelism, which is the cheapest."""
    ratios = [abs(math.log2((getattr(layout, name) or 1) / (getattr(given, name) or 1))) for name in _SIZES]
    return sum(ratios) + sum(ratio > 0 for ratio in ratios), -layout.data


def overrides(layout: ParallelConfig, given: ParallelConfig) -> str:
    """What to add to the command line to get from one layout to another."""
    changed = [name for name in (*_SIZES, "sequence_parallel") if getattr(layout, name) != getattr(given, name)]
    return " ".join(f"parallel.{name}={_text(getattr(layout, name))}" for name in changed)


def _text(value: int | bool | None) -> str:
    return "null" if value is None else str(value).lower()
