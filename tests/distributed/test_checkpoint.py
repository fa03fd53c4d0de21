"""Megatron itself, in worlds of real ranks, loads the checkpoints that the converter writes, in any layout; and what
Megatron writes converts back to the same HF model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dapo_megatron.models.registry import family_of
from dapo_megatron.weights.convert import open_checkpoint, to_hf, to_megatron
from dapo_megatron.weights.hf_folder import HFFolder
from dapo_megatron.weights.load import load_hf_weights, named_local_tensors
from dapo_megatron.weights.verify import differences
from tests.distributed.ranks import run_ranks
from tests.distributed.test_weights import destroy_groups
from tests.tiny_models import save, tiny_config, tiny_model

RANKS = 4

# Model -> layout that it is converted for, layout in which four ranks load it and write it again.
CASES: dict[str, tuple[dict[str, int | None], dict[str, int]]] = {
    "qwen2": ({}, {"tensor": 2, "pipeline": 2}),
    "qwen2 tied": ({"tensor": 2, "pipeline": 2}, {"data": 4}),
    "qwen3 4 layers": ({"pipeline": 2, "virtual_pipeline": 2}, {"data": 2, "tensor": 2}),
    "llama31 4 layers": ({"tensor": 2}, {"data": 2, "pipeline": 2, "virtual_pipeline": 2}),
    "mistral tied": ({"pipeline": 3}, {"tensor": 2, "pipeline": 2}),
    "qwen3_moe": ({"expert": 2}, {"data": 2, "tensor": 2, "expert": 4}),
    "mixtral": ({"tensor": 2, "expert": 4}, {"data": 2, "pipeline": 2, "expert": 2}),
    "deepseek_v3": ({"tensor": 2, "pipeline": 2}, {"tensor": 2, "pipeline": 2, "expert": 2}),
    "moonlight": ({"expert": 4}, {"data": 4, "expert": 2, "expert_tensor": 2}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Of each case: the HF folder, the Megatron checkpoint, and the folder for the one that Megatron writes."""
    path = tmp_path_factory.mktemp("models")
    found = {}
    for case, (layout, _) in CASES.items():
        words = case.split()
        layers = next((int(word) for word in words if word.isdigit()), 3)
        folder = path / case.replace(" ", "_")
        save(tiny_model(words[0], tied="tied" in words, layers=layers), folder / "hf")
        to_megatron(folder / "hf", folder / "megatron", layout, lambda *_: None)
        (folder / "written").mkdir()
        found[case] = {name: str(folder / name) for name in ("hf", "megatron", "written")}
    return found


def load_and_write(rank: int, world_size: int, port: int, models: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    """Case -> the local tensors that Megatron loaded otherwise than from the HF folder."""
    from dapo_megatron.megatron.actor import initialize_parallel, parallel_state

    results = {}
    for case, (_, layout) in CASES.items():
        config = tiny_config()
        for name, size in layout.items():
            setattr(config.parallel, name, size)
        config.parallel.sequence_parallel = config.parallel.tensor > 1 and "expert" in layout
        initialize_parallel(config.parallel, rank, world_size, f"tcp://127.0.0.1:{port}")
        results[case] = one_model(config, **models[case])
        parallel_state.destroy_model_parallel()
        destroy_groups()
    return results


def one_model(config: Any, hf: str, megatron: str, written: str) -> list[str]:
    from megatron.core import dist_checkpointing

    from dapo_megatron.megatron.model import build_chunks

    folder = HFFolder(hf)
    family = family_of(folder.config)
    dimensions = family.dimensions(folder.config)
    expected, chunks = (build_chunks(family, dimensions, config, torch.float32) for _ in range(2))
    load_hf_weights(expected, folder, family, dimensions)
    with torch.no_grad():
        for _, tensor in named_local_tensors(chunks):
            tensor.fill_(float("nan"))

    iteration = f"{megatron}/iter_0000000"
    content = dist_checkpointing.load_content_metadata(iteration)

    def state(chunks: list[Any]) -> dict[str, Any]:
        return {f"model{i}": chunk.sharded_state_dict(metadata=dict(content)) for i, chunk in enumerate(chunks)}

    loaded = dist_checkpointing.load(state(chunks), iteration)
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{i}"])
    dist_checkpointing.save(state(chunks), written, content_metadata=content)
    dist.barrier()
    right = dict(named_local_tensors(expected))
    return [name for name, tensor in named_local_tensors(chunks) if not torch.equal(tensor, right[name])]


@pytest.fixture(scope="module")
def results(models: dict[str, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    return run_ranks(load_and_write, RANKS, tmp_path_factory.mktemp("ranks"), models)


@pytest.mark.parametrize("case", CASES)
def test_megatron_loads_what_was_converted(case: str, results: list[dict[str, list[str]]]) -> None:
    assert [result[case] for result in results] == [[]] * RANKS


@pytest.mark.parametrize("case", CASES)
def test_what_megatron_writes_converts_back(
    case: str, results: list[dict[str, list[str]]], models: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    source = Path(models[case]["hf"])
    to_hf(Path(models[case]["written"]), tmp_path / "back", lambda *_: None, hf_config=source)
    assert list(differences(open_checkpoint(source), open_checkpoint(tmp_path / "back"))) == []
