"""From an HF folder into the local shards of Megatron model chunks, by the family's table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dapo_megatron.models.family import Dimensions, Family, TensorMapping
from dapo_megatron.weights.hf_folder import HFFolder

# Transformer Engine's layer spec fuses these norms into the linear layer behind them.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def unwrap(module: nn.Module) -> Any:
    """The model inside Megatron's wrappers (DDP, Float16Module)."""
    while hasattr(module, "module"):
        module = module.module
    return module


def named_local_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter of this rank, under its global name: layers counted from 0 over the whole model, local spec."""
    for chunk in chunks:
        model = unwrap(chunk)
        for name, parameter in model.named_parameters():
            match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
            if match:
                layer = model.decoder.layers[int(match[1])].layer_number - 1
                name = f"decoder.layers.{layer}.{_FUSED_NORMS.get(match[2], match[2])}"
            yield name, parameter


def tensor_parallel_group(chunks: Sequence[nn.Module]) -> Any:
    """The tensor-parallel process group of the chunks."""
    return unwrap(chunks[0]).pg_collection.tp


def full_hf_tensors(
    mapping: TensorMapping, local: Tensor, tensor_parallel: int, dimensions: Dimensions
) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the HF tensors behind a local Megatron tensor."""
    full = mapping.split.unshard([torch.empty_like(local, device="meta")] * tensor_parallel)
    parts = mapping.split.unfuse(full, dimensions)
    return {name: tuple(part.shape) for name, part in zip(mapping.hf, parts, strict=True)}


def load_hf_weights(chunks: Sequence[nn.Module], folder: HFFolder, family: Family, dimensions: Dimensions) -> None:
    """Copy an HF model into the parameters of this rank's model chunks, cast to their dtype.

    Raises:
        ValueError: tensors that are missing, misshapen or belong to no part of the model, all in one message.
    """
    mappings = {mapping.megatron: mapping for mapping in family.tensors(dimensions)}
    parameters = dict(named_local_parameters(chunks))
    group = tensor_parallel_group(chunks)
    strangers = sorted(set(parameters) - set(mappings))
    assert not strangers, f"the family's table has no row for {strangers}"
    _check(folder, family, dimensions, mappings, parameters, group.size())
    with torch.no_grad():
        for name, parameter in parameters.items():
            mapping = mappings[name]
            fused = mapping.split.fuse([folder.tensor(hf_name) for hf_name in mapping.hf], dimensions)
            parameter.copy_(mapping.split.shard(fused, group.rank(), group.size()))


def _check(
    folder: HFFolder,
    family: Family,
    dimensions: Dimensions,
    mappings: dict[str, TensorMapping],
    parameters: dict[str, nn.Parameter],
    tensor_parallel: int,
) -> None:
    found = set(folder.names())
    problems = []
    for name, parameter in parameters.items():
        shapes = full_hf_tensors(mappings[name], parameter, tensor_parallel, dimensions)
        for hf_name, shape in shapes.items():
            if hf_name not in found:
                problems.append(f"missing: {hf_name} {list(shape)}")
            elif folder.shape(hf_name) != shape:
                problems.append(f"misshapen: {hf_name} is {list(folder.shape(hf_name))}, expected {list(shape)}")
    known = {hf_name for mapping in mappings.values() for hf_name in mapping.hf}
    # A tied model may still hold its output weight.
    known |= {hf_name for row in family.table if row.tied_to for hf_name in row.hf}
    problems += [f"surplus: {name}" for name in sorted(found - known) if not family.is_ignored(name)]
    for row in family.table if dimensions.tied_embeddings else ():
        if row.tied_to in found and row.hf[0] in found and not problems:
            if not torch.equal(folder.tensor(row.tied_to), folder.tensor(row.hf[0])):
                problems.append(f"untied: the config ties {row.hf[0]} to {row.tied_to}, but they differ")
    if problems:
        raise ValueError(f"the tensors of {folder.path} do not fit its config:\n  " + "\n  ".join(problems))
