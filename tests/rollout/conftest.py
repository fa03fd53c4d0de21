"""Engines for the session, each with a policy that it was started from: untied Qwen2, tied Llama, Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dapo_megatron.config.schema import Config, SamplingConfig
from dapo_megatron.data.types import Sample
from tests.rollout.engine_process import EngineProcess

CHARACTERS = "0123456789+=:; abcdefghijklmnopqrstuvwxyz."
SPECIAL_TOKENS = ["<eos>", "<pad>", "<unk>", "<end>"]
VOCAB = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
EOS_IDS = {VOCAB["<eos>"], VOCAB["<end>"]}
STOP = "="
"""Only the Llama engine stops at this string."""

MAX_PROMPT_TOKENS = 280
MAX_RESPONSE_TOKENS = 24


LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 64,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,  # vLLM's CPU attention knows 512 + 64 alone
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 40,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""Latent attention, dense and routed layers, shared experts and a bias of the router."""


@dataclass
class Policy:
    """An engine and the HF model whose weights it should have."""

    process: EngineProcess
    model: PreTrainedModel

    def generate(
        self, prompt: Sequence[int], seeds: Sequence[int], temperature: float = 1.0, top_p: float = 1.0
    ) -> list[Sample]:
        """See RolloutEngine.generate."""
        sampling = SamplingConfig(temperature=temperature, top_p=top_p)
        samples: list[Sample] = self.process.call("generate", prompt, seeds, sampling)
        return samples

    @torch.no_grad()
    def log_probs(self, prompt: Sequence[int], sample: Sample, temperature: float = 1.0) -> torch.Tensor:
        """[R, V]: the model's log-probs at every response position of one sequence, the plain way."""
        tokens = torch.tensor([[*prompt, *sample.token_ids]])
        logits = self.model(tokens).logits[0, len(prompt) - 1 : -1]
        return (logits / temperature).log_softmax(-1)

    def log_prob_error(self, prompt: Sequence[int], sample: Sample, temperature: float = 1.0) -> float:
        """Largest difference between the engine's log-probs and the model's."""
        rows = self.log_probs(prompt, sample, temperature)
        expected = rows.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        return (expected - torch.tensor(sample.log_probs)).abs().max().item()


def prompt_of(length: int, start: int = 0) -> list[int]:
    """A prompt that differs from others with another start at its first token."""
    return [len(SPECIAL_TOKENS) + (start + 7 * i) % len(CHARACTERS) for i in range(length)]


def make_folder(
    folder: Path, family: str, dtype: torch.dtype = torch.float32, **sizes: int
) -> tuple[str, PreTrainedModel]:
    """A tiny model whose every parameter is far from its neutral value, a character tokenizer, two EOS ids."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(VOCAB),
        "hidden_size": 128 if family == "qwen2" else 96,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "eos_token_id": VOCAB["<eos>"],
    } | sizes
    if family == "qwen2":
        model: PreTrainedModel = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=False))
    elif family == "qwen3_moe":
        experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, tie_word_embeddings=False))
    elif family == "mixtral":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
        model = MixtralForCausalLM(MixtralConfig(**sizes, **experts, tie_word_embeddings=False))
    elif family == "deepseek_v3":
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes | LATENT, tie_word_embeddings=False))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    randomize(model)
    model.to(dtype)
    model.generation_config = GenerationConfig(eos_token_id=sorted(EOS_IDS), temperature=0.1, do_sample=True)
    model.eval().save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<end>"],
    ).save_pretrained(folder)
    return str(folder), model


@torch.no_grad()
def randomize(model: PreTrainedModel) -> None:
    """Draw every parameter anew."""
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name:
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)


def engine_config() -> Config:
    """Room for 24 blocks of 128 tokens, so that many long prompts preempt one another."""
    config = Config()
    config.precision.rollout_dtype = "float32"
    config.data.max_prompt_tokens = MAX_PROMPT_TOKENS
    config.rollout.max_response_tokens = MAX_RESPONSE_TOKENS
    config.rollout.max_concurrent_samples = 64
    block_bytes = 128 * 2 * 3 * 2 * 32 * 4
    config.rollout.kv_cache_bytes = 24 * block_bytes
    config.rollout.cpu_threads = 1
    return config


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Policy]]:
    """All engines, started side by side. Beside busy engines, one thread is the fastest for the HF models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    started = {}
    for family in ("qwen2", "llama", "qwen3_moe"):
        folder, model = make_folder(tmp_path_factory.mktemp(family), family)
        config = engine_config()
        config.rollout.stop = [STOP] if family == "llama" else []
        started[family] = Policy(EngineProcess(config, folder), model)
    try:
        for policy in started.values():
            policy.process.wait_until_started()
        yield started
    finally:
        torch.set_num_threads(threads)
        for policy in started.values():
            policy.process.stop()


@pytest.fixture(params=["qwen2", "llama"])
def policy(request: pytest.FixtureRequest, policies: dict[str, Policy]) -> Policy:
    """Each dense engine in turn."""
    return policies[request.param]


@pytest.fixture
def untied(policies: dict[str, Policy]) -> Policy:
    """The Qwen2 engine."""
    return policies["qwen2"]
