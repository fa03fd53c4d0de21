"""The sizes of a model from its HF config, key by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dapo_megatron.models.dimensions import Latent, Yarn

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's Llama 3 RoPE has built in; Llama 3.1, 3.2 and 3.3 all have these."""


def require(hf_config: Mapping[str, Any], *keys: str) -> list[Any]:
    """The values of keys.

    Raises:
        ValueError: keys that the config lacks, all of them.
    """
    missing = [key for key in keys if hf_config.get(key) is None]
    if missing:
        raise ValueError(f"the HF config lacks {', '.join(missing)}")
    return [hf_config[key] for key in keys]


def allow_only(hf_config: Mapping[str, Any], only: Mapping[str, Sequence[Any]]) -> None:
    """Check the keys that the config has.

    Raises:
        ValueError: a value that is not allowed.
    """
    for key, allowed in only.items():
        value = hf_config.get(key)
        if value is not None and value not in allowed:
            raise ValueError(f"HF config {key}={value!r} is not supported: allowed is {_one_of(allowed)}")


def rope_sizes(hf_config: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """RoPE's fields of Dimensions.

    transformers 5 keeps all of RoPE in `rope_parameters`; before, `rope_theta` stood beside `rope_scaling`.

    Raises:
        ValueError: a kind of scaling that is not among `kinds`, or values of it that Megatron does not honour.
    """
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in kinds:
        raise ValueError(f"RoPE scaling {kind!r} is not supported here: allowed is {_one_of(kinds)}")
    sizes: dict[str, Any] = {"rope_theta": float(rope.get("rope_theta") or hf_config.get("rope_theta") or 10000.0)}
    if kind == "llama3":
        allow_only(rope, {key: (value,) for key, value in _LLAMA3.items()})
        sizes["llama3_rope_factor"] = float(*require(rope, "factor"))
    if kind == "yarn":
        sizes["yarn"] = _yarn(rope)
    return sizes


def _yarn(rope: Mapping[str, Any]) -> Yarn:
    allow_only(rope, {"attention_factor": (), "truncate": (True,)})
    factor, original = require(rope, "factor", "original_max_position_embeddings")
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if bool(mscale) != bool(mscale_all_dim):
        raise ValueError(
            f"RoPE scaling 'yarn' with mscale={mscale} and mscale_all_dim={mscale_all_dim} is not supported: allowed "
            "are both or none"
        )
    return Yarn(
        factor=float(factor),
        original_max_position_embeddings=original,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        # Without either transformers scales cosines and sines as if mscale were 1, and the scores not at all.
        mscale=float(mscale or 1),
        mscale_all_dim=float(mscale_all_dim or 0),
    )


def latent_sizes(hf_config: Mapping[str, Any]) -> Latent:
    """Multi-head latent attention.

    Raises:
        ValueError: a needed key is missing.
    """
    kv_rank, nope, rope, value = require(
        hf_config, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    )
    return Latent(hf_config.get("q_lora_rank"), kv_rank, nope, rope, value)


def expert_sizes(hf_config: Mapping[str, Any], width_key: str) -> dict[str, Any]:
    """The experts' fields of Dimensions.

    Args:
        width_key: under which the family's configs have the width of one expert.

    Raises:
        ValueError: a needed key is missing, or a value that Megatron would not honour.
    """
    # transformers 5 writes num_local_experts where older ones wrote the family's own name.
    count_keys = ("num_experts", "n_routed_experts", "num_local_experts")
    counts = {"num_experts": next((hf_config[key] for key in count_keys if hf_config.get(key)), None)}
    experts, chosen, width = require({**hf_config, **counts}, "num_experts", "num_experts_per_tok", width_key)
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
        "shared_ffn_hidden_size": (hf_config.get("n_shared_experts") or 0) * width,
        "dense_layers": hf_config.get("first_k_dense_replace") or 0,
        "expert_scale": float(hf_config.get("routed_scaling_factor") or 1),
        **_group_sizes(hf_config, experts, chosen),
    }


def _group_sizes(hf_config: Mapping[str, Any], experts: int, chosen: int) -> dict[str, int]:
    groups, groups_per_token = hf_config.get("n_group") or 1, hf_config.get("topk_group") or 1
    if groups == groups_per_token:
        return {}
    if experts % groups or groups_per_token > groups:
        raise ValueError(f"n_group={groups} with topk_group={groups_per_token} does not fit {experts} experts")
    # A group's score is the sum of its two best in transformers, of its chosen / groups_per_token best in Megatron.
    if chosen // groups_per_token != 2 or chosen > groups_per_token * (experts // groups):
        raise ValueError(
            f"num_experts_per_tok={chosen} is not supported with topk_group={groups_per_token} of n_group={groups}: "
            f"allowed are {2 * groups_per_token} and {2 * groups_per_token + 1}"
        )
    return {"expert_groups": groups, "groups_per_token": groups_per_token}


def _one_of(values: Sequence[Any]) -> str:
    return " or ".join(repr(value) for value in values) or "none"
