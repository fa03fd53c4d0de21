"""The table language in which a model family is written down.

A family is ONE table. A row says which HF tensors make one Megatron tensor and how that tensor is split over
tensor-parallel ranks; `*` stands for the layer number, a second `*` for the expert's number among all experts, `{a,b}`
for several HF tensors that are fused, in that order:

    fused_qkv("decoder.layers.*.self_attention.linear_qkv.weight", "model.layers.*.self_attn.{q,k,v}_proj.weight")
    row("...layers.*.mlp.experts.local_experts.*.linear_fc2.weight", "model.layers.*.mlp.experts.*.down_proj.weight")

The rows stand in the order in which HF models hold their tensors; whoever exports follows it, layer by layer.
Beside the table a family names the HF config keys that it cannot honour (`only`), so that none is silently ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from dapo_megatron.models.dimensions import Dimensions, Latent
from dapo_megatron.models.hf_config import allow_only, expert_sizes, latent_sizes, require, rope_sizes
from dapo_megatron.models.split import FusedGLU, FusedQKV, Parallel, Replicated, Split, Vocabulary

Where = Callable[[Dimensions, int], bool]


def _everywhere(dimensions: Dimensions, layer: int) -> bool:
    return True


@dataclass(frozen=True)
class Row:
    """One line of a family's table.

    Attributes:
        megatron: name in the local layer spec, `*` for the layer, then for the expert.
        hf: names in the HF checkpoint, in the order of fusing.
        split: see split.py.
        tied_to: HF name that takes the place of `hf` when embeddings are tied (the tensor is then not exported).
        where: of a model's sizes and a layer, whether the layer has the tensor.
        dtype: the tensor's in every checkpoint; None for that of the model.
    """

    megatron: str
    hf: tuple[str, ...]
    split: Split
    tied_to: str | None = None
    where: Where = _everywhere
    dtype: torch.dtype | None = None

    @property
    def in_layer(self) -> bool:
        """Whether the row exists once a layer."""
        return "*" in self.megatron

    @property
    def in_expert(self) -> bool:
        """Whether the row exists once an expert, split over the tensor-parallel ranks of the experts."""
        return self.megatron.count("*") == 2


@dataclass(frozen=True)
class TensorMapping:
    """A row applied to one layer (and expert): the full names of one Megatron tensor and of its HF tensors.

    Attributes:
        in_expert: the split is over the tensor-parallel ranks of the experts, not those of the rest.
        exported: False if the HF tensors belong to another row (tied embeddings).
        dtype: the tensor's in every checkpoint; None for that of the model.
    """

    megatron: str
    hf: tuple[str, ...]
    split: Split
    in_expert: bool = False
    exported: bool = True
    dtype: torch.dtype | None = None


def replicated(megatron: str, hf: str, dtype: torch.dtype | None = None) -> Row:
    """Norms and other tensors that every rank holds whole."""
    return Row(megatron, _expand_braces(hf), Replicated(), dtype=dtype)


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


def only_where(where: Where, *rows: Row) -> tuple[Row, ...]:
    """Rows of only some layers."""
    return tuple(replace(line, where=where) for line in rows)


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
        defaults: values of HF config keys that are not there.
        rope: kinds of RoPE scaling (see hf_config.py).
        latent: attention is multi-head latent attention.
        expert_width_key: HF config key of the width of one expert; None in a dense family.
    """

    architectures: tuple[str, ...]
    table: tuple[Row, ...]
    transformer: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rope: tuple[str, ...] = ("default",)
    latent: bool = False
    expert_width_key: str | None = None

    def dimensions(self, hf_config: Mapping[str, Any]) -> Dimensions:
        """Read the sizes of a model from its HF config (config.json as a dict).

        Raises:
            ValueError: a needed key is missing, or a value that Megatron would not honour.
        """
        given = {key: value for key, value in hf_config.items() if value is not None}
        hf_config = {**self.defaults, **given}
        hidden_size, ffn_hidden_size, heads, layers, vocab_size = require(
            hf_config, "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"
        )
        allow_only(hf_config, self.only)
        kv_heads = hf_config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
        latent = latent_sizes(hf_config) if self.latent else None
        return Dimensions(
            layers=layers,
            hidden_size=hidden_size,
            ffn_hidden_size=ffn_hidden_size,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=latent.nope_head_dim + latent.rope_head_dim
            if latent
            else hf_config.get("head_dim") or hidden_size // heads,
            vocab_size=vocab_size,
            max_position_embeddings=hf_config.get("max_position_embeddings") or 2048,
            norm_eps=hf_config.get("rms_norm_eps", 1e-6),
            tied_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
            latent=latent,
            extra_layers=hf_config.get("num_nextn_predict_layers") or 0,
            **rope_sizes(hf_config, self.rope),
            **(expert_sizes(hf_config, self.expert_width_key) if self.expert_width_key else {}),
        )

    def transformer_kwargs(self, dimensions: Dimensions) -> dict[str, Any]:
        """The fields of Megatron's TransformerConfig that the model itself decides (no layout, no precision).

        For experts too: how the router weighs them. Balancing, dispatch and number formats are the run's.
        """
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
            **(_latent_kwargs(dimensions, dimensions.latent) if dimensions.latent else {}),
            **(_expert_kwargs(dimensions) if dimensions.experts else {}),
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
            there = [line for line in in_layer if line.where(dimensions, layer)]
            for in_expert, lines in groupby(there, key=lambda line: line.in_expert):
                if in_expert:
                    rows = tuple(lines)
                    for expert in range(dimensions.experts):
                        yield from (_apply(line, dimensions, layer, expert) for line in rows)
                else:
                    yield from (_apply(line, dimensions, layer) for line in lines)
        yield from (_apply(line, dimensions) for line in after)

    def is_ignored(self, hf_name: str, dimensions: Dimensions) -> bool:
        """Whether a checkpoint may hold this tensor although no model needs it: RoPE's frequencies, extra layers."""
        match = re.match(r"model\.layers\.(\d+)\.", hf_name)
        number = int(match[1]) - dimensions.layers if match else -1
        return hf_name.endswith(".rotary_emb.inv_freq") or 0 <= number < dimensions.extra_layers


def _apply(line: Row, dimensions: Dimensions, *numbers: int) -> TensorMapping:
    if dimensions.tied_embeddings and line.tied_to is not None:
        return TensorMapping(line.megatron, (line.tied_to,), line.split, exported=False)
    megatron, *hf = (_fill(name, numbers) for name in (line.megatron, *line.hf))
    return TensorMapping(megatron, tuple(hf), line.split, line.in_expert, dtype=line.dtype)


def _fill(name: str, numbers: Sequence[int]) -> str:
    """The name with layer and expert number in place of its stars."""
    for number in numbers:
        name = name.replace("*", str(number), 1)
    return name


def _latent_kwargs(dimensions: Dimensions, latent: Latent) -> dict[str, Any]:
    yarn = dimensions.yarn
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_head_dim,
        "qk_pos_emb_head_dim": latent.rope_head_dim,
        "v_head_dim": latent.value_head_dim,
        "rotary_base": dimensions.rope_theta,
        "rope_type": "yarn" if yarn else "rope",
        # Plain RoPE has to be told too: the factor scales the scores.
        "rotary_scaling_factor": yarn.factor if yarn else 1.0,
        **({key: value for key, value in asdict(yarn).items() if key != "factor"} if yarn else {}),
    }


def _expert_kwargs(dimensions: Dimensions) -> dict[str, Any]:
    with_experts = dimensions.layers - dimensions.dense_layers
    limited = dimensions.expert_groups > 1
    return {
        "num_moe_experts": dimensions.experts,
        "moe_layer_freq": [0] * dimensions.dense_layers + [1] * with_experts,
        "moe_router_topk": dimensions.experts_per_token,
        "moe_ffn_hidden_size": dimensions.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": dimensions.shared_ffn_hidden_size or None,
        "moe_router_score_function": "softmax",
        # Softmax over the chosen experts alone is softmax over all, divided by the sum of the chosen.
        "moe_router_pre_softmax": not dimensions.norm_topk_prob,
        "moe_router_num_groups": dimensions.expert_groups if limited else None,
        "moe_router_group_topk": dimensions.groups_per_token if limited else None,
        "moe_router_topk_scaling_factor": dimensions.expert_scale if dimensions.expert_scale != 1 else None,
    }
