"""Writes Megatron's distributed checkpoints ("torch_dist") from weights under HF names, without building the model.

Tensors are cut into what each rank of a layout holds, and those blocks streamed to the files of the ranks by two
threads; no more than a block a thread is held in memory.
"""

from __future__ import annotations

import io
import json
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from dapo_megatron.config.layout import stage_layers
from dapo_megatron.config.schema import ParallelConfig
from dapo_megatron.models.dimensions import Dimensions
from dapo_megatron.models.family import Family
from dapo_megatron.weights.hf_folder import Checkpoint, carry_model_files
from dapo_megatron.weights.mapped_files import WriteThrough
from dapo_megatron.weights.megatron_names import Fragment, StoredModel, StoredTensor, fragments, padded_shape
from dapo_megatron.weights.megatron_reader import CARRIED_FOLDER, METADATA_FILE, TRACKER_FILE

THREADS = 2
_ALIGNMENT_BYTES = 64
_FOLDER = "iter_0000000"


@dataclass(frozen=True)
class _Block:
    """A block of a global tensor, and the file that it goes to."""

    tensor: StoredTensor
    fragment: Fragment
    ranks: int
    dtype: torch.dtype
    file: str

    @property
    def offsets(self) -> torch.Size:
        return torch.Size((*self.tensor.place, *self.fragment.offset))

    @property
    def sizes(self) -> torch.Size:
        return torch.Size((*(1 for _ in self.tensor.place), *self.fragment.shape))

    @property
    def size_bytes(self) -> int:
        return self.sizes.numel() * self.dtype.itemsize


class MegatronWriter:
    """One conversion into a Megatron checkpoint.

    Args:
        source: its tensors have been checked against the family's table.
        parallel: the layout whose ranks' blocks are stored; a checkpoint loads into any layout.
        dtype: of the tensors that have none of their own; None keeps the source's.

    Attributes:
        size_bytes: of all tensors.
    """

    def __init__(
        self,
        source: Checkpoint,
        family: Family,
        dimensions: Dimensions,
        parallel: ParallelConfig,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._source, self._family, self._dimensions, self._parallel = source, family, dimensions, parallel
        self._model = StoredModel(family, dimensions, stacked=not dimensions.experts)
        self._blocks: list[list[_Block]] = [[] for _ in range(THREADS)]
        sizes = [0] * THREADS
        for tensor, fragment, ranks, rank in self._fragments():
            thread = sizes.index(min(sizes))
            kept = source.dtype(tensor.mapping.hf[0])
            block = _Block(tensor, fragment, ranks, tensor.mapping.dtype or dtype or kept, f"__{rank}_{thread}.distcp")
            self._blocks[thread].append(block)
            sizes[thread] += block.size_bytes
        self.size_bytes = sum(sizes)

    def _fragments(self) -> Iterator[tuple[StoredTensor, Fragment, int, int]]:
        """(tensor, fragment, ranks that share the tensor, rank of the whole layout that stores it)"""
        p, d = self._parallel, self._dimensions
        chunks = stage_layers(d.layers, p.pipeline, p.virtual_pipeline)
        stage_of_layer = [chunk % p.pipeline for chunk, count in enumerate(chunks) for _ in range(count)]
        stage_ranks = p.tensor * p.context * p.data
        for tensor in self._model.tensors:
            first = tensor.mapping.megatron.startswith("embedding.")
            stage = stage_of_layer[0 if first else -1 if tensor.layer is None else tensor.layer]
            in_expert = tensor.mapping.in_expert
            ranks = p.expert_tensor if in_expert else p.tensor
            expert_rank = tensor.place[-1] // (d.experts // p.expert) if in_expert else 0
            for fragment in fragments(tensor, ranks):
                rank = expert_rank * ranks + fragment.rank
                yield tensor, fragment, ranks, stage * stage_ranks + rank

    def write(self, folder: Path, advance: Callable[[int], None]) -> None:
        """Fill a folder; `advance` is told the bytes as they are written, by any thread."""
        iteration = folder / _FOLDER
        iteration.mkdir()
        storage = self._write_blocks(iteration, advance)
        with (iteration / METADATA_FILE).open("wb") as stream:
            pickle.dump(self._metadata(storage, self._write_extra_state(iteration)), stream)
        apart = {} if self._model.stacked else {"non_homogeneous_layers": True}
        content = {"singleton_local_shards": False, **apart}
        torch.save({"content_metadata": content, "iteration": 0, "checkpoint_version": 3.0}, iteration / "common.pt")
        backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
        versions = {f"{backend}_version": 1 for backend in backends}
        (iteration / "metadata.json").write_text(json.dumps(backends | versions))
        OmegaConf.save(OmegaConf.create(self._run_config()), iteration / "run_config.yaml")
        (iteration / CARRIED_FOLDER).mkdir()
        carry_model_files(self._source, iteration / CARRIED_FOLDER)
        (folder / TRACKER_FILE).write_text("0")

    def _write_blocks(self, folder: Path, advance: Callable[[int], None]) -> dict[_Block, tuple[int, int]]:
        """Block -> (offset, length) in its file."""
        stop = threading.Event()
        written: dict[_Block, tuple[int, int]] = {}

        def write(blocks: list[_Block]) -> None:
            for block in blocks:
                if stop.is_set():
                    return
                written[block] = _append(folder / block.file, self._values(block))
                advance(block.size_bytes)

        with ThreadPoolExecutor(THREADS) as pool:
            writing = [pool.submit(write, blocks) for blocks in self._blocks]
            try:
                done, _ = wait(writing, return_when=FIRST_EXCEPTION)
                for each in done:
                    each.result()
            finally:
                # The others end with the block at hand, after an interrupt too.
                stop.set()
        return written

    def _values(self, block: _Block) -> Tensor:
        mapping, fragment = block.tensor.mapping, block.fragment
        parts = [
            self._source.tensor(name, mapping.split.part(shape, fragment.rank, block.ranks))
            for i, (name, shape) in enumerate(zip(mapping.hf, block.tensor.hf_shapes, strict=True))
            if fragment.piece in (None, i)
        ]
        values = parts[0] if fragment.piece is not None else mapping.split.fuse(parts, self._dimensions)
        padding = fragment.shape[0] - values.shape[0]  # of a vocabulary
        if padding:
            values = torch.cat([values, values.new_zeros(padding, *values.shape[1:])])
        return values.to(block.dtype).reshape(block.sizes)

    def _write_extra_state(self, folder: Path) -> tuple[str, int, int]:
        """The empty state that all linear layers share: (file, offset, length)."""
        file = self._blocks[0][0].file
        state = io.BytesIO()
        torch.save([None], state)
        with (folder / file).open("ab") as stream:
            start = stream.tell()
            stream.write(state.getbuffer())
        return file, start, len(state.getbuffer())

    def _metadata(self, storage: Mapping[_Block, tuple[int, int]], extra_state: tuple[str, int, int]) -> Any:
        """All names of a tensor point to the same bytes."""
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import (
            BytesStorageMetadata,
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            TensorProperties,
            TensorStorageMetadata,
        )

        entries: dict[str, Any] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for block in (block for blocks in self._blocks for block in blocks):
            size = torch.Size((*block.tensor.leading, *padded_shape(block.tensor, block.ranks)))
            for key in block.tensor.keys:
                entry = entries.setdefault(key, TensorStorageMetadata(TensorProperties(block.dtype), size, []))
                entry.chunks.append(ChunkStorageMetadata(block.offsets, block.sizes))
                places[MetadataIndex(key, block.offsets)] = _StorageInfo(block.file, *storage[block])
            for extra in block.tensor.extra_state_keys:
                entries[extra] = BytesStorageMetadata()
                places[MetadataIndex(extra)] = _StorageInfo(*extra_state)
        return Metadata(state_dict_metadata=entries, planner_data={}, storage_data=places)

    def _run_config(self) -> dict[str, Any]:
        """What Megatron-Bridge looks at in a checkpoint that it did not write, and the model's settings."""
        p, d = self._parallel, self._dimensions
        settings = self._family.transformer_kwargs(d)
        plain = {key: value for key, value in settings.items() if isinstance(value, int | float | str | list | None)}
        model = {
            **plain,
            "vocab_size": d.vocab_size,
            "seq_length": d.max_position_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": d.rope_theta,
            "share_embeddings_and_output_weights": d.tied_embeddings,
            "tensor_model_parallel_size": p.tensor,
            "pipeline_model_parallel_size": p.pipeline,
            "virtual_pipeline_model_parallel_size": p.virtual_pipeline,
            "expert_model_parallel_size": p.expert,
            "expert_tensor_parallel_size": p.expert_tensor,
            "params_dtype": str(self._blocks[0][0].dtype),
        }
        saved = {"ckpt_format": "torch_dist", "save_optim": False, "save_rng": False, "fully_parallel_save": True}
        return {"model": model, "checkpoint": saved}


def _append(file: Path, values: Tensor) -> tuple[int, int]:
    """(offset, length) of what was written, from an aligned place on."""
    if values.untyped_storage().nbytes() != values.nbytes or not values.is_contiguous():
        # torch.save writes all of a storage.
        values = _of_its_own(values)
    with file.open("ab") as stream:
        start = -(-stream.tell() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        stream.write(bytes(start - stream.tell()))
        torch.save(values, WriteThrough(stream))
        return start, stream.tell() - start


def _of_its_own(values: Tensor) -> Tensor:
    """The same values in a storage that holds nothing else: a window on the old one if they lie together there."""
    if not values.is_contiguous():
        return values.contiguous()
    start = values.storage_offset() * values.element_size()
    window = values.untyped_storage()[start : start + values.nbytes]
    return torch.empty(0, dtype=values.dtype).set_(window).view(values.shape)
