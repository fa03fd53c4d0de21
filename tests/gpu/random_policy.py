"""A Qwen2-shaped policy with seeded random weights that never touches the disk, and samples for it: these tests need
nothing but torch and megatron-core."""

from __future__ import annotations

import socket
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dapo_megatron.config.schema import Config
from dapo_megatron.data.types import TrainingSample
from dapo_megatron.models.family import Dimensions, Family
from dapo_megatron.models.registry import family_of

TENTH_OF_A_BILLION = {"layers": 8, "hidden_size": 768, "heads": 12, "kv_heads": 4, "vocab_size": 16384}
"""Sizes of a RandomPolicy of 80 million parameters."""


class RandomPolicy:
    """What MegatronActor asks of an HF folder."""

    def __init__(self, layers: int, hidden_size: int, heads: int, kv_heads: int, vocab_size: int) -> None:
        self.path = Path("random")
        self.config: dict[str, Any] = {
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": hidden_size,
            "intermediate_size": 3 * hidden_size,
            "max_position_embeddings": 32768,
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": vocab_size,
        }
        self._shapes = self._all_shapes()

    @property
    def family(self) -> Family:
        return family_of(self.config)

    @property
    def dimensions(self) -> Dimensions:
        return self.family.dimensions(self.config)

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        """The same values wherever it is called: every tensor has a generator of its own, on the CPU."""
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(self._shapes[name], generator=generator)[part]
        if "norm" in name:
            return 1 + 0.1 * values
        if "embed_tokens" in name:
            return values
        # As Megatron initialises what is added to the residual stream: else rounding errors grow with every layer.
        adds = "o_proj" in name or "down_proj" in name
        return values * (self.config["hidden_size"] * (2 * self.config["num_hidden_layers"] if adds else 1)) ** -0.5

    def _all_shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        hidden, ffn = c["hidden_size"], c["intermediate_size"]
        kv = hidden // c["num_attention_heads"] * c["num_key_value_heads"]
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
        for layer in range(c["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
                shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, hidden)
                shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (rows,)
            shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, hidden)
            shapes[f"{prefix}.mlp.gate_proj.weight"] = shapes[f"{prefix}.mlp.up_proj.weight"] = (ffn, hidden)
            shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, ffn)
            shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (c["vocab_size"], hidden)}


def samples(count: int, response_tokens: int, vocab_size: int, seed: int = 0) -> list[TrainingSample]:
    """Ragged samples with advantages and token-mean weights; old log-probs are left to the caller."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        prompt, response = int(rng.integers(8, 33)), int(rng.integers(response_tokens // 2, response_tokens + 1))
        found.append(
            TrainingSample(rng.integers(0, vocab_size, prompt + response), prompt, advantage=float(rng.normal()))
        )
    total = sum(sample.response_tokens for sample in found)
    for sample in found:
        sample.loss_weight = 1 / total
    return found


def configuration(params_dtype: str) -> Config:
    config = Config()
    config.precision.params_dtype = config.precision.rollout_dtype = params_dtype
    config.optimizer.warmup_steps = 0
    config.optimizer.lr = 1e-4
    config.trainer.seed = 1
    return config


def actor_alone(config: Config, policy: RandomPolicy) -> Any:
    """A MegatronActor that is the only rank; all such actors of a process share the process groups of the first."""
    from dapo_megatron.megatron.actor import MegatronActor

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"rank": 0, "world_size": 1, "master_address": "127.0.0.1", "master_port": port}
    return MegatronActor(config, policy, **place)  # type: ignore[arg-type]
