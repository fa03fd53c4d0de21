"""vLLM's ipc, nccl and nccl_m2n behind our two ends, with NCCL and CUDA's memory handles replaced by queues."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.distributed.weight_transfer import (  # noqa: E402
    ipc_engine,
    m2n_engine,
    m2n_trainer,
    nccl_common,
    nccl_engine,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # noqa: E402

from dapo_megatron.config.schema import WeightsConfig  # noqa: E402
from dapo_megatron.weights.export import MegatronWeightSource  # noqa: E402
from dapo_megatron.weights.load import load_hf_weights  # noqa: E402
from dapo_megatron.weights.transport import WeightSyncError, WeightTransfer, engine_backend, trainer_engine  # noqa: E402
from tests.tiny_models import save, tiny_model  # noqa: E402
from tests.weights.test_load_export import FakeChunk, open_folder  # noqa: E402

DEADLINE_S = 5.0


class Wire:
    """NCCL's groups: joining waits for all; what rank 0 sends reaches every other rank."""

    def __init__(self) -> None:
        self.ranks: dict[int, queue.Queue[torch.Tensor]] = {}
        self._changed = threading.Condition()

    def join(self, host: str, port: int, rank: int, world_size: int, device: Any) -> Any:
        assert port > 0 and rank not in self.ranks
        with self._changed:
            self.ranks[rank] = queue.Queue()
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self.ranks) == world_size)
        return SimpleNamespace(rank=rank, destroy=lambda: self.ranks.pop(rank))

    def send(self, tensor: torch.Tensor) -> None:
        for rank, arriving in self.ranks.items():
            if rank != 0:
                arriving.put(tensor.clone())

    def produce(self, iterator: Any, group: Any, **_: Any) -> None:
        for _name, tensor in iterator:
            self.send(tensor)

    def consume(self, iterator: Any, group: Any, post_unpack_func: Any, **_: Any) -> None:
        for name, (shape, dtype) in iterator:
            tensor = self.ranks[group.rank].get()
            assert tensor.dtype == dtype and list(tensor.shape) == list(shape)
            post_unpack_func([(name, tensor)])

    def reshard(self, source: Any, destination: Any, group: Any, stream: Any, **_: Any) -> None:
        if source is not None:
            self.send(source)
        else:
            destination.copy_(self.ranks[group.rank].get())


def chunks_of_two(iterator: Any, gpu_uuid: str, **_: Any) -> Iterator[Any]:
    pairs = list(iterator)
    for i in range(0, len(pairs), 2):
        names, tensors = zip(*pairs[i : i + 2], strict=True)
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        shapes = [list(tensor.shape) for tensor in tensors]
        yield SimpleNamespace(
            names=list(names), shapes=shapes, dtype_names=dtypes, tensor_sizes=[], ipc_handle={gpu_uuid: tensors}
        )


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    handle = SimpleNamespace(create=lambda config: SimpleNamespace(destroy=lambda: None))
    anything = {name: lambda *_, **__: None for name in ("Config", "Mesh", "Shard", "Replicate")}
    m2n = SimpleNamespace(Handle=handle, reshard=wire.reshard, **anything)
    for module in (m2n_engine, m2n_trainer):
        monkeypatch.setattr(module, "import_m2n", lambda: m2n)
        monkeypatch.setattr(module, "comm_ptr", lambda group: group)
        monkeypatch.setattr(
            module, "publish_destination_placements", lambda group, first, mine, count: mine or [None] * count
        )
    monkeypatch.setattr(nccl_common, "stateless_init_process_group", wire.join)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", wire.produce)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_consumer", wire.consume)
    monkeypatch.setattr(ipc_engine, "packed_ipc_producer", chunks_of_two)
    monkeypatch.setattr(
        ipc_engine, "packed_ipc_consumer", lambda ipc_handle, names, **_: zip(names, ipc_handle["gpu"], strict=True)
    )
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="gpu"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    return wire


class Model(torch.nn.Module):
    """Takes whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            assert name not in self.loaded
            self.loaded[name] = tensor.clone()


class Engine:
    """One worker behind vLLM's weight-sync client; `tamper` may change what it is told of an update."""

    def __init__(self, transport: str, folder: str) -> None:
        self.model = Model()
        self.version: str | None = None
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0, pipeline_parallel_size=1)
        vllm_config = SimpleNamespace(
            parallel_config=parallel, model_config=SimpleNamespace(model=folder, quantization=None), quant_config=None
        )
        config: Any = SimpleNamespace(backend=engine_backend(transport))
        self.engine = WeightTransferEngineFactory.create_engine(
            config,
            vllm_config,  # type: ignore[arg-type]
            torch.device("cpu", 0),
            self.model,
        )

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        self.model.loaded = {}
        self.engine.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.engine.update_weights(self.tamper(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.finish_weight_update()
        self.version = weight_version

    @staticmethod
    def tamper(update_info: dict[str, Any]) -> dict[str, Any]:
        return update_info


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("models")
    return {name: save(tiny_model(name), path / name) for name in ("qwen2", "llama")}


def source_of(folder: str) -> MegatronWeightSource:
    hf, family, dimensions = open_folder(folder)
    chunk: Any = FakeChunk(family, dimensions, hf)
    load_hf_weights([chunk], hf, family, dimensions)
    return MegatronWeightSource([chunk], family, dimensions, torch.bfloat16)


def connect(transport: str, source: Any, engines: list[Engine], **arguments: Any) -> WeightTransfer:
    settings = WeightsConfig(transport=transport, deadline_s=DEADLINE_S)
    return trainer_engine(source, engines, settings, rank=0, **arguments)


@pytest.mark.parametrize(("transport", "count"), [("ipc", 2), ("nccl", 1), ("nccl", 3), ("nccl_m2n", 1)])
def test_all_tensors_reach_all_engines(wire: Wire, folders: dict[str, str], transport: str, count: int) -> None:
    source = source_of(folders["qwen2"])
    engines = [Engine(transport, folders["qwen2"]) for _ in range(count)]
    transfer = connect(transport, source, engines)
    assert sorted(wire.ranks) == ([] if transport == "ipc" else list(range(1 + count)))
    for version in (1, 2):
        next(iter(source._parameters.values())).data += 1
        transfer.send_weights(version)
        expected = dict(source)
        for engine in engines:
            assert engine.version == str(version)
            assert engine.model.loaded.keys() == expected.keys()
            assert all(torch.equal(engine.model.loaded[name], expected[name]) for name in expected)
    transfer.shutdown()
    assert 0 not in wire.ranks


def test_engines_of_several_workers_have_ranks_of_their_own(wire: Wire, folders: dict[str, str]) -> None:
    told: list[dict[str, Any]] = []

    class Pair(Engine):
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            told.append(init_info)
            group = [init_info["rank_offset"] + worker for worker in range(2)]
            threads = [threading.Thread(target=wire.join, args=("", 1, rank, 5, None)) for rank in group]
            for thread in threads:
                thread.start()

    source = source_of(folders["qwen2"])
    pairs = [Pair("nccl", folders["qwen2"]) for _ in range(2)]
    connect("nccl", source, pairs, workers_per_engine=2)
    assert sorted(wire.ranks) == [0, 1, 2, 3, 4]
    assert sorted(info["rank_offset"] for info in told) == [1, 3] and {info["world_size"] for info in told} == {5}


@pytest.mark.parametrize("transport", ["ipc", "nccl", "nccl_m2n"])
def test_an_engine_of_another_model_refuses_at_once(wire: Wire, folders: dict[str, str], transport: str) -> None:
    """Though rank 0 waits for it to join."""
    with pytest.raises(
        ValueError, match=r"18 surplus: model.layers.0.self_attn.q_proj.bias, .* misshapen: model.embed"
    ):
        connect(transport, source_of(folders["qwen2"]), [Engine(transport, folders["llama"])])


def without_one(info: dict[str, Any]) -> dict[str, Any]:
    if "model.embed_tokens.weight" not in info["names"]:
        return info
    columns = {key: info[key][1:] for key in ("names", "shapes", "dtype_names")}
    return info | columns | {"ipc_handles": {"gpu": info["ipc_handles"]["gpu"][1:]}}


def renamed(info: dict[str, Any]) -> dict[str, Any]:
    return info | {"names": ["other", *info["names"][1:]]}


def twice(info: dict[str, Any]) -> dict[str, Any]:
    return info | {"names": [info["names"][1], *info["names"][1:]], "shapes": [info["shapes"][1], *info["shapes"][1:]]}


@pytest.mark.parametrize(
    ("tamper", "message"),
    [(without_one, "without 1 tensors: model.embed"), (renamed, "other is not"), (twice, "was sent twice")],
)
def test_the_engine_checks_the_manifest(wire: Wire, folders: dict[str, str], tamper: Any, message: str) -> None:
    engine = Engine("ipc", folders["qwen2"])
    transfer = connect("ipc", source_of(folders["qwen2"]), [engine])
    engine.tamper = tamper  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match=message):
        transfer.send_weights(1)


@pytest.mark.parametrize("transport", ["nccl", "nccl_m2n"])
def test_a_dead_engine_is_an_error_while_rank_0_waits_in_nccl(
    wire: Wire, folders: dict[str, str], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(transport, folders["qwen2"])
    transfer = connect(transport, source_of(folders["qwen2"]), [engine])
    monkeypatch.setattr(wire, "send", lambda tensor: threading.Event().wait())

    def die(update_info: Any) -> None:
        raise ConnectionError("the engine died")

    engine.update_weights = die  # type: ignore[method-assign]
    started = time.monotonic()
    with pytest.raises(ConnectionError, match="the engine died"):
        transfer.send_weights(1)
    assert time.monotonic() - started < DEADLINE_S


@pytest.mark.parametrize("transport", ["nccl", "nccl_m2n"])
def test_silence_ends_at_the_deadline(wire: Wire, folders: dict[str, str], transport: str) -> None:
    """Of the engine, and of nobody in particular."""
    engine = Engine(transport, folders["qwen2"])
    transfer = connect(transport, source_of(folders["qwen2"]), [engine])
    never = threading.Event()
    transfer._clients.deadline_s = 0.2  # type: ignore[attr-defined]
    engine.update_weights = lambda info: never.wait(60)  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(WeightSyncError, match=r"rollout engine 0 did not answer update_weights within 0.2 s"):
        transfer.send_weights(1)
    with pytest.raises(WeightSyncError, match=r"did not meet within 0.4 s"):
        transfer._clients.supervise(lambda: never.wait(60))  # type: ignore[attr-defined]
    never.set()


def test_what_nccl_m2n_cannot_carry_is_refused(wire: Wire, folders: dict[str, str], tmp_path: Path) -> None:
    source, engine = source_of(folders["qwen2"]), Engine("nccl_m2n", folders["qwen2"])
    with pytest.raises(ValueError, match="nccl_m2n drives one engine"):
        connect("nccl_m2n", source, [engine, engine])
    with pytest.raises(ValueError, match="nccl_m2n cannot send quantised weights"):
        connect("nccl_m2n", source, [engine], quantization="fp8_block")


def test_what_engines_open_lies_in_whole_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the other settings of the allocator stay, during and after a sync that fails."""
    from vllm.device_allocator import alloc_conf

    from dapo_megatron.weights.transport.cuda import whole_segments

    settings = ["expandable_segments:True,max_split_size_mb:512"]
    monkeypatch.setattr(alloc_conf, "current_alloc_conf", lambda: settings[-1])
    monkeypatch.setattr(alloc_conf, "set_alloc_conf", settings.append)
    with pytest.raises(KeyError), whole_segments():
        assert settings[-1] == "expandable_segments:False,max_split_size_mb:512"
        raise KeyError
    assert settings[-1] == settings[0] and len(settings) == 3
    settings[:] = ["max_split_size_mb:512"]
    with whole_segments():
        assert len(settings) == 1
