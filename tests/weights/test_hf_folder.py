from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dapo_megatron.weights.hf_folder import INDEX_FILE, SINGLE_FILE, HFFolder, write_hf_folder

TENSORS = {
    "a.weight": torch.randn(3, 5),
    "b.weight": torch.randn(7).bfloat16(),
    "c.bias": torch.arange(4),
}


def make_folder(path: Path, **config: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["X"], "dtype": "float32"} | config))
    save_file(TENSORS, path / SINGLE_FILE)
    return path


def test_reads_one_file(tmp_path: Path) -> None:
    folder = HFFolder(make_folder(tmp_path / "hf"))
    assert folder.config["architectures"] == ["X"]
    assert set(folder.names()) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert folder.shape(name) == tuple(tensor.shape) and folder.dtype(name) == tensor.dtype
        assert torch.equal(folder.tensor(name), tensor)


@pytest.mark.parametrize(("shard_bytes", "shards"), [(1e9, 1), (70, 2), (80, 2), (1, 3)])
def test_what_is_written_is_read_back(tmp_path: Path, shard_bytes: float, shards: int) -> None:
    source = HFFolder(make_folder(tmp_path / "hf"))
    target = tmp_path / "made" / "copy"
    write_hf_folder(target, TENSORS.items(), source, shard_bytes)
    assert len(list(target.glob("*.safetensors"))) == shards
    assert (target / INDEX_FILE).exists() == (shards > 1)
    copy = HFFolder(target)
    assert set(copy.names()) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert copy.dtype(name) == tensor.dtype and torch.equal(copy.tensor(name), tensor)
    if shards > 1:
        index = json.loads((target / INDEX_FILE).read_text())
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in TENSORS.values())
        assert set(index["weight_map"].values()) == {file.name for file in target.glob("*.safetensors")}


def test_views_and_a_reused_buffer_are_written_right(tmp_path: Path) -> None:
    source = HFFolder(make_folder(tmp_path / "hf"))
    buffer, matrix = torch.zeros(4), torch.arange(6.0).view(2, 3)

    def tensors():
        for value in (1.0, 2.0):
            yield f"t{value}", buffer.fill_(value)
        yield "row", matrix[1]
        yield "transposed", matrix.T

    write_hf_folder(tmp_path / "copy", tensors(), source)
    copy = HFFolder(tmp_path / "copy")
    assert copy.tensor("t1.0").tolist() == [1.0] * 4 and copy.tensor("t2.0").tolist() == [2.0] * 4
    assert torch.equal(copy.tensor("row"), matrix[1]) and torch.equal(copy.tensor("transposed"), matrix.T)


def test_companion_files_are_carried_over_and_weights_are_not(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf")
    carried = ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "merges.txt"]
    carried += ["vocab.json", "special_tokens_map.json", "chat_template.jinja"]
    for name in carried:
        (folder / name).write_text(name)
    (folder / "pytorch_model.bin").write_text("no")
    write_hf_folder(tmp_path / "copy", [("a", torch.zeros(1))], HFFolder(folder))
    written = {file.name for file in (tmp_path / "copy").iterdir()}
    assert written == {*carried, "config.json", SINGLE_FILE}
    assert (tmp_path / "copy" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_config_names_the_dtype_that_was_written(tmp_path: Path, key: str) -> None:
    folder = make_folder(tmp_path / "hf", **{key: "float32"})
    write_hf_folder(tmp_path / "copy", [("a", torch.zeros(1).bfloat16())], HFFolder(folder))
    assert HFFolder(tmp_path / "copy").config[key] == "bfloat16"


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf")
    with pytest.raises(ValueError, match="exists"):
        write_hf_folder(folder, TENSORS.items(), HFFolder(folder))
    assert set(HFFolder(folder).names()) == set(TENSORS)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    source = HFFolder(make_folder(tmp_path / "hf"))

    def tensors():
        yield "a", torch.zeros(100)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_hf_folder(tmp_path / "copy", tensors(), source, shard_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_unusable_folders_say_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing is not a folder"):
        HFFolder(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no config.json"):
        HFFolder(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        HFFolder(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no weights"):
        HFFolder(tmp_path / "empty").names()


def test_a_missing_or_wrong_shard_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf")
    index = {"weight_map": dict.fromkeys(TENSORS, SINGLE_FILE) | {"d": "model-00002-of-00002.safetensors"}}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="missing: model-00002-of-00002.safetensors"):
        HFFolder(folder).names()
    index["weight_map"]["d"] = SINGLE_FILE
    (folder / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"places tensors in {SINGLE_FILE} that are not there: d"):
        HFFolder(folder).names()


@pytest.mark.parametrize("kept_bytes", [0, 5, 100, -4])
def test_a_truncated_file_is_named(tmp_path: Path, kept_bytes: int) -> None:
    folder = make_folder(tmp_path / "hf")
    whole = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(whole[:kept_bytes])
    with pytest.raises(ValueError, match=f"{SINGLE_FILE} is truncated"):
        HFFolder(folder).names()
