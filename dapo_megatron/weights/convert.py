"""Checkpoints of either kind into checkpoints of either kind: HF folders and Megatron's distributed ones.

Everything that can be refused is refused before the first byte is written, all of it in one message.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.config.layout import ModelSizes, broken_rules, nearest_layouts
from dapo_megatron.config.schema import ParallelConfig
from dapo_megatron.models.dimensions import Dimensions
from dapo_megatron.models.family import Family
from dapo_megatron.models.registry import family_of
from dapo_megatron.weights.hf_folder import Checkpoint, HFFolder, write_hf_folder
from dapo_megatron.weights.load import check_tensors
from dapo_megatron.weights.megatron_names import StoredModel
from dapo_megatron.weights.megatron_reader import MegatronCheckpoint, iteration_folder
from dapo_megatron.weights.megatron_writer import MegatronWriter
from dapo_megatron.weights.staging import staged_folder

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_FLAGS = {"tensor": "tp", "pipeline": "pp", "virtual_pipeline": "vpp", "expert": "ep"}

Progress = Callable[[int, int], None]
"""Is told (bytes written since the last call, bytes in all), by any thread."""


def open_checkpoint(path: Path, hf_config: Path | None = None) -> Checkpoint:
    """A checkpoint of either kind.

    Args:
        hf_config: folder with config.json for a Megatron checkpoint that carries none.

    Raises:
        ValueError: it is none.
    """
    if path.is_dir() and iteration_folder(path) is not None:
        return MegatronCheckpoint(path, hf_config)
    return HFFolder(path)


def to_megatron(
    source: Path,
    target: Path,
    layout: Mapping[str, int | None],
    progress: Progress,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    refuse_nan: bool = False,
    hf_config: Path | None = None,
) -> None:
    """Write a Megatron distributed checkpoint, as one process.

    Args:
        layout: `tensor`, `pipeline`, `virtual_pipeline`, `expert`: the sizes of the layout that the blocks are cut for;
            the checkpoint loads into any.
        dtype: None keeps the source's.
        refuse_nan: first read everything, and refuse values that are not finite.

    Raises:
        ValueError: the source is no checkpoint or does not fit its config, the layout is impossible for the model, or
            see staged_folder.
    """
    checkpoint, family, dimensions = _open_checked(source, target, hf_config, refuse_nan)
    parallel = _parallel(layout, checkpoint.config)
    writer = MegatronWriter(checkpoint, family, dimensions, parallel, dtype)
    with staged_folder(target, overwrite, writer.size_bytes) as staging:
        writer.write(staging, lambda written: progress(written, writer.size_bytes))


def to_hf(
    source: Path,
    target: Path,
    progress: Progress,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    refuse_nan: bool = False,
    hf_config: Path | None = None,
    shard_bytes: float = 5e9,
) -> None:
    """Write an HF folder that transformers and vLLM load; arguments and errors are those of `to_megatron`."""
    checkpoint, family, dimensions = _open_checked(source, target, hf_config, refuse_nan)
    fixed = {name: m.dtype for m in family.tensors(dimensions) for name in m.hf if m.dtype is not None}
    dtypes = {name: fixed.get(name) or dtype or checkpoint.dtype(name) for name in checkpoint.names()}
    total = sum(math.prod(checkpoint.shape(name)) * dtypes[name].itemsize for name in dtypes)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in dtypes:
            tensor = checkpoint.tensor(name).to(dtypes[name])
            yield name, tensor
            progress(tensor.nbytes, total)

    write_hf_folder(target, tensors(), checkpoint, shard_bytes, overwrite, total)


def _open_checked(
    source: Path, target: Path, hf_config: Path | None, refuse_nan: bool
) -> tuple[Checkpoint, Family, Dimensions]:
    if target.resolve() == source.resolve() or source.resolve().is_relative_to(target.resolve()):
        raise ValueError(f"{target} is or contains the source")
    checkpoint = open_checkpoint(source, hf_config)
    family = family_of(checkpoint.config)
    dimensions = family.dimensions(checkpoint.config)
    model = StoredModel(family, dimensions, stacked=True)
    expected = {tensor.mapping.megatron: tensor.hf_shapes for tensor in model.tensors}
    mappings = {mapping.megatron: mapping for mapping in family.tensors(dimensions)}
    check_tensors(checkpoint, family, dimensions, mappings, expected)
    broken = [name for name in checkpoint.names() if not checkpoint.tensor(name).isfinite().all()] if refuse_nan else []
    if broken:
        raise ValueError(f"{source} has values that are not finite in:\n  " + "\n  ".join(broken))
    return checkpoint, family, dimensions


def _parallel(layout: Mapping[str, int | None], hf_config: Mapping[str, Any]) -> ParallelConfig:
    """The smallest world of a layout; tensor-parallel ranks do not share experts."""
    below = [f"--{flag}={size}" for name, flag in _FLAGS.items() if (size := layout.get(name)) is not None and size < 1]
    if below:
        raise ValueError(f"{', '.join(below)}: the least is 1")
    parallel = ParallelConfig(**layout)  # type: ignore[arg-type]
    sizes = ModelSizes.of(hf_config)
    parallel.data = parallel.expert // math.gcd(parallel.tensor, parallel.expert)
    parallel.sequence_parallel = parallel.tensor > 1 and sizes is not None and sizes.experts > 0
    broken = broken_rules(parallel, sizes)
    if broken:
        nearest = nearest_layouts(parallel, sizes) if sizes else []
        flags = [
            " ".join(f"--{flag} {getattr(near, name)}" for name, flag in _FLAGS.items() if getattr(near, name))
            for near in nearest
        ]
        hint = "\n    ".join(["; the nearest layouts that work:", *dict.fromkeys(flags)]) if flags else ""
        flag_of = {f"parallel.{name}": f"--{flag}" for name, flag in _FLAGS.items()}
        said = re.sub(r"parallel\.\w+", lambda match: flag_of.get(match[0], match[0]), "; ".join(broken))
        raise ValueError(said + hint)
    return parallel
