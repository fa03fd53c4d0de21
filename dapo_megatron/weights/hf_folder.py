"""Model folders in Hugging Face's layout: config.json, safetensors (one file, or shards with an index), tokenizer.

Reading is lazy: a tensor lies in its file until it is used. Writing streams: no more than the tensor at hand is held in
memory, and the folder gets its name only when it is complete.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dapo_megatron.weights.block_fp8 import BLOCK, SCALES, dequantise_blocks, scales_of
from dapo_megatron.weights.mapped_files import MappedFiles, WriteThrough
from dapo_megatron.weights.staging import staged_folder

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

_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# Of a shard, so that the tensors' bytes can be written before all names are known.
_LARGEST_HEADER_BYTES = 1024 * 1024
_HEADER_ENTRY_BYTES = 160


class Checkpoint(Protocol):
    """Weights under HF names, whatever the files look like.

    Attributes:
        path: what the user named.
        config: config.json as a dict.
        config_folder: the folder with config.json, generation config and tokenizer.
    """

    path: Path
    config: Mapping[str, Any]

    @property
    def config_folder(self) -> Path: ...

    def names(self) -> list[str]:
        """The names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, without reading it."""
        ...

    def tensor(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        """Read one tensor, or that part of it alone."""
        ...


@dataclass(frozen=True)
class _Place:
    """Where in which file a tensor lies."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class HFFolder:
    """A model folder to read from; a `Checkpoint`. Weights in block-wise FP8 (see block_fp8.py) are read as bfloat16.

    Raises:
        ValueError: no folder, no config.json, no safetensors, an index that names a missing shard, a truncated file,
            FP8 of another kind.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        config = read_config(self.path)
        quantised = (config.get("quantization_config") or {}).get("quant_method") == "fp8"
        self.config: Mapping[str, Any] = {
            key: value for key, value in config.items() if not quantised or key != "quantization_config"
        }
        self._files = MappedFiles()

    @property
    def config_folder(self) -> Path:
        return self.path

    def names(self) -> list[str]:
        scales = {f"{name}{SCALES}" for name in self._quantised}
        return [name for name in self._places if name not in scales]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16 if name in self._quantised else self._places[name].dtype

    def tensor(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        if name in self._quantised:
            return dequantise_blocks(self._stored(name), self._stored(f"{name}{SCALES}"))[part]
        return self._stored(name, part)

    def _stored(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        place = self._places[name]
        if not part:
            return self._files.tensor(place.file, place.offset, place.dtype, place.shape)
        # Rows lie together: others are not touched.
        start, stop, _ = part[0].indices(place.shape[0])
        offset = place.offset + start * math.prod(place.shape[1:]) * place.dtype.itemsize
        rows = self._files.tensor(place.file, offset, place.dtype, (stop - start, *place.shape[1:]))
        return rows[(slice(None), *part[1:])]

    @cached_property
    def _quantised(self) -> set[str]:
        """The tensors that are FP8 values."""
        names = {name for name, place in self._places.items() if place.dtype == torch.float8_e4m3fn}
        for name in names:
            shape, scales = self._places[name].shape, self._places.get(f"{name}{SCALES}")
            expected = scales_of(shape)
            if scales is None or scales.shape != expected or len(shape) != 2:
                found = "none" if scales is None else f"{name}{SCALES} {list(scales.shape)}"
                raise ValueError(
                    f"{self.path}: {name} {list(shape)} is FP8, and is read if {list(expected)} scales, one for each "
                    f"block of {BLOCK} x {BLOCK}, lie beside it; found: {found}"
                )
        return names

    @cached_property
    def _places(self) -> dict[str, _Place]:
        index = self.path / INDEX_FILE
        if not index.is_file():
            single = self.path / SINGLE_FILE
            if not single.is_file():
                raise ValueError(f"{self.path} has neither {SINGLE_FILE} nor {INDEX_FILE}: no weights to load")
            return _read_header(single)
        try:
            shard_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index} is no index of safetensors: {error!r}") from error
        shards = sorted(set(shard_of.values()))
        missing = [shard for shard in shards if not (self.path / shard).is_file()]
        if missing:
            raise ValueError(f"{index} names shards that are missing: {', '.join(missing)}")
        headers = {shard: _read_header(self.path / shard) for shard in shards}
        for shard, header in headers.items():
            absent = sorted(name for name, file in shard_of.items() if file == shard and name not in header)
            if absent:
                raise ValueError(f"{index} places tensors in {shard} that are not there: {', '.join(absent)}")
        return {name: headers[shard][name] for name, shard in shard_of.items()}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder.

    Raises:
        ValueError: no folder, no or a broken config.json.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    try:
        return json.loads(config.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{config} is not valid JSON: {error}") from error


def _read_header(file: Path) -> dict[str, _Place]:
    """What a safetensors file holds, by name; checks that it holds all of that."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if 8 + length > file.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        places = {
            name: _Place(file, 8 + length + entry["data_offsets"][0], _DTYPES[entry["dtype"]], tuple(entry["shape"]))
            for name, entry in header.items()
        }
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if end != file.stat().st_size:
            raise ValueError(f"it has {file.stat().st_size} bytes, and its header speaks of {end}")
        for name, place in places.items():
            start, stop = header[name]["data_offsets"]
            if stop - start != math.prod(place.shape) * place.dtype.itemsize:
                raise ValueError(f"{name} {list(place.shape)} does not fit its {stop - start} bytes")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is truncated or no safetensors file: {error}") from error
    return places


def write_hf_folder(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    source: Checkpoint,
    shard_bytes: float = 5e9,
    overwrite: bool = False,
    needed_bytes: int = 0,
) -> None:
    """Write a model folder that transformers and vLLM load.

    Args:
        folder: must not exist, or be a checkpoint to overwrite (see staging.py).
        tensors: (HF name, full tensor), consumed once; a tensor may be reused by the iterable after the next is drawn.
        source: gives config.json (its dtype updated if another was written), generation config and tokenizer files.
        shard_bytes: largest shard; a single larger tensor gets a shard of its own.

    Raises:
        ValueError: the folder exists, or the disk is full.
    """
    with staged_folder(Path(folder), overwrite, needed_bytes) as staging:
        expected = 8 + sum(len(name) + _HEADER_ENTRY_BYTES for name in ("__metadata__", *source.names()))
        header_bytes = min(-(-expected // 4096) * 4096, _LARGEST_HEADER_BYTES)
        dtype = _write_shards(staging, tensors, shard_bytes, header_bytes)
        carry_model_files(source, staging, dtype)


class _Shard:
    """A safetensors file that is written tensor by tensor; the header comes last, into room that was left for it."""

    def __init__(self, file: Path, header_bytes: int) -> None:
        self._stream = file.open("wb")
        self._header_bytes = header_bytes
        self._entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._stream.seek(header_bytes)
        self.size_bytes = 0

    @property
    def names(self) -> list[str]:
        return list(self._entries)[1:]

    def has_room(self, name: str, size: int, shard_bytes: float) -> bool:
        """Whether another tensor fits; the first one always does."""
        used = sum(len(other) + _HEADER_ENTRY_BYTES for other in self._entries) + len(name) + _HEADER_ENTRY_BYTES
        return not self.names or (used <= self._header_bytes - 8 and self.size_bytes + size <= shard_bytes)

    def append(self, name: str, tensor: Tensor) -> None:
        values = tensor.detach().cpu().contiguous()
        end = self.size_bytes + values.nbytes
        self._entries[name] = {
            "dtype": _NAMES[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [self.size_bytes, end],
        }
        WriteThrough(self._stream).write(memoryview(values.flatten().view(torch.uint8).numpy()))
        self.size_bytes = end

    def close(self) -> None:
        header = json.dumps(self._entries, separators=(",", ":")).encode()
        length = self._header_bytes - 8
        assert len(header) <= length
        self._stream.seek(0)
        self._stream.write(length.to_bytes(8, "little") + header.ljust(length))
        self._stream.close()


def _write_shards(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: float, header_bytes: int
) -> torch.dtype | None:
    """Returns the dtype that most of the bytes have."""
    shards = [_Shard(folder / "shard-0", header_bytes)]
    dtype_bytes: Counter[torch.dtype] = Counter()
    for name, tensor in tensors:
        if not shards[-1].has_room(name, tensor.nbytes, shard_bytes):
            shards[-1].close()
            shards.append(_Shard(folder / f"shard-{len(shards)}", header_bytes))
        shards[-1].append(name, tensor)
        dtype_bytes[tensor.dtype] += tensor.nbytes
    shards[-1].close()
    dtype = max(dtype_bytes, key=dtype_bytes.__getitem__, default=None)

    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE_FILE)
        return dtype
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(shard.names, file)
    index = {"metadata": {"total_size": sum(shard.size_bytes for shard in shards)}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return dtype


def carry_model_files(source: Checkpoint, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Copy what belongs to a model beside its weights: config.json, generation config and tokenizer.

    Args:
        dtype: what the config is to name; None keeps its own.
    """
    for pattern in ("config.json", *CARRIED_FILES):
        for file in source.config_folder.glob(pattern):
            if file.is_file() and file.suffix != ".safetensors":
                shutil.copyfile(file, folder / file.name)
    config = dict(source.config)
    key, written = "torch_dtype" if "torch_dtype" in config else "dtype", str(dtype).removeprefix("torch.")
    if dtype is not None and config.get(key, "float32") != written:
        # Loaders take the dtype from the config: a stale one would round the weights.
        config[key] = written
    if config != read_config(source.config_folder):
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
