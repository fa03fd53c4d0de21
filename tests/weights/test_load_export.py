"""Loading and exporting through fake chunks: the names of a Megatron model without Megatron."""

from __future__ import annotations

import re
import types
from collections.abc import ItemsView
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dapo_megatron.models.dimensions import Dimensions
from dapo_megatron.models.family import Family
from dapo_megatron.models.registry import family_of
from dapo_megatron.models.split import Vocabulary
from dapo_megatron.weights.export import MegatronWeightSource
from dapo_megatron.weights.hf_folder import SINGLE_FILE, HFFolder
from dapo_megatron.weights.load import load_hf_weights, named_local_parameters
from tests.tiny_models import FAMILIES, save, tiny_model

CASES = [(family, tied) for family in FAMILIES for tied in (False, True)]


class FakeChunk:
    """Local parameters of one tensor-parallel rank (inside experts too) under Megatron's names, in the shapes that a
    rank holds."""

    def __init__(self, family: Family, dimensions: Dimensions, folder: HFFolder, rank: int = 0, ranks: int = 1) -> None:
        shared = types.SimpleNamespace(rank=lambda: rank, size=lambda: ranks)
        alone = types.SimpleNamespace(rank=lambda: 0, size=lambda: 1)
        self.pg_collection = types.SimpleNamespace(tp=shared, expt_tp=shared, ep=alone)
        mlp = types.SimpleNamespace(experts=types.SimpleNamespace(num_local_experts=dimensions.experts))
        layers = [types.SimpleNamespace(layer_number=n + 1, mlp=mlp) for n in range(dimensions.layers)]
        self.decoder = types.SimpleNamespace(layers=layers)
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        for mapping in family.tensors(dimensions):
            if mapping.exported:
                split = mapping.split
                parts = [folder.tensor(name, split.part(folder.shape(name), rank, ranks)) for name in mapping.hf]
                shape = list(split.fuse(parts, dimensions).shape)
                if isinstance(split, Vocabulary):
                    shape[0] = -(-dimensions.vocab_size // ranks)
                values = torch.full(shape, float("nan"))
                if mapping.dtype is None:
                    self.parameters[mapping.megatron] = nn.Parameter(values)
                else:
                    self.buffers[mapping.megatron] = values

    def named_parameters(self) -> ItemsView[str, nn.Parameter]:
        return self.parameters.items()

    def named_buffers(self) -> ItemsView[str, torch.Tensor]:
        return self.buffers.items()


def open_folder(path: str) -> tuple[HFFolder, Family, Dimensions]:
    folder = HFFolder(path)
    family = family_of(folder.config)
    return folder, family, family.dimensions(folder.config)


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_round_trip_returns_the_same_bytes_in_checkpoint_order(name: str, tied: bool, tmp_path: Path) -> None:
    folder, family, dimensions = open_folder(save(tiny_model(name, tied), tmp_path / "hf"))
    chunk = FakeChunk(family, dimensions, folder)
    load_hf_weights([chunk], folder, family, dimensions)
    source = MegatronWeightSource([chunk], family, dimensions)
    exported = dict(source)
    original = load_file(tmp_path / "hf" / SINGLE_FILE)
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[key], original[key]) for key in original)
    assert [(d.name, d.dtype, d.shape) for d in source.metadata()] == [
        (key, tensor.dtype, tuple(tensor.shape)) for key, tensor in source
    ]
    assert source.held_names() is None and source.yields and source.participates


def test_groups_are_layers(tmp_path: Path) -> None:
    folder, family, dimensions = open_folder(save(tiny_model("qwen2", tied=False), tmp_path / "hf"))
    chunk = FakeChunk(family, dimensions, folder)
    source = MegatronWeightSource([chunk], family, dimensions, torch.bfloat16)
    groups = source.groups()
    assert groups[0] == ["model.embed_tokens.weight"] and groups[-1] == ["model.norm.weight", "lm_head.weight"]
    assert len(groups) == dimensions.layers + 2
    for layer, group in enumerate(groups[1:-1]):
        assert len(group) == 12 and all(name.startswith(f"model.layers.{layer}.") for name in group)
    batches = list(source.iter_groups())
    assert [names for names, _ in batches] == groups
    assert all(tensor.dtype == torch.bfloat16 for _, tensors in batches for tensor in tensors)


@pytest.mark.parametrize(("name", "tied"), [("qwen2", True), ("llama", False), ("qwen3_moe", False)])
def test_tensor_parallel_shards_make_the_whole(name: str, tied: bool, tmp_path: Path) -> None:
    """Three ranks: query groups and the padded vocabulary divide unevenly into HF's sizes."""
    ranks = 3 if name == "llama" else 2
    folder, family, dimensions = open_folder(save(tiny_model(name, tied), tmp_path / "hf"))
    chunks = [FakeChunk(family, dimensions, folder, rank, ranks) for rank in range(ranks)]
    for chunk in chunks:
        load_hf_weights([chunk], folder, family, dimensions)
    for mapping in family.tensors(dimensions):
        if mapping.exported:
            shards = [chunk.parameters[mapping.megatron].detach() for chunk in chunks]
            parts = mapping.split.unfuse(mapping.split.unshard(shards), dimensions)
            for hf_name, part in zip(mapping.hf, parts, strict=True):
                assert torch.equal(part, folder.tensor(hf_name)), hf_name


def edit_weights(path: str, **changes: torch.Tensor | None) -> None:
    file = Path(path) / SINGLE_FILE
    tensors = load_file(file)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, file)


def test_everything_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    path = save(tiny_model("llama", tied=False), tmp_path / "hf")
    folder, family, dimensions = open_folder(path)
    chunk = FakeChunk(family, dimensions, folder)
    edit_weights(
        path,
        **{
            "model.layers.1.self_attn.k_proj.weight": None,
            "lm_head.weight": torch.zeros(36, 54),
            "model.layers.2.mlp.up_proj.weight": torch.zeros(1),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        },
    )
    with pytest.raises(ValueError) as error:
        load_hf_weights([chunk], HFFolder(path), family, dimensions)
    lines = str(error.value).splitlines()
    assert lines[0].endswith("do not fit its config:")
    assert sorted(line.strip() for line in lines[1:]) == [
        "misshapen: lm_head.weight is [36, 54], expected [37, 54]",
        "missing: model.layers.1.self_attn.k_proj.weight [24, 54]",
        "surplus: model.layers.2.mlp.up_proj.weight",
    ]


def test_a_tied_checkpoint_may_hold_its_output_weight_if_it_is_the_embedding(tmp_path: Path) -> None:
    path = save(tiny_model("qwen2", tied=True), tmp_path / "hf")
    folder, family, dimensions = open_folder(path)
    chunk = FakeChunk(family, dimensions, folder)
    embedding = folder.tensor("model.embed_tokens.weight").clone()
    edit_weights(path, **{"lm_head.weight": embedding})
    load_hf_weights([chunk], HFFolder(path), family, dimensions)
    assert "lm_head.weight" not in dict(MegatronWeightSource([chunk], family, dimensions))
    edit_weights(path, **{"lm_head.weight": embedding + 1})
    with pytest.raises(ValueError, match="ties lm_head.weight to model.embed_tokens.weight, but they differ"):
        load_hf_weights([chunk], HFFolder(path), family, dimensions)


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_have_their_number_among_all(grouped: bool, tmp_path: Path) -> None:
    """The second of two expert-parallel ranks, with one module an expert and with Transformer Engine's grouped ones."""
    folder, family, dimensions = open_folder(save(tiny_model("qwen3_moe", tied=False), tmp_path / "hf"))
    chunk = FakeChunk(family, dimensions, folder)
    chunk.pg_collection.ep = types.SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    local = dimensions.experts // 2
    chunk.decoder.layers[0].mlp.experts.num_local_experts = local
    names = {}
    for name, parameter in chunk.parameters.items():
        expert = re.search(r"(.*\.experts\.)local_experts\.(\d+)\.(.*)", name)
        if expert is None:
            names[name] = parameter
        elif int(expert[2]) < local:
            names[f"{expert[1]}{expert[3]}{expert[2]}" if grouped else name] = parameter
    chunk.parameters = names
    load_hf_weights([chunk], folder, family, dimensions)
    held = dict(named_local_parameters([chunk]))
    experts = {int(match[1]) for name in held if (match := re.search(r"local_experts\.(\d+)\.", name))}
    assert experts == set(range(local, dimensions.experts))
    for mapping in family.tensors(dimensions):
        if mapping.megatron in held:
            for hf_name, part in zip(
                mapping.hf, mapping.split.unfuse(held[mapping.megatron].detach(), dimensions), strict=True
            ):
                assert torch.equal(part, folder.tensor(hf_name)), hf_name


def test_more_ranks_than_rows_of_the_padded_vocabulary(tmp_path: Path) -> None:
    """37 tokens on 24 ranks: 2 rows each, the last ranks hold padding alone."""
    split, rows = Vocabulary(), []
    folder = HFFolder(save(tiny_model("qwen2", tied=False), tmp_path / "hf"))
    for rank in range(24):
        rows.append(folder.tensor("lm_head.weight", split.part(folder.shape("lm_head.weight"), rank, 24)))
    assert [part.shape[0] for part in rows] == [2] * 18 + [1] + [0] * 5
    assert torch.equal(torch.cat(rows), folder.tensor("lm_head.weight"))
