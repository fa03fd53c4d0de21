"""Ranks that write their shards straight into shared memory: the same bytes as iteration, in any layout; faults end on
all ranks; a slow or failed sync leaves the next one right. And the source for receivers on every rank."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.distributed.ranks import run_ranks  # noqa: E402
from tests.distributed.test_weights import destroy_groups  # noqa: E402
from tests.tiny_models import save, tiny_config, tiny_model  # noqa: E402

RANKS = 4
LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "TP2 tied": ("qwen2 tied", {"data": 2, "tensor": 2}),
    "TP2xPP2 uneven": ("qwen2", {"tensor": 2, "pipeline": 2}),
    "TP2 latent attention": ("deepseek_v3", {"data": 2, "tensor": 2, "expert": 2}),
    "TP2xEP2": ("qwen3_moe", {"data": 2, "tensor": 2, "expert": 2}),
    "EP2xPP2 uneven": ("qwen3_moe", {"data": 2, "pipeline": 2, "expert": 2}),
}
SMALL, LARGE = 20_000, 10**7


class Engine:
    """Reads each chunk at the end of its load; `fail` is the chunk at which it dies."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.fail: int | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.buffers = [
            torch.from_file(path, shared=True, size=size, dtype=torch.uint8) for path, size in init_info["buffers"]
        ]

    def start_weight_update(self) -> None:
        self.received: dict[str, torch.Tensor] = {}
        self.chunks = 0

    def update_weights(self, update_info: dict[str, Any]) -> None:
        import time

        from dapo_megatron.weights.transport.engine import SharedMemoryUpdateInfo

        if self.chunks == self.fail:
            raise ConnectionError("the engine died")
        time.sleep(self.delay_s)
        info = SharedMemoryUpdateInfo(**update_info)
        for slot in info.slots():
            assert slot.name not in self.received
            self.received[slot.name] = slot.view(self.buffers[info.buffer]).clone()
        self.chunks += 1

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.finished = weight_version


def transfers(rank: int, world_size: int, port: int, folders: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Each layout in turn, in one world."""
    from dapo_megatron.megatron.actor import initialize_parallel, parallel_state

    results = {}
    for name, (model, sizes) in LAYOUTS.items():
        config = tiny_config()
        for size_name, size in sizes.items():
            setattr(config.parallel, size_name, size)
        initialize_parallel(config.parallel, rank, world_size, f"tcp://127.0.0.1:{port}")
        results[name] = outcome(config, folders[model], rank)
        parallel_state.destroy_model_parallel()
        destroy_groups()
    return results


def outcome(config: Any, folder: str, rank: int) -> dict[str, Any]:
    from dapo_megatron.megatron.model import build_chunks
    from dapo_megatron.models.registry import family_of
    from dapo_megatron.weights.export import MegatronWeightSource
    from dapo_megatron.weights.hf_folder import HFFolder
    from dapo_megatron.weights.load import load_hf_weights, named_local_parameters

    hf = HFFolder(folder)
    family = family_of(hf.config)
    dimensions = family.dimensions(hf.config)
    chunks = build_chunks(family, dimensions, config, torch.float32)
    load_hf_weights(chunks, hf, family, dimensions)
    source = MegatronWeightSource(chunks, family, dimensions, torch.bfloat16, bucket_bytes=5000)

    def change() -> None:
        with torch.no_grad():
            for _, parameter in named_local_parameters(chunks):
                parameter.mul_(1.5)

    found: dict[str, Any] = {
        "everywhere": {key: tensor.clone() for key, tensor in source.on_every_rank()},
        "once": {key: tensor.clone() for key, tensor in source},
        "metadata": source.metadata(),
        "parts": {key: tensor.clone() for key, tensor in source.local_parts()},
    }
    try:
        found["layout"] = source.shard_layout()
    except ValueError as error:
        found["layout"] = str(error)
    for key, buffer_bytes in (("small", SMALL), ("large", LARGE)):
        found[key] = sync_twice(source, rank, buffer_bytes, change)
    found["remote"] = with_a_rank_elsewhere(source, rank, change)
    found["faults"] = faults(source, rank, change)
    return found


def connect(source: Any, engines: list[Engine], rank: int, buffer_bytes: int = SMALL, deadline_s: float = 60) -> Any:
    from dapo_megatron.config.schema import WeightsConfig
    from dapo_megatron.weights.transport import trainer_engine

    return trainer_engine(source, engines, WeightsConfig(buffer_bytes=buffer_bytes, deadline_s=deadline_s), rank=rank)


def is_right(source: Any, engines: list[Engine], rank: int) -> bool:
    expected = {key: tensor.clone() for key, tensor in source}
    return rank != 0 or all(
        list(engine.received) == list(expected)
        and all(torch.equal(engine.received[key], expected[key]) for key in expected)
        for engine in engines
    )


def sync_twice(source: Any, rank: int, buffer_bytes: int, change: Any) -> list[Any]:
    """Into a slow and a fast engine."""
    engines = [Engine(0.01), Engine()]
    transfer = connect(source, engines, rank, buffer_bytes)
    left_over = list(Path("/dev/shm").glob(f"dapo_megatron_{os.getpid()}_*"))
    found: list[Any] = [left_over]
    for version in (1, 2):
        transfer.send_weights(version)
        found.append(is_right(source, engines, rank))
        change()
    return found


def with_a_rank_elsewhere(source: Any, rank: int, change: Any) -> list[bool]:
    """The last rank cannot see rank 0's files, as on another host."""
    from dapo_megatron.weights.transport import shared_memory

    engine = Engine()
    with pytest.MonkeyPatch.context() as patch:
        if rank == RANKS - 1:
            patch.setattr(shared_memory.os.path, "exists", lambda path: False)
        transfer = connect(source, [engine], rank)
    found = []
    for version in (1, 2):
        transfer.send_weights(version)
        found.append(is_right(source, [engine], rank))
        change()
    return found


def faults(source: Any, rank: int, change: Any) -> list[Any]:
    """An engine dies at its second chunk; then the last rank that writes cannot; then all is well."""
    engine = Engine()
    transfer = connect(source, [engine], rank)
    engine.fail = 1
    found = [attempt(transfer)]
    engine.fail = None
    change()
    failing = max(transfer._writers[-1])
    write = source.write
    if rank == failing:

        def broken(*arguments: Any) -> None:
            if set(arguments[0]) == {slot.name for slot in transfer.chunks[-1]}:
                raise MemoryError("no memory")
            write(*arguments)

        source.write = broken
    found.append(attempt(transfer))
    if rank == failing:
        del source.write
    transfer.send_weights(3)
    return [*found, failing, is_right(source, [engine], rank)]


def attempt(transfer: Any) -> str:
    try:
        transfer.send_weights(0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    path = tmp_path_factory.mktemp("models")
    folders = {
        model: save(tiny_model(model.split()[0], tied="tied" in model), path / model.replace(" ", "_"))
        for model, _ in LAYOUTS.values()
    }
    return run_ranks(transfers, RANKS, tmp_path_factory.mktemp("world"), folders)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_ranks_write_is_what_iteration_yields(name: str, outcomes: list[dict[str, dict[str, Any]]]) -> None:
    for rank in (results[name] for results in outcomes):
        assert rank["small"] == rank["large"] == [[], True, True]
        assert rank["remote"] == [True, True]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_can_be_given_all(name: str, outcomes: list[dict[str, dict[str, Any]]]) -> None:
    expected = outcomes[0][name]["once"]
    for rank in (results[name] for results in outcomes):
        assert list(rank["everywhere"]) == list(expected)
        assert all(torch.equal(rank["everywhere"][key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_faults_end_on_all_ranks_and_the_next_sync_is_right(
    name: str, outcomes: list[dict[str, dict[str, Any]]]
) -> None:
    for rank, results in enumerate(outcomes):
        died, broke, failing, right = results[name]["faults"]
        assert died == ("ConnectionError: the engine died" if rank == 0 else "")
        if rank == failing:
            assert broke == "MemoryError: no memory"
        elif rank == 0:
            assert broke.startswith(f"WeightSyncError: training rank {failing} failed: ")
        else:
            assert broke == ""
        assert right


DEADLINE_S = 20.0


def deaths(rank: int, world_size: int, port: int, folder: str, results: str) -> None:
    """Of three stages the second dies while it writes, then the first as it begins a sync: what the others say."""
    import time

    from dapo_megatron.megatron.actor import initialize_parallel
    from dapo_megatron.megatron.model import build_chunks
    from dapo_megatron.models.registry import family_of
    from dapo_megatron.weights.export import MegatronWeightSource
    from dapo_megatron.weights.hf_folder import HFFolder

    def die(*said: Any) -> None:
        """Leave the result here: `run_ranks` would wait for the others first."""
        Path(results, f"result-{rank}.pickle").write_bytes(pickle.dumps((said, time.monotonic() - started)))
        os._exit(0)

    config = tiny_config()
    config.parallel.pipeline = world_size
    initialize_parallel(config.parallel, rank, world_size, f"tcp://127.0.0.1:{port}")
    hf = HFFolder(folder)
    family = family_of(hf.config)
    dimensions = family.dimensions(hf.config)
    source = MegatronWeightSource(
        build_chunks(family, dimensions, config, torch.float32), family, dimensions, torch.float32
    )
    transfer = connect(source, [Engine()], rank, deadline_s=DEADLINE_S / 2)
    if rank == 1:
        source.write = die  # type: ignore[method-assign]
    started = time.monotonic()
    first = attempt(transfer)
    die(first, "" if rank == 0 else attempt(transfer))


def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path: Path) -> None:
    folder = save(tiny_model("qwen2"), tmp_path / "model")
    (of_first, first_s), _, (of_last, last_s) = run_ranks(deaths, 3, tmp_path, folder, str(tmp_path))
    assert of_first[0].startswith("WeightSyncError: training rank 1 is dead")
    assert of_last[0] == "" and of_last[1].startswith("WeightSyncError: training rank 0 is dead")
    assert max(first_s, last_s) < DEADLINE_S


@pytest.mark.parametrize("name", LAYOUTS)
def test_local_parts_lie_where_the_layout_says(name: str, outcomes: list[dict[str, dict[str, Any]]]) -> None:
    layout = outcomes[0][name]["layout"]
    if LAYOUTS[name][1].keys() & {"pipeline", "expert"}:
        assert "holds no part" in layout
        return
    shards, dims = layout
    assert shards == LAYOUTS[name][1]["tensor"]
    for key, whole in outcomes[0][name]["once"].items():
        for rank, results in enumerate(outcomes):
            dim = dims[key]
            length = 1 if dim is None else -(-whole.shape[dim] // shards)
            expected = (
                whole
                if dim is None
                else whole.narrow(dim, rank % shards * length, min(length, whole.shape[dim] - rank % shards * length))
            )
            part = results[name]["parts"][key]
            assert torch.equal(part[: len(expected)], expected)  # a padded vocabulary ends in rows of its own
