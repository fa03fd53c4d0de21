"""From an HF folder into the local shards of Megatron model chunks, by the family's table.

In any layout: a rank reads the layers, the experts and the parts of tensors that it holds, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dapo_megatron.models.dimensions import Dimensions
from dapo_megatron.models.family import Family, TensorMapping
from dapo_megatron.models.split import Split
from dapo_megatron.weights.hf_folder import Checkpoint, HFFolder

FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
"""Transformer Engine's layer spec fuses these norms into the linear layer behind them; the local spec's names."""

# One expert after the other, and Transformer Engine's grouped linear layers.
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc\d\.weight)|(linear_fc\d\.weight)(\d+))")


def unwrap(module: nn.Module) -> Any:
    """The model inside Megatron's wrappers (DDP, Float16Module)."""
    while hasattr(module, "module"):
        module = module.module
    return module


def named_local_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter of this rank, under its global name in the local spec: layers counted from 0 over the whole
    model, experts over all expert-parallel ranks."""
    for name, tensor in named_local_tensors(chunks):
        if isinstance(tensor, nn.Parameter):
            yield name, tensor


def named_local_tensors(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """The same with the buffers that checkpoints hold: the biases of routers."""
    for chunk in chunks:
        model = unwrap(chunk)
        buffers = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(".expert_bias"))
        for name, tensor in chain(model.named_parameters(), buffers):
            match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
            if match:
                layer = model.decoder.layers[int(match[1])]
                inner = FUSED_NORMS.get(match[2]) or _global_expert(match[2], layer, model.pg_collection)
                name = f"decoder.layers.{layer.layer_number - 1}.{inner}"
            yield name, tensor


def _global_expert(name: str, layer: Any, groups: Any) -> str:
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    expert = groups.ep.rank() * layer.mlp.experts.num_local_experts + int(match[1] or match[4])
    return f"mlp.experts.local_experts.{expert}.{match[2] or match[3]}"


def shard_group(chunks: Sequence[nn.Module], mapping: TensorMapping) -> Any:
    """The process group whose ranks share a tensor: tensor-parallel, inside an expert expert-tensor-parallel."""
    groups = unwrap(chunks[0]).pg_collection
    return groups.expt_tp if mapping.in_expert else groups.tp


@cache
def hf_shapes(
    split: Split, shard_shape: tuple[int, ...], shards: int, dimensions: Dimensions
) -> tuple[tuple[int, ...], ...]:
    """The shapes of the HF tensors behind a Megatron tensor of so many shards of that shape."""
    full = split.unshard([torch.empty(shard_shape, device="meta")] * (shards if split.sharded else 1))
    return tuple(tuple(part.shape) for part in split.unfuse(full, dimensions))


def load_hf_weights(chunks: Sequence[nn.Module], folder: HFFolder, family: Family, dimensions: Dimensions) -> None:
    """Copy an HF model into the parameters of this rank's model chunks, cast to their dtype.

    Raises:
        ValueError: tensors that are missing, misshapen or belong to no part of the model, all in one message.
    """
    mappings = {mapping.megatron: mapping for mapping in family.tensors(dimensions)}
    parameters = dict(named_local_tensors(chunks))
    strangers = sorted(set(parameters) - set(mappings))
    assert not strangers, f"the family's table has no row for {strangers}"
    places = {name: shard_group(chunks, mappings[name]) for name in parameters}
    expected = {
        name: hf_shapes(mappings[name].split, tuple(parameter.shape), places[name].size(), dimensions)
        for name, parameter in parameters.items()
    }
    check_tensors(folder, family, dimensions, mappings, expected)
    with torch.no_grad():
        for name, parameter in parameters.items():
            split, group = mappings[name].split, places[name]
            parts = [
                folder.tensor(hf_name, split.part(shape, group.rank(), group.size()))
                for hf_name, shape in zip(mappings[name].hf, expected[name], strict=True)
            ]
            _copy(parameter, split.fuse(parts, dimensions))


def _copy(parameter: Tensor, values: Tensor) -> None:
    padding = parameter.shape[0] - values.shape[0]  # of the vocabulary
    if padding:
        values = torch.cat([values, values.new_zeros(padding, *values.shape[1:])])
    parameter.copy_(values)
    initial = getattr(parameter, "get_high_precision_init_val", lambda: None)()
    if initial is not None:  # of Transformer Engine's FP8 parameters: what the optimizer's main parameters start from
        initial.copy_(values)


def check_tensors(
    folder: Checkpoint,
    family: Family,
    dimensions: Dimensions,
    mappings: Mapping[str, TensorMapping],
    expected: Mapping[str, tuple[tuple[int, ...], ...]],
) -> None:
    """Compare the tensors of a checkpoint with what a model needs.

    Args:
        mappings: all of the model's, by Megatron's name.
        expected: by Megatron's name the shapes of the HF tensors behind it.

    Raises:
        ValueError: tensors that are missing, misshapen or belong to no part of the model, all in one message.
    """
    found = set(folder.names())
    problems = []
    for name, shapes in expected.items():
        for hf_name, shape in zip(mappings[name].hf, shapes, strict=True):
            if hf_name not in found:
                problems.append(f"missing: {hf_name} {list(shape)}")
            elif folder.shape(hf_name) != shape:
                problems.append(f"misshapen: {hf_name} is {list(folder.shape(hf_name))}, expected {list(shape)}")
    known = {hf_name for mapping in mappings.values() for hf_name in mapping.hf}
    # A tied model may still hold its output weight.
    known |= {hf_name for row in family.table if row.tied_to for hf_name in row.hf}
    problems += [f"surplus: {name}" for name in sorted(found - known) if not family.is_ignored(name, dimensions)]
    for row in family.table if dimensions.tied_embeddings else ():
        if row.tied_to in found and row.hf[0] in found and not problems:
            if not torch.equal(folder.tensor(row.tied_to), folder.tensor(row.hf[0])):
                problems.append(f"untied: the config ties {row.hf[0]} to {row.tied_to}, but they differ")
    if problems:
        raise ValueError(f"the tensors of {folder.path} do not fit its config:\n  " + "\n  ".join(problems))
