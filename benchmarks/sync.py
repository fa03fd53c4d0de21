"""Weights from two tensor-parallel ranks into one vLLM engine, against a plain copy of the same bytes.

    python benchmarks/sync.py                                  # Qwen2.5-0.5B's shape: some minutes, 6 GB
    python benchmarks/sync.py --layers 4 --vocab 32000         # a minute

Two ranks hold a model with random weights in bfloat16. In each round, in this order:

- memcpy: one process copies the bytes of the model into shared memory that it has mapped and touched; halves: both
  ranks copy half of them each, at once. `in_and_out`: one process into shared memory and out of it again.
- transfer: a sync into engines that answer at once, i.e. from the ranks' tensors to whole HF tensors in shared memory.
- sync: a sync into a real engine in a process of its own; beside it the time in which the engine loaded (vLLM's own).

A ratio is the median of those within a round, so that a busy machine weighs on both sides. Then further syncs, with
the resident memory of every process and the bytes in use in /dev/shm after each. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dapo_megatron.config.schema import Config, SamplingConfig
from dapo_megatron.rollout.vllm_setup import engine_environment

RANKS = 2
ENGINE_START_S = 400.0
PROMPT = list(range(1, 9))


def config_of(options: argparse.Namespace) -> Config:
    config = Config()
    config.parallel.tensor = RANKS
    config.parallel.sequence_parallel = False
    config.precision.rollout_dtype = config.precision.params_dtype = "bfloat16"
    config.data.max_prompt_tokens = config.rollout.max_response_tokens = 64
    config.rollout.max_concurrent_samples = 4
    config.rollout.kv_cache_bytes = 64 * 2**20
    config.rollout.cpu_threads = 1
    config.weights.buffer_bytes = options.buffer_bytes
    config.weights.verify = options.verify
    return config


def write_model(folder: Path, options: argparse.Namespace) -> None:
    """Qwen2.5-0.5B's shape, random weights, and a tokenizer that vLLM takes."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=options.vocab,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=options.layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        dtype="bfloat16",
        eos_token_id=0,
    )
    torch.set_default_dtype(torch.bfloat16)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    vocabulary = {f"<{i}>": i for i in range(16)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<1>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<0>", unk_token="<1>").save_pretrained(folder)


def engine_process(pipe: Connection, config: Config, folder: str) -> None:
    """Serve the engine's methods over a pipe; each answer carries the seconds that the call took."""
    import asyncio

    from dapo_megatron.rollout.engine import RolloutEngine

    engine = RolloutEngine(config, folder)
    loop = asyncio.new_event_loop()
    pipe.send((None, 0.0))
    while True:
        method, arguments = pipe.recv()
        if method == "stop":
            engine.shutdown()
            return
        started = time.perf_counter()
        error = None
        try:
            loop.run_until_complete(getattr(engine, method)(*arguments))
        except Exception as failure:
            error = repr(failure)
        pipe.send((error, time.perf_counter() - started))


class EngineClient:
    """vLLM's weight-sync client over the pipe to an engine process; adds up the engine's own seconds."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.engine_s = 0.0

    def call(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))
        error, seconds = self._pipe.recv()
        if error:
            raise RuntimeError(error)
        self.engine_s += seconds

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        from dapo_megatron.weights.transport import WeightTransferInitRequest

        self.call("init_weight_transfer_engine", WeightTransferInitRequest(init_info))

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        from dapo_megatron.weights.transport import WeightTransferUpdateRequest

        self.call("update_weights", WeightTransferUpdateRequest(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update")


class ReadyClient:
    """An engine that answers at once."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class PlainCopies:
    """The bytes of a model, copied without any thought."""

    def __init__(self, size_bytes: int, rank: int) -> None:
        import torch

        folder = Path("/dev/shm", f"dapo_megatron_benchmark_{os.getpid()}")
        folder.touch()
        os.truncate(folder, size_bytes)
        self._shared = torch.from_file(str(folder), shared=True, size=size_bytes, dtype=torch.uint8).fill_(1)
        folder.unlink()
        self._plain = torch.ones(size_bytes, dtype=torch.uint8)
        self._half = size_bytes // RANKS
        self._rank = rank

    def into(self) -> None:
        if self._rank == 0:
            self._shared.copy_(self._plain)

    def in_and_out(self) -> None:
        if self._rank == 0:
            self._shared.copy_(self._plain)
            self._plain.copy_(self._shared)

    def halves(self) -> None:
        self._shared[: self._half].copy_(self._plain[: self._half])


def timed(action: Any) -> float:
    """Seconds until all ranks are through."""
    import torch.distributed as dist

    dist.barrier()
    started = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - started


def rank_process(rank: int, port: int, options: argparse.Namespace, folder: str, results: Connection) -> None:
    import psutil
    import torch

    from dapo_megatron.megatron.actor import initialize_parallel
    from dapo_megatron.megatron.model import build_chunks
    from dapo_megatron.models.registry import family_of
    from dapo_megatron.weights.export import MegatronWeightSource
    from dapo_megatron.weights.hf_folder import HFFolder
    from dapo_megatron.weights.load import load_hf_weights
    from dapo_megatron.weights.transport import trainer_engine

    torch.set_num_threads(1)
    config = config_of(options)
    initialize_parallel(config.parallel, rank, RANKS, f"tcp://127.0.0.1:{port}")
    hf = HFFolder(folder)
    family = family_of(hf.config)
    dimensions = family.dimensions(hf.config)
    chunks = build_chunks(family, dimensions, config, torch.bfloat16)
    load_hf_weights(chunks, hf, family, dimensions)
    source = MegatronWeightSource(chunks, family, dimensions, torch.bfloat16)
    size_bytes = sum(torch.Size(meta.shape).numel() * meta.dtype.itemsize for meta in source.metadata())

    client: Any = ReadyClient()
    processes = {f"rank {rank}": os.getpid()}
    if rank == 0 and options.engine:
        pipe, theirs = multiprocessing.Pipe()
        os.environ.update(engine_environment("cpu", 1))
        engine = multiprocessing.Process(target=engine_process, args=(theirs, config, folder))
        engine.start()
        if not pipe.poll(ENGINE_START_S):
            raise TimeoutError("the engine did not start")
        pipe.recv()
        client = EngineClient(pipe)
        processes["engine"] = engine.pid or 0
    in_use_before = shared_memory_bytes()
    ready = trainer_engine(source, [ReadyClient()], config.weights, rank=rank)
    buffers_bytes = shared_memory_bytes() - in_use_before
    real = trainer_engine(source, [client], config.weights, rank=rank) if options.engine else None
    copies = PlainCopies(size_bytes, rank)

    rounds = []
    for number in range(options.rounds):
        client.engine_s = 0.0
        seconds = {
            "memcpy_s": timed(copies.into),
            "memcpy_halves_s": timed(copies.halves),
            "memcpy_in_and_out_s": timed(copies.in_and_out),
            "transfer_s": timed(lambda number=number: ready.send_weights(number)),
        }
        if real is not None:
            seconds["sync_s"] = timed(lambda number=number: real.send_weights(number))
            seconds["engine_s"] = client.engine_s
        rounds.append(seconds)
    del copies
    memory = []
    for number in range(options.syncs):
        (real or ready).send_weights(number)
        memory.append(
            {name: psutil.Process(pid).memory_info().rss for name, pid in processes.items()}
            | {"shared memory": shared_memory_bytes() - in_use_before}
        )
    results.send({"model_bytes": size_bytes, "buffers_bytes": buffers_bytes, "rounds": rounds, "memory": memory})
    if rank == 0 and options.engine:
        client.call("generate", PROMPT, [0], SamplingConfig())
        pipe.send(("stop", ()))
        engine.join()


def shared_memory_bytes() -> int:
    usage = os.statvfs("/dev/shm")
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize


def summary(options: argparse.Namespace, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    rounds = outcomes[0]["rounds"]
    size_bytes = outcomes[0]["model_bytes"]

    def ratio(of: str, to: str) -> float:
        return round(statistics.median(seconds[of] / seconds[to] for seconds in rounds[1:] or rounds), 3)

    def median(name: str) -> float:
        return statistics.median(seconds[name] for seconds in rounds[1:] or rounds)

    found = {
        "model_bytes": size_bytes,
        "buffers_bytes": outcomes[0]["buffers_bytes"],
        "GB_per_s": {
            name: round(size_bytes / median(f"{name}_s") / 1e9, 2)
            for name in ("memcpy", "memcpy_halves", "memcpy_in_and_out", "transfer")
        },
        "transfer_over_memcpy_speed": ratio("memcpy_s", "transfer_s"),
        "transfer_over_memcpy_halves_speed": ratio("memcpy_halves_s", "transfer_s"),
        "transfer_over_in_and_out_speed": ratio("memcpy_in_and_out_s", "transfer_s"),
        "transfer_first_s": round(rounds[0]["transfer_s"], 4),
        "transfer_later_s": [round(seconds["transfer_s"], 4) for seconds in rounds[1:]],
    }
    if options.engine:
        found |= {
            "sync_first_s": round(rounds[0]["sync_s"], 3),
            "sync_later_s": [round(seconds["sync_s"], 3) for seconds in rounds[1:]],
            "of_it_in_the_engine_s": [round(seconds["engine_s"], 3) for seconds in rounds],
            "beside_the_engine_s": [round(seconds["sync_s"] - seconds["engine_s"], 3) for seconds in rounds],
        }
    memory = [
        {key: value for outcome in outcomes for key, value in outcome["memory"][number].items()}
        for number in range(options.syncs)
    ]
    found["memory_MB_after_each_sync"] = {
        name: " ".join(f"{sizes[name] / 1e6:.0f}" for sizes in memory) for name in (memory[0] if memory else {})
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--buffer-bytes", type=int, default=Config().weights.buffer_bytes)
    parser.add_argument("--verify", default="manifest", choices=["manifest", "first", "checksums"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--syncs", type=int, default=20, help="further syncs for the memory figures")
    parser.add_argument("--no-engine", dest="engine", action="store_false", help="skip the real engine")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.set_start_method("spawn")
    folder = Path(tempfile.mkdtemp(prefix="dapo_megatron_sync_"))
    try:
        writer = multiprocessing.Process(target=write_model, args=(folder, options))
        writer.start()
        writer.join()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(RANKS)]
        ranks = [
            multiprocessing.Process(target=rank_process, args=(rank, port, options, str(folder), sender))
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        for _, sender in pipes:
            sender.close()
        outcomes = [receiver.recv() for receiver, _ in pipes]
        for process in ranks:
            process.join()
    finally:
        shutil.rmtree(folder)
    print(json.dumps(summary(options, outcomes), indent=2))


if __name__ == "__main__":
    main()
