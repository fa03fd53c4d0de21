"""Update and log-prob pass of the packed actor against padded batches; prints JSON.

A Qwen2-shaped model with random weights and ragged samples (prompt of 16 to 64 tokens, response lognormal with median
160 and sigma 0.8, at most 768 tokens in all), on the CPU in float32. The same samples, the same loss (clipped policy
gradient, token mean), gradient clipping and fused AdamW, and the same cap on the tokens of a micro-batch, padding
included, in every contender:

  packed             the actor: whole sequences one behind the other
  padded             the actor on sequences padded to the longest of their micro-batch, in stream order
  hf                 a plain torch loop over the HF model: padded micro-batches with an attention mask, log_softmax over
                     all logits
  hf_sorted          the same with samples sorted by length, so that little is padded

Contenders take turns; times are medians, `over_packed` medians over turns. FLOP/s count what the model needs for the
real tokens (models/flops.py), so that they compare like the times. `difference` shows that both compute the same: the
relative one of the gradient norm, and that of the loss, of the actor and the HF loop at the first update.

    python benchmarks/actor.py [--threads 2] [--repeats 5]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from dapo_megatron.config.schema import ClipConfig, Config
from dapo_megatron.data.packing import plan_micro_batches
from dapo_megatron.data.types import TrainingSample
from dapo_megatron.models.flops import training_flops

SAMPLES, MAX_TOKENS, LONGEST_TOKENS = 20, 1024, 768
MEDIAN_RESPONSE_TOKENS, SIGMA = 160, 0.8
LEARNING_RATE, CLIP_GRAD = 1e-5, 1.0
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
MODEL = Qwen2Config(
    vocab_size=16384,
    hidden_size=384,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
)


def random_samples(rng: np.random.Generator) -> list[TrainingSample]:
    """Samples of one update under the token mean, with old log-probs near those of random weights."""
    prompts = rng.integers(16, 65, SAMPLES)
    responses = np.exp(rng.normal(math.log(MEDIAN_RESPONSE_TOKENS), SIGMA, SAMPLES)).astype(int)
    responses = np.clip(responses, 1, LONGEST_TOKENS - prompts)
    return [
        TrainingSample(
            token_ids=rng.integers(0, MODEL.vocab_size, prompt + response),
            prompt_tokens=int(prompt),
            trained=True,
            advantage=float(rng.normal()),
            loss_weight=1 / int(responses.sum()),
            old_log_probs=rng.normal(-math.log(MODEL.vocab_size), 0.1, response).astype(np.float32),
        )
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def padded_micro_batches(samples: list[TrainingSample]) -> list[list[TrainingSample]]:
    """Neighbours share a micro-batch while all of them fit under the cap, padded to the longest."""
    batches: list[list[TrainingSample]] = [[]]
    for sample in samples:
        longest = max(each.total_tokens for each in [*batches[-1], sample])
        if batches[-1] and (len(batches[-1]) + 1) * longest > MAX_TOKENS:
            batches.append([])
        batches[-1].append(sample)
    return batches


def with_padding(batch: list[TrainingSample]) -> list[TrainingSample]:
    """The same work for the packed actor: padding in front of the prompts, where it is not trained on."""
    longest = max(sample.total_tokens for sample in batch)
    padded = []
    for sample in batch:
        padding = longest - sample.total_tokens
        token_ids = np.concatenate([np.zeros(padding, sample.token_ids.dtype), sample.token_ids])
        padded.append(dataclasses.replace(sample, token_ids=token_ids, prompt_tokens=sample.prompt_tokens + padding))
    return padded


class HFLoop:
    """The policy-gradient loop that one would write around an HF model."""

    def __init__(self, folder: str) -> None:
        self._model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), weight_decay=0.1, fused=True
        )

    def log_probs(self, batch: list[TrainingSample]) -> torch.Tensor:
        """[samples, longest - 1], of every token given those before it."""
        longest = max(sample.total_tokens for sample in batch)
        tokens = torch.zeros(len(batch), longest, dtype=torch.long)
        attended = torch.zeros_like(tokens)
        for row, sample in enumerate(batch):
            tokens[row, : sample.total_tokens] = torch.from_numpy(sample.token_ids)
            attended[row, : sample.total_tokens] = 1
        logits = self._model(tokens, attention_mask=attended, use_cache=False).logits[:, :-1]
        return logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]

    def update(self, batches: list[list[TrainingSample]]) -> tuple[float, float]:
        """(loss, gradient norm)."""
        total = 0.0
        self._optimizer.zero_grad()
        for batch in batches:
            log_probs = self.log_probs(batch)
            old, advantages, weights = (torch.zeros_like(log_probs) for _ in range(3))
            for row, sample in enumerate(batch):
                response = slice(sample.prompt_tokens - 1, sample.total_tokens - 1)
                old[row, response] = torch.from_numpy(sample.old_log_probs)
                advantages[row, response] = sample.advantage
                weights[row, response] = sample.loss_weight
            ratio = (log_probs - old).where(weights > 0, 0).exp()
            loss = (
                weights * torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH))
            ).sum()
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP_GRAD)
        self._optimizer.step()
        return total, norm.item()

    @torch.no_grad()
    def score(self, batches: list[list[TrainingSample]]) -> None:
        """The log-prob pass."""
        for batch in batches:
            self.log_probs(batch)


def make_actor(folder: str, threads: int) -> Any:
    """The actor of this package alone in this process."""
    from dapo_megatron.megatron.actor import MegatronActor

    config = Config()
    config.precision.params_dtype = config.precision.rollout_dtype = "float32"
    config.cluster.cpu_threads_per_actor = threads
    config.optimizer.lr, config.optimizer.warmup_steps, config.optimizer.clip_grad = LEARNING_RATE, 0, CLIP_GRAD
    config.algorithm.clip = ClipConfig(CLIP_LOW, CLIP_HIGH, dual=None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return MegatronActor(config, folder, rank=0, world_size=1, master_address="127.0.0.1", master_port=port)


def measure(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Median seconds of each, and the median over turns of its time over that of the first in the same turn."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    first = next(iter(seconds.values()))
    over_first = {name: [a / b for a, b in zip(each, first, strict=True)] for name, each in seconds.items()}
    return {
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "over_packed": {name: statistics.median(each) for name, each in over_first.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    samples = random_samples(np.random.default_rng(arguments.seed))
    lengths = [sample.total_tokens for sample in samples]
    packed = [[samples[i] for i in members] for members in plan_micro_batches(lengths, 1, MAX_TOKENS)[0]]
    in_order = padded_micro_batches(samples)
    by_length = padded_micro_batches(sorted(samples, key=lambda sample: sample.total_tokens))
    padded = [with_padding(batch) for batch in in_order]
    with tempfile.TemporaryDirectory() as folder:
        Qwen2ForCausalLM(MODEL).save_pretrained(folder)
        hf = HFLoop(folder)
        actor = make_actor(folder, arguments.threads)

    # The first update of each warms up, and shows that they compute the same.
    result, (loss, norm) = actor.update(packed, step=1), hf.update(in_order)
    difference = {"grad_norm": abs(result["grad_norm"] / norm - 1), "loss": abs(result["loss"] - loss)}

    update = measure(
        {
            "packed": lambda: actor.update(packed, step=1),
            "padded": lambda: actor.update(padded, step=1),
            "hf": lambda: hf.update(in_order),
            "hf_sorted": lambda: hf.update(by_length),
        },
        arguments.repeats,
    )
    log_probs = measure(
        {
            "packed": lambda: actor.log_probs(packed),
            "padded": lambda: actor.log_probs(padded),
            "hf": lambda: hf.score(in_order),
            "hf_sorted": lambda: hf.score(by_length),
        },
        arguments.repeats,
    )
    flops = training_flops(actor.dimensions, lengths)
    computed = {
        name: sum(len(batch) * max(sample.total_tokens for sample in batch) for batch in batches)
        for name, batches in {"packed": [[s] for s in samples], "hf": in_order, "hf_sorted": by_length}.items()
    }
    rates = {name: sum(lengths) / each for name, each in update["seconds"].items()}
    update["tokens_per_s"] = rates
    update["gflop_per_s"] = {name: rate * flops / sum(lengths) / 1e9 for name, rate in rates.items()}
    report = {
        "tokens_with_padding": computed,
        "difference": difference,
        "targets": {"update over_packed hf": 1.0},
        "update": update,
        "log_probs": log_probs,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
