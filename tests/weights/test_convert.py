"""Conversions between HF folders and Megatron checkpoints: round trips, names, memory."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from dapo_megatron.weights.block_fp8 import quantised
from dapo_megatron.weights.convert import open_checkpoint, to_hf, to_megatron
from dapo_megatron.weights.hf_folder import INDEX_FILE, SINGLE_FILE
from dapo_megatron.weights.verify import differences
from tests.tiny_models import FAMILIES, VOCAB_SIZE
from tests.weights.conftest import CARRIED, assert_same, no_progress, tensors

WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "moonlight")
# Three key-value heads go to three ranks, two to two; three layers are uneven on two stages.
TENSOR = {family: 3 if family in ("llama", "llama2") else 2 for family in FAMILIES}
LAYOUTS: dict[str, dict[str, int]] = {
    "tp": {"tensor": 0},
    "pp": {"pipeline": 2},
    "tp x pp": {"tensor": 0, "pipeline": 2},
    "pp x vpp": {"pipeline": 2, "virtual_pipeline": 2},
    "ep": {"expert": 2},
    "tp x ep": {"tensor": 0, "expert": 4},
}
CASES = [
    (family, layout)
    for family in FAMILIES
    for layout, sizes in LAYOUTS.items()
    if "expert" not in sizes or family in WITH_EXPERTS
]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_round_trip_changes_no_byte(family: str, layout: str, made: Callable[..., Path], tmp_path: Path) -> None:
    sizes = {name: size or TENSOR[family] for name, size in LAYOUTS[layout].items()}
    source = made(family, layers=4 if "virtual_pipeline" in sizes else 3)
    to_megatron(source, tmp_path / "megatron", sizes, no_progress)
    to_hf(tmp_path / "megatron", tmp_path / "back", no_progress)
    assert_same(tensors(source), tensors(tmp_path / "back"))
    for name in ("config.json", *CARRIED):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    files = {path.name for path in (tmp_path / "megatron" / "iter_0000000").glob("__*_*.distcp")}
    ranks = {int(name.split("_")[2]) for name in files}
    assert ranks == set(range(sizes.get("pipeline", 1) * math.lcm(sizes.get("tensor", 1), sizes.get("expert", 1))))


@pytest.mark.parametrize(
    ("family", "tied"), [("qwen2", True), ("llama31", False), ("qwen3_moe", False), ("moonlight", False)]
)
def test_transformers_loads_what_came_back(family: str, tied: bool, made: Callable[..., Path], tmp_path: Path) -> None:
    source, back = made(family, tied), tmp_path / "back"
    to_megatron(source, tmp_path / "megatron", {"tensor": 2, "pipeline": 2}, no_progress)
    to_hf(tmp_path / "megatron", back, no_progress, shard_bytes=30_000)
    index = json.loads((back / INDEX_FILE).read_text())
    assert set(index["weight_map"].values()) == {file.name for file in back.glob("*.safetensors")}
    assert len(index["weight_map"]) == len(tensors(source)) and len(set(index["weight_map"].values())) > 2
    tokens = torch.arange(12)[None] % VOCAB_SIZE
    logits = [AutoModelForCausalLM.from_pretrained(folder)(tokens).logits for folder in (source, back)]
    assert torch.equal(*logits)


def test_a_tied_output_weight_may_be_stored(made: Callable[..., Path], tmp_path: Path) -> None:
    with_copy = Path(shutil.copytree(made("qwen2", tied=True), tmp_path / "with_copy"))
    stored = tensors(with_copy)
    assert "lm_head.weight" not in stored
    save_file(stored | {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}, with_copy / SINGLE_FILE)
    to_megatron(with_copy, tmp_path / "megatron", {}, no_progress)
    to_hf(tmp_path / "megatron", tmp_path / "back", no_progress)
    assert_same(stored, tensors(tmp_path / "back"))
    assert not list(differences(open_checkpoint(with_copy), open_checkpoint(tmp_path / "back")))

    save_file(stored | {"lm_head.weight": stored["model.embed_tokens.weight"] + 1}, with_copy / SINGLE_FILE)
    with pytest.raises(ValueError, match="untied: .*lm_head.weight.*model.embed_tokens.weight"):
        to_megatron(with_copy, tmp_path / "second", {}, no_progress)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_another_dtype(family: str, made: Callable[..., Path], tmp_path: Path) -> None:
    source = made(family)
    to_megatron(source, tmp_path / "megatron", {"tensor": 2}, no_progress, torch.bfloat16)
    to_hf(tmp_path / "megatron", tmp_path / "back", no_progress)
    kept = "e_score_correction_bias"  # float32 in every checkpoint
    assert_same(
        {name: tensor if name.endswith(kept) else tensor.bfloat16() for name, tensor in tensors(source).items()},
        tensors(tmp_path / "back"),
    )
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}


def test_block_wise_fp8_is_read_as_bfloat16(made: Callable[..., Path], tmp_path: Path) -> None:
    """What comes back is values x scales, under a config that no longer speaks of FP8."""
    source = Path(shutil.copytree(made("deepseek_v3"), tmp_path / "source"))
    stored = dict(quantised(tensors(source).items()))
    save_file(stored, source / SINGLE_FILE)
    config = json.loads((source / "config.json").read_text())
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (source / "config.json").write_text(json.dumps(config | fp8))
    to_megatron(source, tmp_path / "megatron", {"tensor": 2}, no_progress)
    to_hf(tmp_path / "megatron", tmp_path / "back", no_progress)

    def values(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if f"{name}_scale_inv" not in stored:
            return tensor
        scales = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (tensor.float() * scales[: tensor.shape[0], : tensor.shape[1]]).bfloat16()

    assert any(scales.shape == (2, 1) for name, scales in stored.items() if name.endswith("_scale_inv"))
    expected = {name: values(name, tensor) for name, tensor in stored.items() if not name.endswith("_scale_inv")}
    assert_same(expected, tensors(tmp_path / "back"))
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config | {"dtype": "bfloat16"}

    scaled = next(name for name in stored if name.endswith("_scale_inv"))
    save_file(stored | {scaled: torch.ones(3, 3)}, source / SINGLE_FILE)
    with pytest.raises(ValueError, match=rf"is FP8, and is read if .*found: {scaled} \[3, 3\]"):
        to_megatron(source, tmp_path / "second", {}, no_progress)


LAYERS_OF_DENSE = {
    "self_attention.linear_qkv.layer_norm_weight": [40],
    "self_attention.linear_qkv.weight": [100, 40],
    "self_attention.q_layernorm.weight": [10],
    "self_attention.k_layernorm.weight": [10],
    "self_attention.linear_proj.weight": [40, 60],
    "mlp.linear_fc1.layer_norm_weight": [40],
    "mlp.linear_fc1.weight": [112, 40],
    "mlp.linear_fc2.weight": [40, 56],
}
OUTSIDE = {
    "embedding.word_embeddings.weight": [38, 40],
    "decoder.final_layernorm.weight": [40],
    "output_layer.weight": [38, 40],
}
EXPERTS = {
    "pre_mlp_layernorm.weight": [40],
    "mlp.router.weight": [8, 40],
    "mlp.experts.experts.linear_fc1.weight": [8, 56, 40],
    "mlp.experts.experts.linear_fc2.weight": [8, 40, 28],
}
LATENT = {
    "input_layernorm.weight": [40],
    "self_attention.linear_q_down_proj.weight": [18, 40],
    "self_attention.linear_q_up_proj.layer_norm_weight": [18],
    "self_attention.linear_q_up_proj.weight": [108, 18],
    "self_attention.linear_kv_down_proj.weight": [30, 40],
    "self_attention.linear_kv_up_proj.layer_norm_weight": [22],
    "self_attention.linear_kv_up_proj.weight": [132, 22],
    "self_attention.linear_proj.weight": [40, 72],
}
# As Transformer Engine's layer spec names them: layers of a dense model lie stacked, of one with experts apart.
NAMES: dict[str, dict[str, list[int]]] = {
    "qwen3": OUTSIDE | {f"decoder.layers.{name}": [3, *shape] for name, shape in LAYERS_OF_DENSE.items()},
    "qwen3_moe": OUTSIDE
    | {
        f"decoder.layers.{layer}.{name}": shape
        for layer in range(3)
        for name, shape in (LAYERS_OF_DENSE | EXPERTS).items()
        if not name.startswith("mlp.linear_fc")
    },
    "deepseek_v3": OUTSIDE
    | {
        f"decoder.layers.{layer}.{name}": shape
        for layer in range(3)
        for name, shape in (
            LATENT
            | (
                {name: shape for name, shape in LAYERS_OF_DENSE.items() if name.startswith("mlp.linear_fc")}
                if layer == 0
                else EXPERTS
                | {
                    "mlp.router.expert_bias": [8],
                    "mlp.shared_experts.linear_fc1.weight": [56, 40],
                    "mlp.shared_experts.linear_fc2.weight": [40, 28],
                }
            )
        ).items()
    },
}


@pytest.mark.parametrize("family", NAMES)
def test_the_folder_is_what_megatron_loads(family: str, made: Callable[..., Path], tmp_path: Path) -> None:
    to_megatron(made(family), tmp_path / "megatron", {"tensor": 2}, no_progress)
    folder = tmp_path / "megatron" / "iter_0000000"
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "0"
    assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert {path.name for path in folder.iterdir()} > {".metadata", "common.pt", "run_config.yaml", "hf"}
    common = torch.load(folder / "common.pt", weights_only=True)
    assert common["iteration"] == 0 and not common["content_metadata"]["singleton_local_shards"]

    metadata = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    shapes = {name: list(entry.size) for name, entry in metadata.items() if hasattr(entry, "size")}
    assert {name: shapes.get(name) for name in NAMES[family]} == NAMES[family]
    # What is there beside are the norms under the names of the local spec.
    assert all(name.endswith(("norm.weight", "layer_norm_weight")) for name in shapes.keys() - NAMES[family].keys())
    # Transformer Engine's modules each look for a state of theirs.
    for name in NAMES[family]:
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module not in ("embedding.word_embeddings", "output_layer") and "router" not in module:
            stacked = ".layers." in module and family == "qwen3"
            places = "2_3" if stacked else "7_8" if ".experts." in module else "0_1"
            assert f"{module}._extra_state/shard_{places}" in metadata
    prefix, place = ("decoder.layers", "2_3") if family == "qwen3" else ("decoder.layers.2", "0_1")
    assert f"{prefix}.self_attention.core_attention._extra_state/shard_{place}" in metadata


CONVERSION = """
import json, sys
from pathlib import Path
import torch.distributed.checkpoint
from dapo_megatron.weights import convert

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

source, megatron, back = map(Path, sys.argv[1:])
before = peak = anonymous_bytes()
def watch(*_):
    global peak
    peak = max(peak, anonymous_bytes())
convert.to_megatron(source, megatron, {"tensor": 2}, watch)
convert.to_hf(megatron, back, watch)
print(peak - before)
"""


def test_memory_is_bounded_by_a_few_tensors(made: Callable[..., Path], tmp_path: Path) -> None:
    """A model of 436 MB, whose largest tensor has 12 MB, takes less than 110 MB."""
    source = tmp_path / "source"
    source.mkdir()
    sizes = {"hidden_size": 1024, "intermediate_size": 6144, "num_hidden_layers": 10, "vocab_size": 2048}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "dtype": "bfloat16"}
    config = json.loads((made("llama") / "config.json").read_text()) | sizes
    (source / "config.json").write_text(json.dumps(config))
    layer = {"self_attn.q_proj": [1024, 1024], "self_attn.k_proj": [512, 1024], "self_attn.v_proj": [512, 1024]}
    layer |= {"self_attn.o_proj": [1024, 1024], "mlp.gate_proj": [6144, 1024], "mlp.up_proj": [6144, 1024]}
    layer |= {"mlp.down_proj": [1024, 6144], "input_layernorm": [1024], "post_attention_layernorm": [1024]}
    shapes = {"model.embed_tokens.weight": [2048, 1024], "lm_head.weight": [2048, 1024], "model.norm.weight": [1024]}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(10) for name, shape in layer.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (source / SINGLE_FILE).open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)  # zeros that take no disk
    assert end > 430e6
    command = [sys.executable, "-W", "ignore", "-c", CONVERSION, source, tmp_path / "megatron", tmp_path / "back"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert 0 <= int(done.stdout) < 110e6
    assert (tmp_path / "back" / SINGLE_FILE).stat().st_size > end
