"""What conversion refuses, and what is left when it is stopped."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from dapo_megatron.weights import megatron_writer, staging
from dapo_megatron.weights.convert import to_hf, to_megatron
from dapo_megatron.weights.hf_folder import SINGLE_FILE, HFFolder
from tests.weights.conftest import assert_same, no_progress, tensors


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
