"""The table language in which a model family is written down.

A family is ONE table. A row says which HF tensors make one Megatron tensor and how that tensor is split over
tensor-parallel ranks; `*` stands for the layer number, `{a,b}` for several HF tensors that are fused, in that order:

    fused_qkv("decoder.layers.*.self_attention.linear_qkv.weight", "model.layers.*.self_attn.{q,k,v}_proj.weight")

The rows stand in the order in which HF models hold their tensors; whoever exports follows it, layer by layer.
Beside the table a family names the HF config keys that it cannot honour (`only`), so that none is silently ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a model, read from its HF config.

    Attributes:
        head_dim: size of one attention head, not necessarily hidden_size / heads.
        kv_heads: key/value heads (query groups).
        tied_embeddings: the output weight is the embedding; HF checkpoints then hold no lm_head.
    """

    layers: int
    hidden_size: int
    ffn_hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope_theta: float
    tied_embeddings: bool


class Split(Protocol):
    """How HF tensors become one full Megatron tensor, and how ranks share that."""

    def fuse(self, parts: Sequence[Tensor], dimensions: Dimensions) -> Tensor:
        """HF tensors -> the full Megatron tensor, without vocabulary padding."""
        ...

    def unfuse(self, tensor: Tensor, dimensions: Dimensions) -> list[Tensor]:
        """The inverse of `fuse`; cuts vocabulary padding. Views where possible."""
        ...

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        """The part of a full Megatron tensor that belongs to tensor-parallel rank `rank` of `size`."""
        ...

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The shards of all tensor-parallel ranks -> the full Megatron tensor."""
        ...


@dataclass(frozen=True)
class Replicated:
    """The same tensor on every rank."""

    def fuse(self, parts: Sequence[Tensor], dimensions: Dimensions) -> Tensor:
        (part,) = parts
        return part

    def unfuse(self, tensor: Tensor, dimensions: Dimensions) -> list[Tensor]:
        return [tensor]

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return tensor

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return shards[0]


@dataclass(frozen=True)
class Parallel(Replicated):
    """Split along one dimension: 0 for column-parallel weights and their biases, 1 for row-parallel weights."""

    dim: int

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return tensor.chunk(size, self.dim)[rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards), self.dim) if len(shards) > 1 else shards[0]


@dataclass(frozen=True)
class Vocabulary(Parallel):
    """Rows are tokens, padded at the end to a multiple of the tensor-parallel size on Megatron's side only."""

    dim: int = 0

    def unfuse(self, tensor: Tensor, dimensions: Dimensions) -> list[Tensor]:
        return [tensor[: dimensions.vocab_size]]

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        rows = -(-tensor.shape[0] // size)
        shard = tensor[rank * rows : (rank + 1) * rows]
        padding = rows - shard.shape[0]
        return torch.cat([shard, shard.new_zeros(padding, *shard.shape[1:])]) if padding else shard


@dataclass(frozen=True)
class FusedQKV(Parallel):
    """q, k, v in one tensor, ordered by query group: the q heads of a group, its k head, its v head."""

    dim: int = 0

    def fuse(self, parts: Sequence[Tensor], dimensions: Dimensions) -> Tensor:
        groups = [part.view(dimensions.kv_heads, -1, *part.shape[1:]) for part in parts]
        return torch.cat(groups, 1).flatten(0, 1)

    def unfuse(self, tensor: Tensor, dimensions: Dimensions) -> list[Tensor]:
        d = dimensions.head_dim
        rows = [dimensions.heads // dimensions.kv_heads * d, d, d]
        groups = tensor.view(dimensions.kv_heads, sum(rows), *tensor.shape[1:])
        return [part.flatten(0, 1) for part in groups.split(rows, 1)]


@dataclass(frozen=True)
class FusedGLU(Parallel):
    """gate over up; every rank holds its part of both."""

    dim: int = 0

    def fuse(self, parts: Sequence[Tensor], dimensions: Dimensions) -> Tensor:
        return torch.cat(list(parts))

    def unfuse(self, tensor: Tensor, dimensions: Dimensions) -> list[Tensor]:
        return list(tensor.chunk(2))

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return torch.cat([half.chunk(size)[rank] for half in tensor.chunk(2)]) if size > 1 else tensor

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        if len(shards) == 1:
            return shards[0]
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return torch.cat([*gates, *ups])


@dataclass(frozen=True)
class Row:
    """One line of a family's table.

    Attributes:
        megatron: name in the local layer spec, `*` for the layer.
        hf: names in the HF checkpoint, in the order of fusing.
        split: see Split.
        tied_to: HF name that takes the place of `hf` when embeddings are tied (the tensor is then not exported).
    """

    megatron: str
    hf: tuple[str, ...]
    split: Split
    tied_to: str | None = None

    @property
    def in_layer(self) -> bool:
        """Whether the row exists once a layer."""
        return "*" in self.megatron


@dataclass(frozen=True)
class TensorMapping:
    """A row applied to one layer: the full names of one Megatron tensor and of its HF tensors.

    Attributes:
        exported: False if the HF tensors belong to another row (tied embeddings).
    """

    megatron: str
    hf: tuple[str, ...]
    split: Split
    exported: bool = True


def replicated(megatron: str, hf: str) -> Row:
    """Norms and other tensors that every rank holds whole."""
    return Row(megatron, _expand_braces(hf), Replicated())


def column(megatron: str, hf: str) -> Row:
    """Split along the output dimension."""
    return Row(megatron, _expand_braces(hf), Parallel(0))


def row(megatron: str, hf: str) -> Row:
    """Split along the input dimension."""
    return Row(megatron, _expand_braces(hf), Parallel(1))


def vocabulary(megatron: str, hf: str, tied_to: str | None = None) -> Row:
    """Embedding and output weight; `tied_to` names what the tensor equals when embeddings are tied."""
    return Row(megatron, _expand_braces(hf), Vocabulary(), tied_to)


def fused_qkv(megatron: str, hf: str) -> Row:
    """q, k and v, weights or biases."""
    return Row(megatron, _expand_braces(hf), FusedQKV())


def fused_glu(megatron: str, hf: str) -> Row:
    """gate and up of a gated MLP."""
    return Row(megatron, _expand_braces(hf), FusedGLU())


def _expand_braces(name: str) -> tuple[str, ...]:
    match = re.search(r"\{([^}]*)\}", name)
    if match is None:
        return (name,)
    return tuple(name[: match.start()] + part + name[match.end() :] for part in match[1].split(","))


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        architectures: values of `architectures[0]` in HF configs that mean this family.
        table: see the module docstring.
        transformer: TransformerConfig fields that all members share, beside what `transformer_kwargs` derives.
        only: HF config keys whose value must be one of the given ones if the key is there.
        ignored: HF tensors that some checkpoints hold and no model needs (`*` for the layer).
    """

    architectures: tuple[str, ...]
    table: tuple[Row, ...]
    transformer: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def dimensions(self, hf_config: Mapping[str, Any]) -> Dimensions:
        """Read the sizes of a model from its HF config (config.json as a dict).

        Raises:
            ValueError: a needed key is missing, or a value that Megatron would not honour.
        """
        needed = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
        missing = [key for key in needed if hf_config.get(key) is None]
        if missing:
            raise ValueError(f"the HF config lacks {', '.join(missing)}")
        for key, allowed in self.only.items():
            value = hf_config.get(key)
            if value is not None and value not in allowed:
                raise ValueError(f"HF config {key}={value!r} is not supported: allowed is {_one_of(allowed)}")
        heads = hf_config["num_attention_heads"]
        kv_heads = hf_config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
        return Dimensions(
            layers=hf_config["num_hidden_layers"],
            hidden_size=hf_config["hidden_size"],
            ffn_hidden_size=hf_config["intermediate_size"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=hf_config.get("head_dim") or hf_config["hidden_size"] // heads,
            vocab_size=hf_config["vocab_size"],
            max_position_embeddings=hf_config.get("max_position_embeddings") or 2048,
            norm_eps=hf_config.get("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(hf_config),
            tied_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
        )

    def transformer_kwargs(self, dimensions: Dimensions) -> dict[str, Any]:
        """The fields of Megatron's TransformerConfig that the model itself decides (no layout, no precision)."""
        return {
            "num_layers": dimensions.layers,
            "hidden_size": dimensions.hidden_size,
            "ffn_hidden_size": dimensions.ffn_hidden_size,
            "num_attention_heads": dimensions.heads,
            "num_query_groups": dimensions.kv_heads,
            "kv_channels": dimensions.head_dim,
            "normalization": "RMSNorm",
            "layernorm_epsilon": dimensions.norm_eps,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            **self.transformer,
        }

    def tensors(self, dimensions: Dimensions) -> list[TensorMapping]:
        """The table applied to every layer, in the order of HF checkpoints: before, layer by layer, after."""
        return list(self._expand(dimensions))

    def _expand(self, dimensions: Dimensions) -> Iterator[TensorMapping]:
        in_layer = [line for line in self.table if line.in_layer]
        first = self.table.index(in_layer[0])
        after = [line for line in self.table[first:] if not line.in_layer]
        yield from (_apply(line, dimensions) for line in self.table[:first])
        for layer in range(dimensions.layers):
            yield from (_apply(line, dimensions, layer) for line in in_layer)
        yield from (_apply(line, dimensions) for line in after)

    def is_ignored(self, hf_name: str) -> bool:
        """Whether a checkpoint may hold this tensor although no model needs it."""
        return any(re.fullmatch(re.escape(name).replace(r"\*", r"\d+"), hf_name) for name in self.ignored)


def _apply(line: Row, dimensions: Dimensions, layer: int | None = None) -> TensorMapping:
    if dimensions.tied_embeddings and line.tied_to is not None:
        return TensorMapping(line.megatron, (line.tied_to,), line.split, exported=False)
    names = (name.replace("*", str(layer)) for name in line.hf)
    return TensorMapping(line.megatron.replace("*", str(layer)), tuple(names), line.split)


def _rope_theta(hf_config: Mapping[str, Any]) -> float:
    """transformers 5 keeps all of RoPE in `rope_parameters`; before, `rope_theta` stood beside `rope_scaling`."""
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"RoPE scaling {kind!r} is not supported: allowed is 'default' (none)")
    return float(rope.get("rope_theta") or hf_config.get("rope_theta") or 10000.0)


def _one_of(values: Sequence[Any]) -> str:
    return " or ".join(repr(value) for value in values)
