from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.models.family import Dimensions, FusedGLU, FusedQKV, Parallel, Replicated, Vocabulary
from dapo_megatron.models.llama import LLAMA
from dapo_megatron.models.qwen2 import QWEN2
from dapo_megatron.models.registry import FAMILIES, family_of

LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 54,
    "intermediate_size": 72,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 2,
    "vocab_size": 37,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


def dimensions(**changes: int) -> Dimensions:
    return dataclasses.replace(LLAMA.dimensions(LLAMA_CONFIG), **changes)


def test_qkv_is_ordered_by_query_group() -> None:
    sizes = dimensions(heads=6, kv_heads=2, head_dim=2)
    q = torch.arange(12).view(12, 1)  # 6 heads of 2 rows
    k, v = torch.arange(100, 104).view(4, 1), torch.arange(200, 204).view(4, 1)
    fused = FusedQKV().fuse([q, k, v], sizes)
    expected = []
    for group in range(2):
        expected += list(range(group * 6, group * 6 + 6))
        expected += [100 + group * 2, 101 + group * 2, 200 + group * 2, 201 + group * 2]
    assert fused[:, 0].tolist() == expected


@settings(deadline=None, max_examples=40)
@given(
    kv_heads=st.sampled_from([2, 4]),
    ratio=st.integers(1, 3),
    head_dim=st.sampled_from([2, 5]),
    ranks=st.sampled_from([1, 2]),
    bias=st.booleans(),
)
def test_fuse_shard_unshard_unfuse_is_the_identity(
    kv_heads: int, ratio: int, head_dim: int, ranks: int, bias: bool
) -> None:
    sizes = dimensions(heads=kv_heads * ratio, kv_heads=kv_heads, head_dim=head_dim, vocab_size=11)
    columns = () if bias else (7,)
    q_rows, kv_rows = kv_heads * ratio * head_dim, kv_heads * head_dim
    cases = [
        (FusedQKV(), [torch.randn(q_rows, *columns), torch.randn(kv_rows, *columns), torch.randn(kv_rows, *columns)]),
        (FusedGLU(), [torch.randn(6, *columns), torch.randn(6, *columns)]),
        (Vocabulary(), [torch.randn(11, *columns)]),
        (Parallel(0), [torch.randn(6, *columns)]),
        (Parallel(1), [torch.randn(3, 8)]),
        (Replicated(), [torch.randn(5)]),
    ]
    for split, parts in cases:
        full = split.fuse(parts, sizes)
        shards = [split.shard(full, rank, ranks) for rank in range(ranks)]
        assert len({shard.shape for shard in shards}) == 1
        for got, want in zip(split.unfuse(split.unshard(shards), sizes), parts, strict=True):
            assert torch.equal(got, want), split


def test_glu_shards_hold_their_part_of_gate_and_up() -> None:
    gate, up = torch.arange(4), torch.arange(10, 14)
    full = FusedGLU().fuse([gate, up], dimensions())
    assert [FusedGLU().shard(full, rank, 2).tolist() for rank in range(2)] == [[0, 1, 10, 11], [2, 3, 12, 13]]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architectures[0])
def test_a_table_names_every_tensor_once_layer_by_layer(family: object) -> None:
    for tied in (False, True):
        mappings = family.tensors(dimensions(layers=3, tied_embeddings=tied))
        names = [name for mapping in mappings if mapping.exported for name in mapping.hf]
        assert len(names) == len(set(names)) and not any(set("*{}") & set(name) for name in names)
        assert len({mapping.megatron for mapping in mappings}) == len(mappings)
        assert names[0] == "model.embed_tokens.weight"
        assert names[-1] == ("model.norm.weight" if tied else "lm_head.weight")
        layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
        assert layers == sorted(layers) and set(layers) == {0, 1, 2}
        output = next(mapping for mapping in mappings if mapping.megatron == "output_layer.weight")
        assert output.exported is not tied
        assert output.hf == ("model.embed_tokens.weight" if tied else "lm_head.weight",)


def test_sizes_and_transformer_fields() -> None:
    sizes = LLAMA.dimensions(LLAMA_CONFIG | {"head_dim": 8})
    assert (sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.rope_theta) == (9, 3, 8, 100000.0)
    fields = LLAMA.transformer_kwargs(sizes)
    assert fields["kv_channels"] == 8 and fields["num_query_groups"] == 3 and fields["layernorm_epsilon"] == 1e-5
    assert QWEN2.transformer_kwargs(sizes)["add_qkv_bias"] is True
    assert dimensions().head_dim == 6


def test_rope_theta_of_old_and_new_configs() -> None:
    new = {key: value for key, value in LLAMA_CONFIG.items() if key != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    assert LLAMA.dimensions(new).rope_theta == 500.0
    assert LLAMA.dimensions(LLAMA_CONFIG | {"rope_scaling": None}).rope_theta == 100000.0


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "RoPE scaling 'llama3'"),
        (LLAMA, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "RoPE scaling 'yarn'"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2}}, "RoPE scaling 'linear'"),
        (LLAMA, {"attention_bias": True}, "attention_bias=True is not supported: allowed is False"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: allowed is 'silu'"),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window=True"),
        (QWEN2, {"num_key_value_heads": 2}, "num_attention_heads=9 is not a multiple of num_key_value_heads=2"),
        (QWEN2, {"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_what_megatron_would_not_honour_is_refused(family: object, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        family.dimensions(LLAMA_CONFIG | change)


def test_registry() -> None:
    assert family_of({"architectures": ["Qwen2ForCausalLM"]}) is QWEN2
    assert family_of(LLAMA_CONFIG) is LLAMA
    known = "known are LlamaForCausalLM, Qwen2ForCausalLM"
    with pytest.raises(ValueError, match=f"'Qwen2ForCausal' is unknown: {known}; did you mean Qwen2ForCausalLM"):
        family_of({"architectures": ["Qwen2ForCausal"]})
    with pytest.raises(ValueError, match=f"names no architecture: {known}"):
        family_of({})


def test_sizes_of_real_models_give_their_published_number_of_parameters(shared: Path) -> None:
    models = json.loads((shared / "model_configs.json").read_text())
    checked = 0
    for name, entry in models.items():
        if entry["hf_config"]["architectures"] != ["Qwen2ForCausalLM"]:
            continue
        sizes = QWEN2.dimensions(entry["hf_config"])
        h, d = sizes.hidden_size, sizes.head_dim
        heads = sizes.heads + 2 * sizes.kv_heads
        layer = h * d * (heads + sizes.heads) + d * heads + 3 * h * sizes.ffn_hidden_size + 2 * h
        embeddings = sizes.vocab_size * h * (1 if sizes.tied_embeddings else 2)
        total = sizes.layers * layer + embeddings + h
        assert total == entry["parameters_counted_with_transformers_5.19.0"], name
        checked += 1
    assert checked >= 3


def test_rope_scaling_of_a_real_model_is_refused(shared: Path) -> None:
    models = json.loads((shared / "model_configs.json").read_text())
    with pytest.raises(ValueError, match="RoPE scaling 'llama3' is not supported"):
        LLAMA.dimensions(models["Llama-3.1-8B"]["hf_config"])
