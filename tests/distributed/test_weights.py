"""HF -> Megatron -> HF in every layout, in worlds of real ranks: the same bytes, and no rank reads or sends more than
it holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d

from dapo_megatron.models.registry import family_of
from dapo_megatron.weights.export import MegatronWeightSource
from dapo_megatron.weights.hf_folder import SINGLE_FILE, HFFolder
from dapo_megatron.weights.load import load_hf_weights, named_local_tensors
from tests.distributed.ranks import run_ranks
from tests.tiny_models import save, tiny_config, tiny_model

RANKS = 4


@dataclass(frozen=True)
class Layout:
    """Sizes other than 1, and the model: three layers, which two stages share unevenly, unless its name says more."""

    sizes: dict[str, int]
    model: str = "qwen2"


LAYOUTS = {
    "DP4": Layout({"data": 4}),
    "TP2": Layout({"data": 2, "tensor": 2}),
    "TP2 tied": Layout({"data": 2, "tensor": 2}, "qwen2 tied"),
    "PP2 uneven": Layout({"data": 2, "pipeline": 2}, "qwen3"),
    "PP2 uneven tied": Layout({"data": 2, "pipeline": 2}, "qwen3 tied"),
    "PP4 tied": Layout({"pipeline": 4}, "qwen2 tied 4 layers"),
    "CP2xTP2": Layout({"context": 2, "tensor": 2}, "qwen3"),
    "TP2xPP2 uneven": Layout({"tensor": 2, "pipeline": 2}, "qwen2"),
    "PP2xVPP2 uneven": Layout({"data": 2, "pipeline": 2, "virtual_pipeline": 2}, "qwen3 tied 5 layers"),
    "TP2xPP2xVPP2 tied": Layout({"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}, "qwen2 tied 4 layers"),
    "EP2": Layout({"data": 4, "expert": 2}, "qwen3_moe"),
    "EP4": Layout({"data": 4, "expert": 4}, "qwen3_moe"),
    "TP2xEP2": Layout({"data": 2, "tensor": 2, "expert": 2}, "qwen3_moe"),
    "TP2xEP4": Layout({"data": 2, "tensor": 2, "expert": 4}, "qwen3_moe"),
    "TP2xEP2xETP2": Layout({"data": 2, "tensor": 2, "expert": 2, "expert_tensor": 2}, "qwen3_moe tied"),
    "ETP2 of TP1": Layout({"data": 4, "expert": 2, "expert_tensor": 2}, "qwen3_moe"),
    "EP2xPP2 uneven": Layout({"data": 2, "pipeline": 2, "expert": 2}, "qwen3_moe"),
    "TP2xPP2xEP2xVPP2": Layout(
        {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2, "expert": 2}, "qwen3_moe tied 4 layers"
    ),
    "CP2xPP2xEP2": Layout({"context": 2, "pipeline": 2, "expert": 2}, "qwen3_moe tied 4 layers"),
    **{
        f"{name} {family}": Layout(sizes, family + (" 4 layers" if "virtual_pipeline" in sizes else ""))
        for family in "qwen2 qwen3 qwen3_moe llama31 mistral mixtral deepseek_v3 moonlight".split()
        for name, sizes in {
            "TP2": {"data": 2, "tensor": 2},
            "PP2 uneven": {"data": 2, "pipeline": 2},
            "TP2xPP2": {"tensor": 2, "pipeline": 2},
            "PP2xVPP2": {"data": 2, "pipeline": 2, "virtual_pipeline": 2},
        }.items()
    },
    **{
        f"EP2 {family}": Layout({"tensor": 2, "pipeline": 2, "expert": 2}, family)
        for family in ("mixtral", "deepseek_v3", "moonlight")
    },
}


class CountingFolder(HFFolder):
    """Counts the elements that are read."""

    elements = 0

    def tensor(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        read = super().tensor(name, part)
        self.elements += read.numel()
        return read


def run_layouts(rank: int, world_size: int, port: int, folders: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Each layout in turn, in one world."""
    from dapo_megatron.megatron.actor import initialize_parallel, parallel_state

    results = {}
    for name, layout in LAYOUTS.items():
        config = tiny_config()
        for size_name, size in layout.sizes.items():
            setattr(config.parallel, size_name, size)
        initialize_parallel(config.parallel, rank, world_size, f"tcp://127.0.0.1:{port}")
        results[name] = round_trip(config, CountingFolder(folders[layout.model]))
        parallel_state.destroy_model_parallel()
        destroy_groups()
    return results


def destroy_groups() -> None:
    """Megatron forgets its process groups, but each goes on with threads of its own."""
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def round_trip(config: Any, folder: CountingFolder) -> dict[str, Any]:
    from dapo_megatron.megatron.model import build_chunks

    family = family_of(folder.config)
    dimensions = family.dimensions(folder.config)
    chunks = build_chunks(family, dimensions, config, torch.float32)
    with torch.no_grad():
        for _, tensor in named_local_tensors(chunks):
            tensor.fill_(float("nan"))
    load_hf_weights(chunks, folder, family, dimensions)
    source = MegatronWeightSource(chunks, family, dimensions)
    first = {key: tensor.clone() for key, tensor in source}
    with torch.no_grad():
        for _, tensor in named_local_tensors(chunks):
            tensor.mul_(2)
    in_small_buckets = MegatronWeightSource(chunks, family, dimensions, torch.bfloat16, bucket_bytes=5000)
    return {
        "first": first,
        "second": {key: tensor.clone() for key, tensor in source},
        "rounded": {key: tensor.clone() for key, tensor in in_small_buckets},
        "metadata": source.metadata(),
        "groups": source.groups(),
        "iterated groups": [names for names, _ in source.iter_groups()],
        "participates": source.participates,
        "parameters": {key: tensor.numel() for key, tensor in named_local_tensors(chunks)},
        "read": folder.elements,
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("models")
    found = {}
    for model in {layout.model for layout in LAYOUTS.values()}:
        layers = next((int(word) for word in model.split() if word.isdigit()), 3)
        hf = tiny_model(model.split()[0], tied="tied" in model, layers=layers)
        found[model] = save(hf, path / model.replace(" ", "_"))
    return found


@pytest.fixture(scope="module")
def outcomes(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(run_layouts, RANKS, tmp_path_factory.mktemp("world"), folders)


@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trip(name: str, folders: dict[str, str], outcomes: list[dict[str, dict[str, Any]]]) -> None:
    ranks = [results[name] for results in outcomes]
    original = load_file(Path(folders[LAYOUTS[name].model]) / SINGLE_FILE)
    exported = ranks[0]["first"]
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[key], original[key]) for key in original)
    assert all(torch.equal(ranks[0]["second"][key], 2 * original[key]) for key in original)
    for key, tensor in original.items():
        dtype = torch.float32 if key.endswith("e_score_correction_bias") else torch.bfloat16
        assert ranks[0]["rounded"][key].dtype == dtype
        assert torch.equal(ranks[0]["rounded"][key], (2 * tensor).to(dtype)), key
    assert not any(rank[pass_] for rank in ranks[1:] for pass_ in ("first", "second", "rounded"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_rank_0_will_yield_is_known_everywhere(name: str, outcomes: list[dict[str, dict[str, Any]]]) -> None:
    ranks = [results[name] for results in outcomes]
    described = [(d.name, d.dtype, d.shape) for d in ranks[0]["metadata"]]
    assert described == [(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in ranks[0]["first"].items()]
    assert all(rank["metadata"] == ranks[0]["metadata"] for rank in ranks)
    assert sum(ranks[0]["groups"], []) == list(ranks[0]["first"])
    assert all(rank["groups"] == rank["iterated groups"] for rank in ranks)
    assert not any(rank["groups"] for rank in ranks[1:])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_reads_what_it_holds(name: str, outcomes: list[dict[str, dict[str, Any]]]) -> None:
    for rank in (results[name] for results in outcomes):
        read, held = rank["read"], sum(rank["parameters"].values())
        # Embedding and output weight may hold a row of padding each.
        assert held - 2 * 48 <= read <= held


def test_only_ranks_that_are_needed_take_part(outcomes: list[dict[str, dict[str, Any]]]) -> None:
    """A data-parallel copy has nothing to add, unless it holds experts of its own."""
    taking_part = {name: [results[name]["participates"] for results in outcomes] for name in LAYOUTS}
    assert taking_part["DP4"] == [True, False, False, False]
    assert taking_part["TP2"] == [True, True, False, False]
    assert taking_part["PP2 uneven"] == [True, False, True, False]
    assert taking_part["EP2"] == [True, True, False, False]
    assert taking_part["EP4"] == taking_part["TP2xPP2 uneven"] == [True] * 4
