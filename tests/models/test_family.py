from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.config.layout import ModelSizes, broken_rules
from dapo_megatron.config.schema import ParallelConfig
from dapo_megatron.models.deepseek_v3 import DEEPSEEK_V3
from dapo_megatron.models.dimensions import Dimensions, Latent
from dapo_megatron.models.family import Family
from dapo_megatron.models.llama import LLAMA
from dapo_megatron.models.qwen2 import QWEN2
from dapo_megatron.models.qwen3 import QWEN3, QWEN3_MOE
from dapo_megatron.models.registry import FAMILIES, family_of
from dapo_megatron.models.split import FusedGLU, FusedQKV, Parallel, Replicated, Vocabulary

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
def test_parts_fused_and_shards_unfused_are_the_identity(
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
        shards = [
            split.fuse([part[split.part(part.shape, rank, ranks)] for part in parts], sizes) for rank in range(ranks)
        ]
        full = split.unshard(shards)
        assert torch.equal(full, split.fuse(parts, sizes)), split
        for got, want in zip(split.unfuse(full, sizes), parts, strict=True):
            assert torch.equal(got, want), split


def test_glu_shards_hold_their_part_of_gate_and_up() -> None:
    parts = [torch.arange(4), torch.arange(10, 14)]
    shards = [
        FusedGLU().fuse([part[FusedGLU().part(part.shape, rank, 2)] for part in parts], dimensions())
        for rank in range(2)
    ]
    assert [shard.tolist() for shard in shards] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_the_vocabulary_is_cut_into_parts_of_its_padded_size() -> None:
    assert [Vocabulary().part((9, 7), rank, 4)[0] for rank in range(4)] == [
        slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 9),
    ]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architectures[0])
def test_a_table_names_every_tensor_once_layer_by_layer(family: Family) -> None:
    latent = Latent(18, 22, 10, 8, 12) if family.latent else None
    for tied in (False, True):
        sizes = dataclasses.replace(
            dimensions(layers=3, experts=2, dense_layers=1), tied_embeddings=tied, latent=latent
        )
        mappings = family.tensors(sizes)
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
        (LLAMA, {"rope_scaling": {"rope_type": "llama3"}}, "lacks factor"),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 2.0}},
            "high_freq_factor=2.0 is not supported: allowed is 4.0",
        ),
        (QWEN2, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "RoPE scaling 'llama3'"),
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
    assert family_of({"architectures": ["Qwen3MoeForCausalLM"]}) is QWEN3_MOE
    known = "known are DeepseekV3ForCausalLM, LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, "
    known += "Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM"
    with pytest.raises(ValueError, match=f"'Qwen2ForCausal' is unknown: {known}; did you mean Qwen2ForCausalLM"):
        family_of({"architectures": ["Qwen2ForCausal"]})
    with pytest.raises(ValueError, match=f"names no architecture: {known}"):
        family_of({})


MOE_CONFIG = LLAMA_CONFIG | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def test_experts_stand_one_after_the_other_in_their_layer() -> None:
    mappings = QWEN3_MOE.tensors(dataclasses.replace(QWEN3_MOE.dimensions(MOE_CONFIG), experts=2))
    names = [name for mapping in mappings for name in mapping.hf if name.startswith("model.layers.1.mlp")]
    prefix = "model.layers.1.mlp."
    assert [name.removeprefix(prefix).removesuffix(".weight") for name in names] == [
        "gate",
        *("experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj"),
        *("experts.1.gate_proj", "experts.1.up_proj", "experts.1.down_proj"),
    ]
    by_name = {mapping.megatron: mapping for mapping in mappings}
    expert = by_name["decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight"]
    assert expert.in_expert and expert.hf == (names[4], names[5])
    assert not by_name["decoder.layers.1.mlp.router.weight"].in_expert


def test_how_the_router_weighs_experts() -> None:
    sizes = QWEN3_MOE.dimensions(MOE_CONFIG)
    assert (sizes.experts, sizes.experts_per_token, sizes.moe_ffn_hidden_size) == (4, 2, 24)
    fields = QWEN3_MOE.transformer_kwargs(sizes)
    assert fields["num_moe_experts"] == 4 and fields["moe_router_topk"] == 2 and fields["moe_ffn_hidden_size"] == 24
    assert fields["qk_layernorm"] and fields["moe_router_pre_softmax"] is False
    unnormalised = QWEN3_MOE.dimensions(MOE_CONFIG | {"norm_topk_prob": False})
    assert QWEN3_MOE.transformer_kwargs(unnormalised)["moe_router_pre_softmax"] is True
    new = {key: value for key, value in MOE_CONFIG.items() if key != "num_experts"} | {"num_local_experts": 4}
    assert QWEN3_MOE.dimensions(new) == sizes
    assert "num_moe_experts" not in QWEN3.transformer_kwargs(QWEN3.dimensions(LLAMA_CONFIG))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported: allowed is \[\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported: allowed is 1"),
        ({"num_experts": None}, "lacks num_experts"),
        ({"moe_intermediate_size": None}, "lacks moe_intermediate_size"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than num_experts=4"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported with norm_topk_prob=True"),
    ],
)
def test_experts_that_megatron_would_not_honour_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QWEN3_MOE.dimensions(MOE_CONFIG | change)


LATENT_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 40,
    "intermediate_size": 56,
    "moe_intermediate_size": 28,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "vocab_size": 37,
    "q_lora_rank": 18,
    "kv_lora_rank": 22,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
}


def test_latent_attention_and_its_experts() -> None:
    sizes = DEEPSEEK_V3.dimensions(LATENT_CONFIG)
    assert sizes.latent == Latent(18, 22, 10, 8, 12) and sizes.head_dim == 18
    assert (sizes.shared_ffn_hidden_size, sizes.dense_layers, sizes.extra_layers) == (56, 1, 1)
    assert sizes.yarn is not None and (sizes.yarn.factor, sizes.yarn.beta_fast, sizes.yarn.mscale) == (40, 32, 1)
    fields = DEEPSEEK_V3.transformer_kwargs(sizes)
    assert fields["moe_layer_freq"] == [0, 1, 1] and fields["moe_router_score_function"] == "sigmoid"
    assert (fields["moe_router_num_groups"], fields["moe_router_group_topk"]) == (4, 2)
    assert fields["moe_router_topk_scaling_factor"] == 2.5
    assert DEEPSEEK_V3.is_ignored("model.layers.3.eh_proj.weight", sizes)
    assert not DEEPSEEK_V3.is_ignored("model.layers.2.eh_proj.weight", sizes)
    assert not DEEPSEEK_V3.is_ignored("model.layers.4.eh_proj.weight", sizes)
    names = {name for mapping in DEEPSEEK_V3.tensors(sizes) for name in mapping.hf}
    assert "model.layers.0.mlp.gate_proj.weight" in names and "model.layers.1.mlp.gate_proj.weight" not in names
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names
    assert "model.layers.0.self_attn.q_a_proj.weight" in names
    direct = DEEPSEEK_V3.dimensions(LATENT_CONFIG | {"q_lora_rank": None})
    names = {name for mapping in DEEPSEEK_V3.tensors(direct) for name in mapping.hf}
    assert "model.layers.0.self_attn.q_proj.weight" in names and "model.layers.0.self_attn.q_a_proj.weight" not in names


def test_tensor_parallel_ranks_divide_the_shared_experts() -> None:
    sizes = ModelSizes.of(LATENT_CONFIG | {"num_attention_heads": 16, "intermediate_size": 64})
    assert sizes is not None
    expected = ["parallel.tensor=16 does not divide the model's 56 columns of the shared experts"]
    assert broken_rules(ParallelConfig(tensor=16, sequence_parallel=True), sizes) == expected
    assert broken_rules(ParallelConfig(tensor=8, sequence_parallel=True), sizes) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": 3}, "n_group=3 with topk_group=2 does not fit 8 experts"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok=6 is not supported with topk_group=2 of n_group=4.*4 and 5"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
        ({"kv_lora_rank": None}, "lacks kv_lora_rank"),
        (
            {"rope_scaling": LATENT_CONFIG["rope_scaling"] | {"mscale": 1.0}},
            "mscale=1.0 and mscale_all_dim=None is not supported: allowed are both or none",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "lacks original_max_position_embeddings"),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "RoPE scaling 'linear'"),
    ],
)
def test_latent_models_that_megatron_would_not_honour_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DEEPSEEK_V3.dimensions(LATENT_CONFIG | change)
