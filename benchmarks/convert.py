"""Conversion HF -> Megatron -> HF of a model with random bf16 weights, against `cp` of the same bytes; prints JSON.

The default is shaped like Qwen2.5-0.5B (988 MB), --model 7b like Qwen2.5-7B (15.2 GB; needs three times that on disk).
Every contender reads a source that is in the page cache where memory allows, and writes a folder that was not there;
they take turns. Memory that a virtual machine has not used for a while comes back slowly from its host, whoever writes:
right before each contender another copy of the model is written and removed. A conversion runs in a process of its own,
which reports the time of the call and its peak resident memory above that of the interpreter with all of the imports.
Conversions end with their bytes on the disk, so `cp` is timed twice: as it returns (`cp`), and with a `sync` of what it
wrote (`cp_sync`).

`speed_over` is the median over turns of the time of `cp` by that of the conversion: at least 0.5 is asked for.
`byte_equal` compares the tensors of the HF folder that came back with the first.

--mbridge adds mbridge (`pip install --no-deps mbridge==0.15.1`; its megatron-core runs on the CPU as ours does, with
the local layer spec, whose names of norms are added to mbridge's tables): into a model and from there into a
distributed checkpoint by Megatron's own `save`, and back. It never waits for the disk.

    python benchmarks/convert.py [--model 0.5b] [--tp 1 --pp 1] [--repeats 5] [--folder FOLDER] [--mbridge]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dapo_megatron.models.registry import family_of
from dapo_megatron.weights.convert import open_checkpoint
from dapo_megatron.weights.hf_folder import write_hf_folder
from dapo_megatron.weights.megatron_names import StoredModel
from dapo_megatron.weights.verify import differences

QWEN2_5: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "dtype": "bfloat16",
}
MODELS = {
    "0.5b": QWEN2_5
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7b": QWEN2_5
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}

MEASURING = """
import json, os, shutil, subprocess, sys, time
from pathlib import Path

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

def warm(hf):
    subprocess.run(["cp", "-r", hf, hf + "_warm"], check=True)
    shutil.rmtree(hf + "_warm")
    os.sync()
"""

CONVERSION = """
import torch.distributed.checkpoint
from dapo_megatron.weights import convert

direction, source, target, layout, hf = sys.argv[1:]
warm(hf)
before, start = peak_bytes(), time.perf_counter()
if direction == "hf_to_megatron":
    convert.to_megatron(Path(source), Path(target), json.loads(layout), lambda *_: None)
else:
    convert.to_hf(Path(source), Path(target), lambda *_: None)
print(json.dumps([time.perf_counter() - start, peak_bytes() - before]))
"""


MBRIDGE = """
from dapo_megatron.config.schema import ParallelConfig
from dapo_megatron.megatron import cpu_runtime
cpu_runtime.install()
from dapo_megatron.megatron.actor import initialize_parallel
import torch, torch.distributed.checkpoint
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from mbridge import AutoBridge

direction, source, target, _, hf = sys.argv[1:]
initialize_parallel(ParallelConfig(), 0, 1, "tcp://127.0.0.1:0")
warm(hf)
before, start = peak_bytes(), time.perf_counter()
bridge = AutoBridge.from_pretrained(hf)
bridge._OTHER_MAPPING["input_layernorm.weight"] = ["model.layers.{layer_number}.input_layernorm.weight"]
bridge._MLP_MAPPING["pre_mlp_layernorm.weight"] = ["model.layers.{layer_number}.post_attention_layernorm.weight"]
bridge.config.perform_initialization = False
bridge.config.gradient_accumulation_fusion = False
model = GPTModel(
    bridge.config,
    get_gpt_layer_local_spec(normalization="RMSNorm"),
    bridge.hf_config.vocab_size,
    bridge.hf_config.max_position_embeddings,
    share_embeddings_and_output_weights=bridge.hf_config.tie_word_embeddings,
    position_embedding_type="rope",
).bfloat16()
with torch.no_grad():
    if direction == "hf_to_megatron":
        bridge.load_weights([model], hf)
        Path(target).mkdir()
        dist_checkpointing.save(model.sharded_state_dict(), target)
    else:
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), source))
        bridge.safetensor_io = bridge._get_safetensor_io(hf)
        bridge.save_weights([model], target)
print(json.dumps([time.perf_counter() - start, peak_bytes() - before]))
"""


class RandomModel:
    """The weights of a config, made when they are asked for."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self.path = self.config_folder = folder
        self.config = config
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        family = family_of(config)
        model = StoredModel(family, family.dimensions(config), stacked=True)
        self._shapes = {
            name: shape
            for tensor in model.tensors
            for name, shape in zip(tensor.mapping.hf, tensor.hf_shapes, strict=True)
        }

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16

    def tensor(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        return torch.empty(self._shapes[name], dtype=torch.bfloat16).normal_()[part]

    @property
    def size_bytes(self) -> int:
        return 2 * sum(math.prod(shape) for shape in self._shapes.values())


def copy_s(source: Path, target: Path) -> tuple[float, float]:
    """Seconds until `cp` returns, and until its bytes are on the disk."""
    for _ in range(2):  # the first time for the memory
        shutil.rmtree(target, ignore_errors=True)
        os.sync()
        start = time.perf_counter()
        subprocess.run(["cp", "-r", source, target], check=True)
        copied = time.perf_counter() - start
        subprocess.run(["sync", *target.rglob("*")], check=True)
        synced = time.perf_counter() - start
    shutil.rmtree(target)
    return copied, synced


def convert(script: str, *arguments: object) -> tuple[float, float]:
    """(seconds, peak bytes above the interpreter)"""
    command = [sys.executable, "-W", "ignore", "-c", MEASURING + script, *map(str, arguments)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return tuple(json.loads(said.splitlines()[-1]))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    hf, megatron, back, copy = (folder / name for name in ("hf", "megatron", "back", "copy"))
    model = RandomModel(MODELS[args.model], folder / "config")
    if shutil.disk_usage(folder).free < 3.2 * model.size_bytes:
        raise SystemExit(f"{folder} has no room for three times {model.size_bytes / 1e9:.1f} GB")
    write_hf_folder(hf, ((name, model.tensor(name)) for name in model.names()), model)
    layout = json.dumps({"tensor": args.tp, "pipeline": args.pp, "virtual_pipeline": None, "expert": 1})
    # Name -> script, direction, source, target.
    conversions = {
        "hf_to_megatron": (CONVERSION, "hf_to_megatron", hf, megatron),
        "megatron_to_hf": (CONVERSION, "megatron_to_hf", megatron, back),
    }
    if args.mbridge:
        theirs = [folder / name for name in ("mbridge", "mbridge_back")]
        conversions["mbridge_hf_to_megatron"] = (MBRIDGE, "hf_to_megatron", hf, theirs[0])
        conversions["mbridge_megatron_to_hf"] = (MBRIDGE, "megatron_to_hf", theirs[0], theirs[1])
    seconds: dict[str, list[float]] = {name: [] for name in ("cp", "cp_sync", *conversions)}
    peaks: dict[str, list[float]] = {name: [] for name in conversions}
    for _ in range(args.repeats):
        for _, _, _, target in conversions.values():
            shutil.rmtree(target, ignore_errors=True)
        for name, value in zip(("cp", "cp_sync"), copy_s(hf, copy), strict=True):
            seconds[name].append(value)
        for name, arguments in conversions.items():
            took, peak = convert(*arguments, layout, hf)
            seconds[name].append(took)
            peaks[name].append(peak)
    return {
        "model": args.model,
        "model_bytes": model.size_bytes,
        "layout": {"tensor": args.tp, "pipeline": args.pp},
        "repeats": args.repeats,
        "seconds": {name: [round(value, 3) for value in sorted(values)] for name, values in seconds.items()},
        "mb_per_s": {name: round(model.size_bytes / 1e6 / statistics.median(v)) for name, v in seconds.items()},
        "speed_over": {
            reference: {name: round(ratio(seconds[reference], seconds[name]), 2) for name in conversions}
            for reference in ("cp", "cp_sync")
        },
        "peak_bytes_above_interpreter": {name: int(max(values)) for name, values in peaks.items()},
        "byte_equal": not list(differences(open_checkpoint(hf), open_checkpoint(back))),
    }


def ratio(reference: list[float], seconds: list[float]) -> float:
    return statistics.median(r / s for r, s in zip(reference, seconds, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="0.5b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mbridge", action="store_true")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        print(json.dumps(measure(args, Path(folder)), indent=2))


if __name__ == "__main__":
    main()
