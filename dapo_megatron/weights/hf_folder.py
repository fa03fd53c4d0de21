"""Model folders in Hugging Face's layout: config.json, safetensors (one file, or shards with an index), tokenizer.

Reading is lazy: a tensor is read when it is asked for. Writing streams: at most one shard is held in memory, and the
folder gets its name only when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

CARRIED_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.jinja",
    "*.tiktoken",
)
"""What a written folder takes over from its source, beside config.json."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class HFFolder:
    """A model folder to read from.

    Attributes:
        path: the folder.
        config: config.json as a dict.

    Raises:
        ValueError: no folder, no config.json, no safetensors, an index that names a missing shard.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is not a folder")
        config = self.path / "config.json"
        if not config.is_file():
            raise ValueError(f"{self.path} has no config.json: it is not a Hugging Face model folder")
        try:
            self.config: dict[str, Any] = json.loads(config.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{config} is not valid JSON: {error}") from error
        self._files: dict[Path, Any] = {}

    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, without reading it."""
        return _DTYPES[self._slice(name).get_dtype()]

    def tensor(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        """Read one tensor, or that part of it alone."""
        return self._slice(name)[part] if part else self._open(self._file_of[name]).get_tensor(name)

    @cached_property
    def _file_of(self) -> dict[str, Path]:
        index = self.path / INDEX_FILE
        if index.is_file():
            files = {name: self.path / shard for name, shard in json.loads(index.read_text())["weight_map"].items()}
            missing = sorted({file.name for file in files.values() if not file.is_file()})
            if missing:
                raise ValueError(f"{index} names shards that are missing: {', '.join(missing)}")
            for file in sorted(set(files.values())):
                absent = sorted(n for n, f in files.items() if f == file and n not in set(self._open(file).keys()))
                if absent:
                    raise ValueError(f"{index} places tensors in {file.name} that are not there: {', '.join(absent)}")
            return files
        single = self.path / SINGLE_FILE
        if not single.is_file():
            raise ValueError(f"{self.path} has neither {SINGLE_FILE} nor {INDEX_FILE}: no weights to load")
        return dict.fromkeys(self._open(single).keys(), single)

    def _open(self, file: Path) -> Any:
        # Imported where it is used: an actor whose weights come from elsewhere needs torch and megatron-core only.
        from safetensors import SafetensorError, safe_open

        if file not in self._files:
            try:
                self._files[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} is truncated or no safetensors file: {error}") from error
        return self._files[file]

    def _slice(self, name: str) -> Any:
        return self._open(self._file_of[name]).get_slice(name)


def write_hf_folder(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], source: HFFolder, shard_bytes: float = 5e9
) -> None:
    """Write a model folder that transformers and vLLM load.

    Args:
        folder: must not exist. Until everything is written the files lie in a hidden sibling.
        tensors: (HF name, full tensor), consumed once; a tensor may be reused by the iterable after the next is drawn.
        source: gives config.json (its dtype updated if another was written), generation config and tokenizer files.
        shard_bytes: largest shard; a single larger tensor gets a shard of its own.

    Raises:
        ValueError: the folder exists.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists: choose another folder or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(f".{folder.name}.incomplete-{os.getpid()}")
    staging.mkdir()
    try:
        dtypes = _write_shards(staging, tensors, shard_bytes)
        _carry_files(staging, source, dtypes)
        staging.rename(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: float) -> set[torch.dtype]:
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    dtypes: set[torch.dtype] = set()
    held_bytes = total_bytes = 0

    def flush() -> None:
        save_file(held, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if held and held_bytes + size > shard_bytes:
            flush()
            held_bytes = 0
        # A copy of its own: the source may reuse its buffer, and safetensors refuses views that share memory.
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        dtypes.add(tensor.dtype)
        held_bytes += size
        total_bytes += size
    flush()

    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE_FILE)
        return dtypes
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return dtypes


def _carry_files(folder: Path, source: HFFolder, dtypes: set[torch.dtype]) -> None:
    for pattern in CARRIED_FILES:
        for file in source.path.glob(pattern):
            if file.is_file() and file.suffix != ".safetensors":
                shutil.copyfile(file, folder / file.name)
    key = "torch_dtype" if "torch_dtype" in source.config else "dtype"
    written = str(next(iter(dtypes))).removeprefix("torch.") if len(dtypes) == 1 else None
    if written is None or source.config.get(key, "float32") == written:
        shutil.copyfile(source.path / "config.json", folder / "config.json")
    else:
        # Loaders take the dtype from the config: a stale one would round the weights.
        (folder / "config.json").write_text(json.dumps(source.config | {key: written}, indent=2) + "\n")
