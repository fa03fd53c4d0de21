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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from dapo_megatron.models.dimensions import Dimensions
from dapo_megatron.models.split import FusedGLU, FusedQKV, Parallel, Replicated, Split, Vocabulary


@dataclass(frozen=True)
class Row:
    """One line of a family's table.

    Attributes:
        megatron: name in the local layer spec, `*` for the layer, then for the expert.
        hf: names in the HF checkpoint, in the order of fusing.
        split: see split.py.
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
    """

    megatron: str
    hf: tuple[str, ...]
    split: Split
    in_expert: bool = False
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
            **self._expert_sizes(hf_config),
        )

    def _expert_sizes(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        if not any(line.in_expert for line in self.table):
            return {}
        sizes: dict[str, Any] = {
            # transformers 5 writes num_local_experts where older ones wrote num_experts.
            "num_experts": hf_config.get("num_experts") or hf_config.get("num_local_experts"),
            "num_experts_per_tok": hf_config.get("num_experts_per_tok"),
            "moe_intermediate_size": hf_config.get("moe_intermediate_size"),
        }
        missing = [key for key, value in sizes.items() if not value]
        if missing:
            raise ValueError(f"the HF config lacks {', '.join(missing)}")
        experts, chosen, width = sizes.values()
        if chosen > experts:
            raise ValueError(f"num_experts_per_tok={chosen} is more than num_experts={experts}")
        norm_topk_prob = bool(hf_config.get("norm_topk_prob", False))
        if chosen == 1 and norm_topk_prob:
            raise ValueError("num_experts_per_tok=1 is not supported with norm_topk_prob=True: no router would learn")
        return {
            "experts": experts,
            "experts_per_token": chosen,
            "moe_ffn_hidden_size": width,
            "norm_topk_prob": norm_topk_prob,
        }

    def transformer_kwargs(self, dimensions: Dimensions) -> dict[str, Any]:
        """The fields of Megatron's TransformerConfig that the model itself decides (no layout, no precision).

        For experts too: how the router weighs them. Balancing, dispatch and number formats are the run's.
        """
        experts = {
            "num_moe_experts": dimensions.experts,
            "moe_router_topk": dimensions.experts_per_token,
            "moe_ffn_hidden_size": dimensions.moe_ffn_hidden_size,
            "moe_router_score_function": "softmax",
            # Softmax over the chosen experts alone is softmax over all, divided by the sum of the chosen.
            "moe_router_pre_softmax": not dimensions.norm_topk_prob,
        }
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
            **(experts if dimensions.experts else {}),
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
            for in_expert, lines in groupby(in_layer, key=lambda line: line.in_expert):
                if in_expert:
                    rows = tuple(lines)
                    for expert in range(dimensions.experts):
                        yield from (_apply(line, dimensions, layer, expert) for line in rows)
                else:
                    yield from (_apply(line, dimensions, layer) for line in lines)
        yield from (_apply(line, dimensions) for line in after)

    def is_ignored(self, hf_name: str) -> bool:
        """Whether a checkpoint may hold this tensor although no model needs it."""
        return any(re.fullmatch(re.escape(name).replace(r"\*", r"\d+"), hf_name) for name in self.ignored)


def _apply(line: Row, dimensions: Dimensions, *numbers: int) -> TensorMapping:
    if dimensions.tied_embeddings and line.tied_to is not None:
        return TensorMapping(line.megatron, (line.tied_to,), line.split, exported=False)
    megatron, *hf = (_fill(name, numbers) for name in (line.megatron, *line.hf))
    return TensorMapping(megatron, tuple(hf), line.split, line.in_expert)


def _fill(name: str, numbers: Sequence[int]) -> str:
    """The name with layer and expert number in place of its stars."""
    for number in numbers:
        name = name.replace("*", str(number), 1)
    return name


def _rope_theta(hf_config: Mapping[str, Any]) -> float:
    """transformers 5 keeps all of RoPE in `rope_parameters`; before, `rope_theta` stood beside `rope_scaling`."""
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"RoPE scaling {kind!r} is not supported: allowed is 'default' (none)")
    return float(rope.get("rope_theta") or hf_config.get("rope_theta") or 10000.0)


def _one_of(values: Sequence[Any]) -> str:
    return " or ".join(repr(value) for value in values)
