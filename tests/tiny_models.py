"""Tiny HF models with random weights and deliberately unequal sizes, and samples for them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dapo_megatron.config.schema import Config, ParallelConfig
from dapo_megatron.data.types import TrainingSample

VOCAB_SIZE = 37
FAMILIES = "llama llama2 llama31 mistral mixtral qwen2 qwen3 qwen3_moe deepseek_v3 moonlight".split()

# Of the five frequencies of the tiny heads two are as they were, one is between, and two are stretched.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 9e6,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 16,
}


def tiny_model(family: str, tied: bool = False, seed: int = 0, layers: int | None = None) -> PreTrainedModel:
    """A float32 model whose every parameter is far from its neutral value; head_dim is not hidden_size / heads.

    Names: FAMILIES; llama has two layers unless told, the others three.
    The tied mixtures of experts do not normalise their router.
    """
    torch.manual_seed(seed)
    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (LlamaConfig, LlamaForCausalLM, _LLAMA),
        "llama2": (
            LlamaConfig,
            LlamaForCausalLM,
            _LLAMA | {"num_key_value_heads": 9, "head_dim": 6, "rope_parameters": {"rope_theta": 1e4}},
        ),
        "llama31": (LlamaConfig, LlamaForCausalLM, _QWEN | {"hidden_size": 48, "rope_parameters": LLAMA3_ROPE}),
        "mistral": (MistralConfig, MistralForCausalLM, _QWEN | {"sliding_window": 96, "rms_norm_eps": 1e-5}),
        "mixtral": (
            MixtralConfig,
            MixtralForCausalLM,
            _QWEN | {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 3},
        ),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM, _QWEN),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM, _QWEN),
        "qwen3_moe": (
            Qwen3MoeConfig,
            Qwen3MoeForCausalLM,
            _QWEN
            | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "norm_topk_prob": not tied},
        ),
        "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM, _DEEPSEEK),
        "moonlight": (DeepseekV3Config, DeepseekV3ForCausalLM, _DEEPSEEK | _MOONLIGHT),
    }
    config_class, model_class, sizes = kinds[family]
    layers = layers or (2 if family == "llama" else 3)
    config = config_class(**sizes, num_hidden_layers=layers, tie_word_embeddings=tied, max_position_embeddings=128)
    return _randomised(model_class(config))


def _randomised(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    return model.eval()


_LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 54,
    "intermediate_size": 72,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}
_QWEN = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_DEEPSEEK = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 40,
    "intermediate_size": 56,
    "moe_intermediate_size": 28,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 18,
    "kv_lora_rank": 22,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_parameters": YARN,
}
_MOONLIGHT = {
    "q_lora_rank": None,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}


def save(model: PreTrainedModel, folder: Path) -> str:
    """Write the model as an HF folder."""
    model.save_pretrained(folder)
    return str(folder)


def tiny_config(**optimizer: object) -> Config:
    """Float32, one thread, no warm-up."""
    config = Config()
    config.precision.params_dtype = config.precision.rollout_dtype = "float32"
    config.cluster.cpu_threads_per_actor = 1
    config.optimizer.lr = 1e-2
    config.optimizer.warmup_steps = 0
    for name, value in optimizer.items():
        setattr(config.optimizer, name, value)
    return config


def random_samples(count: int, seed: int = 0) -> list[TrainingSample]:
    """Ragged samples; one has a single response token, one is not trained (overlong filtering)."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        prompt, response = int(rng.integers(1, 9)), 1 if i == 1 else int(rng.integers(2, 40))
        samples.append(
            TrainingSample(
                token_ids=rng.integers(0, VOCAB_SIZE, prompt + response),
                prompt_tokens=prompt,
                trained=i != 2,
                advantage=float(rng.normal()),
                loss_weight=0.0 if i == 2 else float(rng.uniform(0.5, 1.5)) / (20 * count),
                old_log_probs=rng.normal(-3, 0.5, response).astype(np.float32),
                correction_weights=rng.uniform(0, 2, response).astype(np.float32),
            )
        )
    return samples


def hf_log_probs(
    model: PreTrainedModel, sample: TrainingSample, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the response tokens, the plain way: all logits of one sequence, log_softmax."""
    tokens = torch.from_numpy(sample.token_ids)
    logits = model(tokens[None]).logits[0, sample.prompt_tokens - 1 : -1] / temperature
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, tokens[sample.prompt_tokens :, None])[:, 0], entropy


def initialize_one_rank() -> None:
    """Process groups of a world of one in this process, once."""
    from dapo_megatron.megatron.actor import initialize_parallel

    initialize_parallel(ParallelConfig(), 0, 1, f"tcp://127.0.0.1:{_free_port()}")


def one_rank_actor(config: Config, folder: str) -> Any:
    """A MegatronActor alone in this process; all such actors share the process groups of the first."""
    from dapo_megatron.megatron.actor import MegatronActor

    place = {"rank": 0, "world_size": 1, "master_address": "127.0.0.1", "master_port": _free_port()}
    return MegatronActor(config, folder, **place)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def layout_model(name: str) -> PreTrainedModel:
    """Sizes that two tensor-parallel ranks and, but for `uneven`, four stages divide.

    Args:
        name: qwen2, `qwen2 tied`, `qwen2 uneven`, qwen3, qwen3_moe, deepseek_v3 or moonlight.
    """
    if name in ("deepseek_v3", "moonlight"):
        return tiny_model(name, layers=4)
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5 if name.endswith("uneven") else 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 128,
        "tie_word_embeddings": name.endswith("tied"),
    }
    model: PreTrainedModel
    if name.startswith("qwen2"):
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    elif name == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    return _randomised(model)
