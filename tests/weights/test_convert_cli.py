"""dapo-megatron convert, and the programs in tools/: what they print, their exit codes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from dapo_megatron.cli import app
from dapo_megatron.weights.hf_folder import INDEX_FILE, SINGLE_FILE
from tests.conftest import PROJECT_ROOT
from tests.tiny_models import VOCAB_SIZE, save, tiny_model

TOOLS = PROJECT_ROOT / "tools" / "checkpoint_convert"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    save(tiny_model("qwen3", layers=4), folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def change_one_value(folder: Path, by: float) -> None:
    stored = load_file(folder / SINGLE_FILE)
    stored["model.layers.2.mlp.down_proj.weight"][3, 5] += by
    save_file(stored, folder / SINGLE_FILE)


def test_there_and_back_and_compared(source: Path, tmp_path: Path) -> None:
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    done = run("hf-to-megatron", source, megatron, "--tp", 2, "--pp", 2, "--vpp", 2)
    assert done.exit_code == 0, done.output
    assert "MB/s" in done.stdout
    done = run("megatron-to-hf", megatron, back, "--shard-gb", 0.00005)
    assert done.exit_code == 0, done.output
    assert (back / INDEX_FILE).is_file()
    for pair in ((source, back), (source, megatron), (megatron, back)):
        done = run("verify", *pair, "--logits", "w3 w1 w4 w1 w5 w9")
        assert done.exit_code == 0, done.output
        assert "all 47 tensors are equal" in done.stdout and "max difference 0 at" in done.stdout


def test_differences_are_placed(source: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(source, tmp_path / "other"))
    change_one_value(other, 0.5)
    text = tmp_path / "text.txt"
    text.write_text("w3 w1 w4")
    done = run("verify", source, other, "--logits", text)
    assert done.exit_code == 1
    first, last, logits = done.stdout.splitlines()
    assert first.startswith("model.layers.2.mlp.down_proj.weight: max difference 0.5 at [3, 5] (")
    assert last == "1 tensors differ"
    assert logits.startswith("logits: max difference ") and "of 3 positions" in logits

    stored = load_file(other / SINGLE_FILE)
    stored["model.norm.weight"] = stored["model.norm.weight"].double()
    stored["model.layers.0.self_attn.q_norm.weight"] = stored["model.layers.0.self_attn.q_norm.weight"][:-1].clone()
    del stored["model.layers.1.input_layernorm.weight"]
    save_file(stored, other / SINGLE_FILE)
    done = run("verify", other, source)
    assert done.exit_code == 1
    for line in (
        "model.norm.weight: dtype torch.float64 and torch.float32, values equal",
        "model.layers.0.self_attn.q_norm.weight: shape [9] and [10]",
        f"model.layers.1.input_layernorm.weight: only in {source}",
        "4 tensors differ",
    ):
        assert line in done.stdout.splitlines()


def test_nan_is_a_difference(source: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(source, tmp_path / "other"))
    change_one_value(other, float("nan"))
    done = run("verify", source, other)
    assert done.exit_code == 1 and "max difference inf at [3, 5]" in done.stdout


def test_dtype_and_overwrite(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "megatron"
    assert run("hf-to-megatron", source, target, "--dtype", "bfloat16").exit_code == 0
    done = run("hf-to-megatron", source, target)
    assert done.exit_code == 2 and f"error: {target} exists" in done.stderr
    assert run("hf-to-megatron", source, target, "--overwrite").exit_code == 0
    assert run("verify", source, target).exit_code == 0


def test_a_users_mistake_is_one_line(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "megatron"
    change_one_value(source, float("inf"))
    mistakes = {
        ("hf-to-megatron", source, target, "--dtype", "int8"): "allowed are bfloat16, float16, float32",
        ("hf-to-megatron", source, target, "--refuse-nan"): "model.layers.2.mlp.down_proj.weight",
        ("hf-to-megatron", source, target, "--pp", 5): "--pp=5",
        ("hf-to-megatron", source / "nothing", target): "is not a folder",
        ("megatron-to-hf", tmp_path, target): "no config.json",
        ("verify", source, tmp_path): "no config.json",
    }
    for arguments, says in mistakes.items():
        done = run(*arguments)
        assert done.exit_code == 2 and done.stderr.startswith("error: ") and says in done.stderr, arguments
        assert "Traceback" not in done.output and not target.exists()


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("hf_to_megatron", "--tp --pp --vpp --ep --dtype --overwrite --refuse-nan --hf-config"),
        ("megatron_to_hf", "--dtype --overwrite --refuse-nan --hf-config --shard-gb"),
        ("verify", "--logits --hf-config"),
    ],
)
def test_the_programs_run_from_a_clone(program: str, options: str, tmp_path: Path) -> None:
    """From anywhere."""
    command = [sys.executable, "-P", TOOLS / f"{program}.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    assert all(option in done.stdout for option in options.split())


def test_a_program_is_the_command(source: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(source, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    change_one_value(other, 1.0)
    done = subprocess.run([sys.executable, TOOLS / "verify.py", source, other], capture_output=True, text=True)
    assert done.returncode == 1 and "1 tensors differ" in done.stdout
