"""Megatron's distributed checkpoints ("torch_dist"), read one tensor at a time, without building the model.

They are torch.distributed.checkpoint's: `.metadata`, a pickle, says where in which file each block of each global
tensor lies; a block is what torch.save writes. Layers may lie stacked in one tensor or apart, norms under Transformer
Engine's names or the local spec's.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.models.registry import family_of
from dapo_megatron.models.split import FusedGLU
from dapo_megatron.weights.hf_folder import read_config
from dapo_megatron.weights.mapped_files import MappedFiles
from dapo_megatron.weights.megatron_names import StoredModel, StoredTensor

TRACKER_FILE = "latest_checkpointed_iteration.txt"
METADATA_FILE = ".metadata"
CARRIED_FOLDER = "hf"
"""In an iteration's folder: config.json, generation config and tokenizer of the HF model."""

_STATE_PREFIXES = ("optimizer.", "rng_state", "rerun_state")

_DCP = "torch.distributed.checkpoint"
_PICKLED = {
    "collections": ("OrderedDict", "defaultdict"),
    "pathlib": ("PosixPath",),
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    f"{_DCP}.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    f"{_DCP}.filesystem": ("_StorageInfo",),
    f"{_DCP}.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
}
# Plans of older Megatron versions, which loading does not need.
_BLANK = ("MCoreMetadata", "MCoreSavePlan")


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes that `.metadata` consists of, and refuses all others: a pickle can run anything."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.removesuffix("._local")  # of pathlib, from Python 3.13 on
        if name in _PICKLED.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name), torch.dtype)):
            return super().find_class(module, name)
        if module.startswith("megatron.core.dist_checkpointing.") and name in _BLANK:
            return type(name, (), {})
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


@dataclass(frozen=True)
class _Block:
    """A block of a global tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    length: int


def iteration_folder(path: Path) -> Path | None:
    """The folder with `.metadata`, of a checkpoint's root or of one iteration; None if it is no Megatron checkpoint.

    Raises:
        ValueError: the root names an iteration that is not there.
    """
    if (path / METADATA_FILE).is_file():
        return path
    tracker = path / TRACKER_FILE
    if not tracker.is_file():
        return None
    latest = tracker.read_text().strip()
    folder = path / (f"iter_{int(latest):07d}" if latest.isdigit() else latest)
    if not (folder / METADATA_FILE).is_file():
        raise ValueError(f"{tracker} names {folder.name}, which has no {METADATA_FILE}")
    return folder


class MegatronCheckpoint:
    """The model in a Megatron checkpoint under HF names; a `Checkpoint`.

    Args:
        path: the root, whose tracker file names the iteration, or the folder of one iteration.
        hf_config: folder with config.json (and tokenizer files), for a checkpoint that does not carry one.

    Raises:
        ValueError: no checkpoint, a metadata file that is none, no config, an unknown architecture, or tensors that do
            not fit the config.
    """

    def __init__(self, path: str | Path, hf_config: Path | None = None) -> None:
        self.path = Path(path)
        folder = iteration_folder(self.path)
        if folder is None:
            raise ValueError(f"{path} has neither {TRACKER_FILE} nor {METADATA_FILE}: it is no Megatron checkpoint")
        self.config_folder = hf_config or folder / CARRIED_FOLDER
        if not self.config_folder.is_dir():
            raise ValueError(f"{folder} carries no HF config: name a folder that has one with --hf-config")
        self.config: Mapping[str, Any] = read_config(self.config_folder)
        self.family = family_of(self.config)
        self.dimensions = self.family.dimensions(self.config)
        self._folder = folder
        self._metadata = _read_metadata(folder / METADATA_FILE)
        self._files = MappedFiles()
        self._last: tuple[StoredTensor, list[Tensor]] | None = None
        self._check()

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        tensor, index = self._tensors[name]
        return tensor.hf_shapes[index]

    def dtype(self, name: str) -> torch.dtype:
        return self._metadata.state_dict_metadata[self._key(self._tensors[name][0])].properties.dtype

    def tensor(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        tensor, index = self._tensors[name]
        if isinstance(tensor.mapping.split, FusedGLU):
            rows = tensor.shape[0] // len(tensor.hf_shapes)
            return self._read(tensor, index * rows, (index + 1) * rows)[part]
        last = self._last
        if last is None or last[0] is not tensor:
            whole = self._read(tensor, 0, tensor.shape[0])
            last = (tensor, tensor.mapping.split.unfuse(whole, self.dimensions))
            # Of a fused tensor the next one is asked for soon.
            self._last = last if len(last[1]) > 1 else None
        return last[1][index][part]

    @cached_property
    def _tensors(self) -> dict[str, tuple[StoredTensor, int]]:
        """HF name -> the Megatron tensor that it is part of, and which part."""
        apart = any(re.match(r"decoder\.layers\.\d", key) for key in self._metadata.state_dict_metadata)
        model = StoredModel(self.family, self.dimensions, stacked=not apart)
        return {name: (tensor, i) for tensor in model.tensors for i, name in enumerate(tensor.mapping.hf)}

    def _key(self, tensor: StoredTensor) -> str:
        return next((key for key in tensor.keys if key in self._blocks), tensor.keys[0])

    @cached_property
    def _blocks(self) -> dict[str, dict[tuple[int, ...], list[_Block]]]:
        """Global name -> place in the leading dimensions -> its blocks; () for all places that a block spans."""
        leading = {key: len(tensor.leading) for tensor, _ in self._tensors.values() for key in tensor.keys}
        sizes = {
            (key, tuple(chunk.offsets)): tuple(chunk.sizes)
            for key, entry in self._metadata.state_dict_metadata.items()
            for chunk in getattr(entry, "chunks", ())
        }
        found: dict[str, dict[tuple[int, ...], list[_Block]]] = {}
        for index, info in self._metadata.storage_data.items():
            offsets = tuple(index.offset or ())
            if index.fqn not in leading or (index.fqn, offsets) not in sizes:
                continue
            size = sizes[index.fqn, offsets]
            block = _Block(offsets, size, self._folder / info.relative_path, info.offset, info.length)
            axes = range(leading[index.fqn])
            for place in product(*(range(offsets[i], offsets[i] + size[i]) for i in axes)):
                found.setdefault(index.fqn, {}).setdefault(place, []).append(block)
        return found

    def _check(self) -> None:
        problems = []
        known = {key for tensor, _ in self._tensors.values() for key in tensor.keys}
        for tensor in {id(tensor): tensor for tensor, _ in self._tensors.values()}.values():
            key = self._key(tensor)
            shape, depth = (*tensor.leading, *tensor.shape), len(tensor.place)
            where = f" at {list(tensor.place)}" if tensor.place else ""
            entry = self._metadata.state_dict_metadata.get(key)
            blocks = self._blocks.get(key, {}).get(tensor.place)
            if entry is None or not blocks:
                problems.append(f"missing: {key} {list(shape)}{where}")
            elif not self._fits(tensor, tuple(entry.size)):
                problems.append(f"misshapen: {key} is {list(entry.size)}, expected {list(shape)}")
            elif sum(math.prod(block.sizes[depth:]) for block in blocks) < math.prod(entry.size[depth:]):
                problems.append(f"incomplete: {key} {list(shape)}{where}: blocks of it are missing")
        problems += [f"surplus: {key}" for key in self._surplus(known)]
        ends: dict[Path, int] = {}
        for block in (block for places in self._blocks.values() for blocks in places.values() for block in blocks):
            ends[block.file] = max(ends.get(block.file, 0), block.start + block.length)
        for file, end in sorted(ends.items()):
            if not file.is_file():
                problems.append(f"missing file: {file}")
            elif file.stat().st_size < end:
                problems.append(f"truncated: {file} has {file.stat().st_size} bytes, expected {end}")
        if problems:
            raise ValueError(f"{self._folder} does not fit its config:\n  " + "\n  ".join(dict.fromkeys(problems)))

    def _surplus(self, known: set[str]) -> Iterator[str]:
        for key, entry in self._metadata.state_dict_metadata.items():
            if hasattr(entry, "chunks") and key not in known and not key.startswith(_STATE_PREFIXES):
                yield f"{key} {list(entry.size)}"

    def _fits(self, tensor: StoredTensor, found: tuple[int, ...]) -> bool:
        wanted = (*tensor.leading, *tensor.shape)
        if tensor.shape[0] == self.dimensions.vocab_size and len(found) == len(wanted):
            # Padded to whatever multiple the writer liked.
            return found[0] >= wanted[0] and found[1:] == wanted[1:]
        return found == wanted

    def _read(self, tensor: StoredTensor, start: int, stop: int) -> Tensor:
        """Rows of a tensor: as they lie in the file if one block holds them, else put together."""
        wanted = (stop - start, *tensor.shape[1:])
        result: Tensor | None = None
        for block in self._blocks[self._key(tensor)][tensor.place]:
            depth = len(tensor.place)
            offset, size = block.offsets[depth:], block.sizes[depth:]
            first, last = max(start, offset[0]), min(stop, offset[0] + size[0])
            if first >= last:
                continue
            inside = self._load(block)[tuple(i - o for i, o in zip(tensor.place, block.offsets, strict=False))]
            inside = inside[first - offset[0] : last - offset[0]]
            if inside.shape == wanted:
                return inside
            if result is None:
                result = torch.empty(wanted, dtype=inside.dtype)
            rest = (slice(o, o + s) for o, s in zip(offset[1:], size[1:], strict=True))
            result[(slice(first - start, last - start), *rest)] = inside
        assert result is not None
        return result

    def _load(self, block: _Block) -> Tensor:
        """A block without a copy: what torch.save wrote says where its bytes begin and how they are laid out."""
        from torch.distributed.checkpoint.utils import _create_file_view

        try:
            with block.file.open("rb") as stream:
                view = _create_file_view(stream, block.start, block.length)
                saved = torch.load(view, map_location="meta", weights_only=True)
                view.seek(0)
                if not saved.is_contiguous():
                    return torch.load(view, weights_only=True)
                offset = torch._C.PyTorchFileReader(view).get_record_offset("data/0")
        except (RuntimeError, AttributeError, pickle.UnpicklingError, EOFError) as error:
            raise ValueError(f"{block.file} is damaged: at {block.start} lies no tensor: {error}") from error
        if tuple(saved.shape) != block.sizes:
            raise ValueError(
                f"{block.file}: at {block.start} lies a tensor {list(saved.shape)}, not {list(block.sizes)}"
            )
        start = block.start + offset + saved.storage_offset() * saved.element_size()
        return self._files.tensor(block.file, start, saved.dtype, block.sizes)


def _read_metadata(file: Path) -> Any:
    try:
        metadata = _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
        if not isinstance(metadata.state_dict_metadata, Mapping) or not isinstance(metadata.storage_data, Mapping):
            raise pickle.UnpicklingError("it holds something else")
    except Exception as error:  # a broken pickle fails in any way
        raise ValueError(f"{file} is no metadata of a torch_dist checkpoint: {error}") from error
    return metadata
