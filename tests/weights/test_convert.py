"""Conversions between HF folders and Megatron checkpoints: round trips, names, memory, and what is refused."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from transformers import AutoModelForCausalLM

from dapo_megatron.weights import megatron_writer, staging
from dapo_megatron.weights.block_fp8 import quantised
from dapo_megatron.weights.convert import open_checkpoint, to_hf, to_megatron
from dapo_megatron.weights.hf_folder import INDEX_FILE, SINGLE_FILE, HFFolder
from dapo_megatron.weights.verify import differences
from tests.tiny_models import FAMILIES, VOCAB_SIZE, save, tiny_model

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
CARRIED = {
    "tokenizer.json": '{"model": {}}',
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"eos_token_id": 3}',
}


def no_progress(written: int, total: int) -> None:
    pass


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an HF folder, by safetensors' own reader."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make(family, tied, layers) -> an HF folder; not to be changed."""
    root = tmp_path_factory.mktemp("hf")

    def make(family: str, tied: bool = False, layers: int = 3) -> Path:
        folder = root / f"{family}-{tied}-{layers}"
        if not folder.exists():
            save(tiny_model(family, tied, layers=layers), folder)
            for name, text in CARRIED.items():
                (folder / name).write_text(text)
        return folder

    return make


@pytest.fixture
def source(made: Callable[..., Path], tmp_path: Path) -> Path:
    """An HF folder to break."""
    return Path(shutil.copytree(made("qwen2"), tmp_path / "source"))


@pytest.fixture
def megatron(source: Path, tmp_path: Path) -> Path:
    """A Megatron checkpoint to break, cut for two ranks."""
    to_megatron(source, tmp_path / "megatron", {"tensor": 2}, no_progress)
    return tmp_path / "megatron"


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


def test_tensors_that_do_not_fit_are_all_named(source: Path, tmp_path: Path) -> None:
    changed = tensors(source)
    del changed["model.layers.1.self_attn.k_proj.weight"]
    changed["model.norm.weight"] = torch.zeros(39)
    changed["model.layers.0.mlp.extra.weight"] = torch.zeros(2)
    save_file(changed, source / SINGLE_FILE)
    with pytest.raises(ValueError) as raised:
        to_megatron(source, tmp_path / "megatron", {}, no_progress)
    for line in (
        "missing: model.layers.1.self_attn.k_proj.weight [20, 40]",
        "misshapen: model.norm.weight is [39], expected [40]",
        "surplus: model.layers.0.mlp.extra.weight",
    ):
        assert line in str(raised.value)
    assert not (tmp_path / "megatron").exists()


def test_a_truncated_source_writes_nothing(source: Path, tmp_path: Path) -> None:
    os.truncate(source / SINGLE_FILE, (source / SINGLE_FILE).stat().st_size - 1)
    with pytest.raises(ValueError, match=f"{SINGLE_FILE} is truncated"):
        to_megatron(source, tmp_path / "megatron", {}, no_progress)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_values_that_are_not_finite_are_refused_on_request(source: Path, tmp_path: Path) -> None:
    changed = tensors(source)
    changed["model.layers.2.mlp.up_proj.weight"][3, 4] = torch.nan
    changed["lm_head.weight"][0, 0] = torch.inf
    save_file(changed, source / SINGLE_FILE)
    with pytest.raises(ValueError, match="not finite") as raised:
        to_megatron(source, tmp_path / "megatron", {}, no_progress, refuse_nan=True)
    assert set(str(raised.value).split("\n  ")[1:]) == {"model.layers.2.mlp.up_proj.weight", "lm_head.weight"}
    to_megatron(source, tmp_path / "megatron", {}, no_progress)
    with pytest.raises(ValueError, match="not finite"):
        to_hf(tmp_path / "megatron", tmp_path / "back", no_progress, refuse_nan=True)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"tensor": 4}, "--tp=4 .*\n.*--tp 2"),
        ({"pipeline": 4}, "--pp=4 .*\n.*--pp 2"),
        ({"expert": 2}, "expert"),
        ({"pipeline": 2, "virtual_pipeline": 2}, "virtual"),
        ({"tensor": 0}, "--tp=0: the least is 1"),
    ],
)
def test_an_impossible_layout_is_refused(layout: dict[str, int], says: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        to_megatron(source, tmp_path / "megatron", layout, no_progress)
    assert not (tmp_path / "megatron").exists()


def test_an_unknown_architecture_lists_the_known(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="GPT2LMHeadModel.*known are .*Qwen2ForCausalLM"):
        to_megatron(source, tmp_path / "megatron", {}, no_progress)


def test_what_exists_is_kept_unless_told_and_only_a_checkpoint_is_replaced(source: Path, tmp_path: Path) -> None:
    target, other = tmp_path / "target", tmp_path / "other"
    to_megatron(source, target, {}, no_progress)
    with pytest.raises(ValueError, match="exists"):
        to_hf(target, source, no_progress)
    with pytest.raises(ValueError, match="is or contains the source"):
        to_megatron(source, source, {}, no_progress, overwrite=True)
    with pytest.raises(ValueError, match="is or contains the source"):
        to_megatron(source, tmp_path, {}, no_progress, overwrite=True)
    other.mkdir()
    (other / "thesis.txt").write_text("years")
    with pytest.raises(ValueError, match="neither a checkpoint nor an empty folder"):
        to_megatron(source, other, {}, no_progress, overwrite=True)
    assert (other / "thesis.txt").exists()
    to_megatron(source, target, {"tensor": 2}, no_progress, overwrite=True)
    assert len(list((target / "iter_0000000").glob("__1_*"))) > 0
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target", "other"}


def test_too_little_disk_is_said_first(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000))
    with pytest.raises(ValueError, match=r"no space for .*: it takes 0\.00 GB, and 0\.00 GB are free"):
        to_megatron(source, tmp_path / "megatron", {}, no_progress)


def test_a_disk_that_fills_up_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    append = megatron_writer._append

    def append_until_full(file: Path, values: torch.Tensor) -> tuple[int, int]:
        written.append(file)
        if len(written) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(file, values)

    monkeypatch.setattr(megatron_writer, "_append", append_until_full)
    with pytest.raises(ValueError, match="no space left while writing .*megatron: nothing was kept"):
        to_megatron(source, tmp_path / "megatron", {}, no_progress)
    assert len(written) > 5 and [path.name for path in tmp_path.iterdir()] == ["source"]


KILLED = """
import os, signal, sys
from pathlib import Path
from dapo_megatron.weights.convert import to_hf
to_hf(Path(sys.argv[1]), Path(sys.argv[2]), lambda *_: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_a_killed_conversion_leaves_nothing_that_looks_whole(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "out" / "target"
    killed = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED, source, target])
    assert killed.returncode == -signal.SIGKILL
    (left,) = target.parent.iterdir()
    assert left.name.startswith(".target.incomplete-")
    with pytest.raises(ValueError, match="no config.json"):
        HFFolder(left)
    to_hf(source, target, no_progress)
    assert str(left) in caplog.text and left.exists()
    to_hf(source, target, no_progress, overwrite=True)
    assert list(target.parent.iterdir()) == [target]
    assert_same(tensors(source), tensors(target))


def test_two_writers_of_one_target(source: Path, tmp_path: Path) -> None:
    """One that lives keeps the other out; a later process of the same number does not."""
    other = tmp_path / f".target.incomplete-{os.getppid()}"
    other.mkdir()
    with pytest.raises(ValueError, match=f"process {os.getppid()} is writing"):
        to_hf(source, tmp_path / "target", no_progress)
    os.utime(other, (1, 1))
    to_hf(source, tmp_path / "target", no_progress)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("content", ["evil", "text", "another object"])
def test_metadata_is_never_executed(content: str, megatron: Path, tmp_path: Path) -> None:
    file, trace = megatron / "iter_0000000" / ".metadata", tmp_path / "executed"
    objects = {"evil": pickle.dumps(Evil(trace)), "text": b"no pickle", "another object": pickle.dumps({"a": 1})}
    file.write_bytes(objects[content])
    with pytest.raises(ValueError, match=r"\.metadata is no metadata of a torch_dist checkpoint"):
        to_hf(megatron, tmp_path / "back", no_progress)
    assert not trace.exists()


def test_metadata_of_another_writer_is_read(megatron: Path, source: Path, tmp_path: Path) -> None:
    """torch's own writer notes its path, newer Megatron versions their plans."""
    file = megatron / "iter_0000000" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.storage_meta = StorageMeta(checkpoint_id=tmp_path, save_id="1")
    metadata.all_local_plans = [SavePlan([])]
    file.write_bytes(pickle.dumps(metadata))
    to_hf(megatron, tmp_path / "back", no_progress)
    assert_same(tensors(source), tensors(tmp_path / "back"))


def test_damaged_megatron_files_are_named(megatron: Path, tmp_path: Path) -> None:
    folder = megatron / "iter_0000000"
    file = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    whole = file.read_bytes()

    def says(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            to_hf(megatron, tmp_path / "back", no_progress)
        assert not (tmp_path / "back").exists()

    file.write_bytes(whole[: len(whole) * 2 // 3])
    says(f"truncated: .*{file.name} has .* bytes, expected")
    file.write_bytes(bytes(len(whole)))
    says(f"{file.name} is damaged: at \\d+ lies no tensor")
    file.unlink()
    says(f"missing file: .*{file.name}")
    file.write_bytes(whole)

    metadata = pickle.loads((folder / ".metadata").read_bytes())
    key = "decoder.layers.mlp.linear_fc2.weight"
    one = next(index for index in metadata.storage_data if index.fqn == key and index.offset[0] == 1)
    del metadata.storage_data[one]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    says(rf"incomplete: {key} \[3, 40, 56\] at \[1\]")
    del metadata.state_dict_metadata[key]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    says(rf"missing: {key} \[3, 40, 56\] at \[0\]")

    (megatron / "latest_checkpointed_iteration.txt").write_text("7")
    says("names iter_0000007, which has no .metadata")


def test_a_checkpoint_without_a_config_takes_one(megatron: Path, source: Path, tmp_path: Path) -> None:
    shutil.rmtree(megatron / "iter_0000000" / "hf")
    with pytest.raises(ValueError, match="--hf-config"):
        to_hf(megatron, tmp_path / "back", no_progress)
    to_hf(megatron / "iter_0000000", tmp_path / "back", no_progress, hf_config=source)
    assert_same(tensors(source), tensors(tmp_path / "back"))
