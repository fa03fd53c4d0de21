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
    """What of a model a layout has to divide.

    Attributes:
        ffn_hidden_size: of the dense MLPs; 0 if every layer has experts.
        experts: routed experts of a layer; 0 for a dense model.
        moe_ffn_hidden_size: of one expert; 0 for a dense model.
        shared_ffn_hidden_size: of a layer's shared experts together; 0 if there are none.
    """

    layers: int
    heads: int
    kv_heads: int
    ffn_hidden_size: int
    experts: int = 0
    moe_ffn_hidden_size: int = 0
    shared_ffn_hidden_size: int = 0

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
        has_dense_mlp = not experts or hf_config.get("first_k_dense_replace") or hf_config.get("mlp_only_layers")
        layers, heads, ffn = (hf_config[key] for key in needed)
        expert_ffn = (hf_config.get("moe_intermediate_size") or ffn) if experts else 0
        return cls(
            layers=layers,
            heads=heads,
            kv_heads=hf_config.get("num_key_value_heads") or heads,
            ffn_hidden_size=ffn if has_dense_mlp else 0,
            experts=experts,
            moe_ffn_hidden_size=expert_ffn,
            shared_ffn_hidden_size=(hf_config.get("n_shared_experts") or 0) * expert_ffn,
        )


def stage_layers(layers: int, pipeline: int, virtual_pipeline: int | None = None) -> list[int]:
    """Layers of each model chunk, in the order of the layers: as even as can be, the first chunks take one more.

    Chunk i belongs to pipeline rank i % pipeline. 61 layers over 8 stages are 8, 8, 8, 8, 8, 7, 7, 7: the last stage,
    which has the output layer too, is never the longer one.
    """
    chunks = pipeline * (virtual_pipeline or 1)
    return [layers // chunks + (chunk < layers % chunks) for chunk in range(chunks)]


def broken_rules(parallel: ParallelConfig, model: ModelSizes | None = None) -> list[str]:
    """Each rule that a layout breaks, with the numbers; without a model only those that need none.

    Sizes below 1 have no rules here: they are out of range.
    """
    sizes = (*(getattr(parallel, name) for name in _SIZES), parallel.recompute.layers)
    if any(size is not None and size < 1 for size in sizes):
        return []
    return list(_rules(parallel)) if model is None else [*_rules(parallel), *_model_rules(parallel, model)]


def _rules(p: ParallelConfig) -> Iterator[str]:
    if p.sequence_parallel and p.tensor == 1:
        yield (
            "parallel.sequence_parallel=true shares sequences among tensor-parallel ranks, and parallel.tensor=1: "
            "sequence_parallel=false, or tensor of at least 2"
        )
    if p.virtual_pipeline is not None and p.virtual_pipeline < 2:
        yield f"parallel.virtual_pipeline={p.virtual_pipeline} must be at least 2, or null for one chunk a stage"
    if p.virtual_pipeline is not None and p.pipeline == 1:
        yield (
            f"parallel.virtual_pipeline={p.virtual_pipeline} interleaves pipeline stages, and parallel.pipeline=1: "
            "virtual_pipeline=null, or pipeline of at least 2"
        )
    ranks = p.tensor * p.context * p.data
    holders = p.expert * p.expert_tensor
    if ranks % holders:
        nearest = min(_divisors(ranks), key=lambda divisor: abs(divisor - holders))
        yield (
            f"parallel.expert={p.expert} x expert_tensor={p.expert_tensor} = {holders} does not divide the {ranks} "
            f"ranks of a pipeline stage (tensor {p.tensor} x context {p.context} x data {p.data}): the nearest product "
            f"that does is {nearest}"
        )
    least_tokens = p.context * math.lcm(2 if p.context > 1 else 1, p.tensor if p.sequence_parallel else 1)
    if 1 <= p.max_tokens_per_micro_batch < least_tokens:
        yield (
            f"parallel.max_tokens_per_micro_batch={p.max_tokens_per_micro_batch} must be at least {least_tokens}: a "
            f"micro-batch is padded to a multiple of that (context {p.context}, tensor {p.tensor})"
        )


def _model_rules(p: ParallelConfig, model: ModelSizes) -> Iterator[str]:
    # Megatron takes more ranks than key/value heads by holding each head several times; the weights' way in and out
    # knows every parameter on one rank only.
    for what, size in (
        ("attention heads", model.heads),
        ("key/value heads", model.kv_heads),
        ("columns of the MLP", model.ffn_hidden_size),
        ("columns of the shared experts", model.shared_ffn_hidden_size),
    ):
        if size % p.tensor:
            yield f"parallel.tensor={p.tensor} does not divide the model's {size} {what}"
    chunks = p.pipeline * (p.virtual_pipeline or 1)
    if chunks > model.layers:
        yield (
            f"parallel.pipeline={p.pipeline} x virtual_pipeline={p.virtual_pipeline or 1} = {chunks} model chunks are "
            f"more than the model's {model.layers} layers"
        )
    elif p.recompute.granularity == "full" and p.recompute.method == "uniform":
        # Megatron runs the last unit of a chunk past the chunk's end.
        counts = sorted(set(stage_layers(model.layers, p.pipeline, p.virtual_pipeline)))
        if any(count % p.recompute.layers for count in counts):
            yield (
                f"parallel.recompute.layers={p.recompute.layers} with method=uniform does not divide the "
                f"{' and '.join(map(str, counts))} layers of a model chunk: possible are "
                f"{', '.join(map(str, _divisors(math.gcd(*counts))))}, or method=block"
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


def world_size(parallel: ParallelConfig) -> int:
    """Ranks of a layout."""
    return parallel.tensor * parallel.pipeline * parallel.context * parallel.data


def nearest_layouts(
    parallel: ParallelConfig, model: ModelSizes, most_data: int | None = None, count: int = 3
) -> list[ParallelConfig]:
    """Layouts that break no rule, the ones most like the given first.

    They have the world size of the given one, or its largest divisor for which there is a layout; none are found if a
    rule fails in all of them.

    Args:
        most_data: largest data-parallel size.
        count: at most so many.
    """
    for world in reversed(_divisors(world_size(parallel))):
        found = [
            layout
            for layout in _layouts(world, parallel, model)
            if (most_data is None or layout.data <= most_data) and not broken_rules(layout, model)
        ]
        if found:
            return sorted(found, key=lambda layout: _distance(layout, parallel))[:count]
    return []


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


def _distance(layout: ParallelConfig, given: ParallelConfig) -> tuple[float, int, int]:
    """How many sizes differ and by how much; of equals, first those that deal out sequences as the given one does, then
    the one with more data parallelism, which is the cheapest."""
    ratios = [abs(math.log2((getattr(layout, name) or 1) / (getattr(given, name) or 1))) for name in _SIZES]
    dealt_otherwise = (layout.context != given.context) + (layout.sequence_parallel != given.sequence_parallel)
    return sum(ratios) + sum(ratio > 0 for ratio in ratios), dealt_otherwise, -layout.data


def overrides(layout: ParallelConfig, given: ParallelConfig) -> str:
    """What to add to the command line to get from one layout to another."""
    changed = [name for name in (*_SIZES, "sequence_parallel") if getattr(layout, name) != getattr(given, name)]
    return " ".join(f"parallel.{name}={_text(getattr(layout, name))}" for name in changed)


def _text(value: int | bool | None) -> str:
    return "null" if value is None else str(value).lower()
