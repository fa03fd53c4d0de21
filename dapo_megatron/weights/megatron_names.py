"""What Megatron's distributed checkpoints call the tensors of a family's table, and how large they are.

The names are those of Transformer Engine's layer spec, which the local one maps its own to. The layers of a dense model
lie stacked in one global tensor, as Megatron writes them; those of a model with experts lie apart, which Megatron does
itself as soon as layers differ, and takes for all models if the checkpoint says so (`non_homogeneous_layers`). Experts
lie stacked in their layer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from dapo_megatron.models.dimensions import Dimensions
from dapo_megatron.models.family import Family, TensorMapping
from dapo_megatron.models.split import FusedGLU, Vocabulary
from dapo_megatron.weights.load import FUSED_NORMS, hf_shapes

_FUSED_NAME = {norm: fused for fused, norm in FUSED_NORMS.items()}
# The local spec renames them where attention has a fused qkv.
_RENAMED_BY_LOCAL_SPEC = ("input_layernorm.weight", "pre_mlp_layernorm.weight")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.*)")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the table as it lies in a checkpoint: `leading` dimensions of layers and experts, then its own.

    Attributes:
        mapping: its row.
        keys: global names under which loaders look for it; all name the same values.
        place: its index in the leading dimensions.
        leading: their sizes; none for a tensor that is not stacked.
        shape: of the tensor itself; a vocabulary is not padded.
        hf_shapes: of its HF tensors.
        layer: None outside the layers.
    """

    mapping: TensorMapping
    keys: tuple[str, ...]
    place: tuple[int, ...]
    leading: tuple[int, ...]
    shape: tuple[int, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    layer: int | None

    @property
    def extra_state_keys(self) -> list[str]:
        """What Transformer Engine and core's linear layers look for beside a weight (for scaling factors, FP8)."""
        module, _, kind = self.keys[0].rpartition(".")
        if kind != "weight" or module.endswith(("word_embeddings", "router", "output_layer")):
            return []
        modules = [module]
        if module.endswith("self_attention.linear_proj"):
            # It has no tensor, but state in versions of Megatron-Core before 0.14.
            modules.append(module.replace("linear_proj", "core_attention"))
        place, leading = self.place or (0,), self.leading or (1,)
        shard = f"shard_{'.'.join(map(str, place))}_{'.'.join(map(str, leading))}"
        return [f"{module}._extra_state/{shard}" for module in modules]


@dataclass(frozen=True)
class StoredModel:
    """All tensors of a model as they lie in a checkpoint.

    Attributes:
        stacked: the layers lie in one tensor.
    """

    family: Family
    dimensions: Dimensions
    stacked: bool

    @cached_property
    def tensors(self) -> list[StoredTensor]:
        """In the order of HF checkpoints; tied output weights, which are not stored, are left out."""
        mappings = [mapping for mapping in self.family.tensors(self.dimensions) if mapping.exported]
        names = {mapping.megatron for mapping in mappings}
        return [self._stored(mapping, names) for mapping in mappings]

    def _stored(self, mapping: TensorMapping, names: set[str]) -> StoredTensor:
        shape = tensor_shape(mapping.megatron, self.dimensions)
        parts = hf_shapes(mapping.split, shape, 1, self.dimensions)
        match = _LAYER.fullmatch(mapping.megatron)
        if match is None:
            return StoredTensor(mapping, (mapping.megatron,), (), (), shape, parts, None)
        layer, inner = int(match[1]), match[2]
        place: tuple[int, ...] = ()
        leading: tuple[int, ...] = ()
        prefix = f"decoder.layers.{layer}."
        if self.stacked:
            place, leading, prefix = (layer,), (self.dimensions.layers,), "decoder.layers."
        expert = _EXPERT.fullmatch(inner)
        if expert is not None:
            place, leading = (*place, int(expert[1])), (*leading, self.dimensions.experts)
            inner = f"mlp.experts.experts.{expert[2]}"
        keys = tuple(prefix + name for name in _norm_names(inner, f"decoder.layers.{layer}.", names))
        return StoredTensor(mapping, keys, place, leading, shape, parts, layer)


def _norm_names(inner: str, layer: str, names: set[str]) -> list[str]:
    """Transformer Engine's name, then the local spec's where it differs."""
    fused = _FUSED_NAME.get(inner)
    if fused is None:
        return [inner]
    linear = fused.removesuffix("layer_norm_weight") + "weight"
    plain_attention = f"{layer}self_attention.linear_qkv.weight" in names
    of_transformer_engine = fused if layer + linear in names else inner
    of_local_spec = fused if plain_attention and inner in _RENAMED_BY_LOCAL_SPEC else inner
    return list(dict.fromkeys((of_transformer_engine, of_local_spec)))


def tensor_shape(name: str, dimensions: Dimensions) -> tuple[int, ...]:
    """The full shape of a Megatron tensor, without vocabulary padding."""
    d, latent = dimensions, dimensions.latent
    vocabulary, norm = (d.vocab_size, d.hidden_size), (d.hidden_size,)
    fused_qkv = (d.heads + 2 * d.kv_heads) * d.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "word_embeddings.weight": vocabulary,
        "output_layer.weight": vocabulary,
        "final_layernorm.weight": norm,
        "input_layernorm.weight": norm,
        "pre_mlp_layernorm.weight": norm,
        "linear_qkv.weight": (fused_qkv, d.hidden_size),
        "linear_qkv.bias": (fused_qkv,),
        "q_layernorm.weight": (d.head_dim,),
        "k_layernorm.weight": (d.head_dim,),
        "linear_proj.weight": (d.hidden_size, d.heads * d.head_dim),
        "router.weight": (d.experts, d.hidden_size),
        "router.expert_bias": (d.experts,),
    }
    if latent is not None:
        query_rank = latent.query_rank or 0
        key_and_value = latent.nope_head_dim + latent.value_head_dim
        shapes |= {
            "linear_proj.weight": (d.hidden_size, d.heads * latent.value_head_dim),
            "linear_q_proj.weight": (d.heads * d.head_dim, d.hidden_size),
            "linear_q_down_proj.weight": (query_rank, d.hidden_size),
            "q_layernorm.weight": (query_rank,),
            "linear_q_up_proj.weight": (d.heads * d.head_dim, query_rank),
            "linear_kv_down_proj.weight": (latent.kv_rank + latent.rope_head_dim, d.hidden_size),
            "kv_layernorm.weight": (latent.kv_rank,),
            "linear_kv_up_proj.weight": (d.heads * key_and_value, latent.kv_rank),
        }
    width = d.ffn_hidden_size
    if "local_experts" in name:
        width = d.moe_ffn_hidden_size
    elif "shared_experts" in name:
        width = d.shared_ffn_hidden_size
    shapes |= {"linear_fc1.weight": (2 * width, d.hidden_size), "linear_fc2.weight": (d.hidden_size, width)}
    return next(shape for end, shape in shapes.items() if name.endswith(f".{end}") or name == end)


@dataclass(frozen=True)
class Fragment:
    """What one tensor-parallel rank holds of a tensor, or one of the two pieces of that.

    Attributes:
        offset: where it begins in the tensor.
        shape: padded where the tensor is a vocabulary.
        rank: the tensor-parallel rank.
        piece: the only HF tensor that it comes from; None if it is fused from all.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    rank: int
    piece: int | None = None


def padded_shape(tensor: StoredTensor, ranks: int) -> tuple[int, ...]:
    """Vocabularies are padded to a multiple of the tensor-parallel ranks."""
    if isinstance(tensor.mapping.split, Vocabulary):
        return (-(-tensor.shape[0] // ranks) * ranks, *tensor.shape[1:])
    return tensor.shape


def fragments(tensor: StoredTensor, ranks: int) -> list[Fragment]:
    """The pieces in which so many tensor-parallel ranks store a tensor; each is one block of the global tensor."""
    split, shape = tensor.mapping.split, padded_shape(tensor, ranks)
    if not split.sharded:
        return [Fragment((0,) * len(shape), shape, 0)]
    pieces = len(tensor.mapping.hf) if isinstance(split, FusedGLU) else 1
    dim: int = split.dim  # type: ignore[attr-defined]
    length = shape[dim] // (pieces * ranks)
    found = []
    for rank in range(ranks):
        for piece in range(pieces):
            # A rank holds its part of gate and up, which lie apart in the global tensor.
            start = (piece * ranks + rank) * length
            offset = tuple(start if i == dim else 0 for i in range(len(shape)))
            block = tuple(length if i == dim else size for i, size in enumerate(shape))
            found.append(Fragment(offset, block, rank, piece if pieces > 1 else None))
    return found
