"""Makes what the quick start trains on: the problems, and a base policy that solves a third of them.

    python examples/quickstart/prepare.py [--folder .cache/quickstart]

The folder gets train.jsonl and heldout.jsonl (rows in DAPO-Math-17k's schema; no held-out problem is ever shown to
the policy, in either order of its operands), base/ (an HF folder: a Qwen2 model of 0.7M parameters with its tokenizer)
and prepared.json (settings, and the accuracy of the base), which is written last. Everything follows from the settings
and seeds; a folder made with the same settings by the same scripts is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import task
import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

logger = logging.getLogger(__name__)

ACCURACY_RANGE = (0.20, 0.50)
"""Allowed accuracy of the base at temperature 1: below, few groups carry signal; above, there is little to learn."""

IGNORED = -100
"""Label of the tokens that the supervised loss leaves out (HF's convention)."""


@dataclass(frozen=True)
class Settings:
    """All that the result depends on.

    Attributes:
        max_digits: longest operand.
        train_problems: number of rows of train.jsonl.
        heldout_problems: number of rows of heldout.jsonl.
        sloppiness: what is wrong with the demonstrations of the warm start.
        max_response_tokens: the longest response that is sampled to measure the base.
        samples_per_problem: k of its mean@k.
        hidden_size, intermediate_size, layers, heads, key_value_heads, window_tokens, rope_theta, initializer_range:
            the model.
        steps, batch_size, peak_lr, warmup_steps, weight_decay: the warm start (AdamW, cosine decay to a tenth).
        threads: CPU threads; another number may change the last bits.
        seed: of everything random.
    """

    max_digits: int = 4
    train_problems: int = 8192
    heldout_problems: int = 256
    sloppiness: task.Sloppiness = field(default_factory=lambda: task.Sloppiness(wrong_column=0.2, written_twice=0.1))
    max_response_tokens: int = 80
    samples_per_problem: int = 4
    hidden_size: int = 128
    intermediate_size: int = 320
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    window_tokens: int = 128
    rope_theta: float = 30.0
    initializer_range: float = 0.08
    steps: int = 900
    batch_size: int = 32
    peak_lr: float = 3e-3
    warmup_steps: int = 20
    weight_decay: float = 0.01
    threads: int = 1
    seed: int = 17

    def key(self) -> str:
        """Digest of the settings and of the scripts that turn them into files."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for source in (Path(__file__), Path(task.__file__)):
            digest.update(source.read_bytes())
        return digest.hexdigest()


def build_model(settings: Settings, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """A fresh model, fp32, with untied embeddings."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.key_value_heads,
        max_position_embeddings=settings.window_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        initializer_range=settings.initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    # Greedy, and no sampling defaults: an engine that reads this file must not change what a run asks for.
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    return model


def supervised_batch(
    problems: Sequence[task.Problem], random: Random, settings: Settings, tokenizer: Qwen2Tokenizer
) -> dict[str, torch.Tensor]:
    """Sloppy demonstrations of `problems`, padded on the right; input_ids, attention_mask and labels are [B, T]."""
    responses = [task.demonstration(problem, random, settings.sloppiness) + task.EOS for problem in problems]
    batch = tokenizer(
        [problem.prompt + response for problem, response in zip(problems, responses, strict=True)],
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    for row, problem in enumerate(problems):
        labels[row, : len(problem.prompt)] = IGNORED
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}


def warm_start(
    model: Qwen2ForCausalLM, heldout: Sequence[task.Problem], settings: Settings, tokenizer: Qwen2Tokenizer
) -> None:
    """Train `model` in place on sloppy demonstrations of problems that are not held out."""
    random = Random(settings.seed + 1)
    forbidden = {problem.operands for problem in heldout}
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.peak_lr, weight_decay=settings.weight_decay)

    def lr_scale(step: int) -> float:
        progress = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
        decayed = 0.55 + 0.45 * math.cos(math.pi * max(0.0, progress))
        return min((step + 1) / settings.warmup_steps, decayed)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_scale)
    model.train()
    for step in range(1, settings.steps + 1):
        problems: list[task.Problem] = []
        while len(problems) < settings.batch_size:
            problem = task.random_problem(random, settings.max_digits)
            if problem.operands not in forbidden:
                problems.append(problem)
        loss = model(**supervised_batch(problems, random, settings, tokenizer)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            logger.info("warm start: step %d of %d, loss %.3f", step, settings.steps, loss.item())
    model.eval()


@torch.no_grad()
def accuracy(
    model: Qwen2ForCausalLM,
    problems: Sequence[task.Problem],
    tokenizer: Qwen2Tokenizer,
    *,
    samples_per_problem: int,
    max_response_tokens: int,
    sampled: bool,
) -> float:
    """Fraction of right responses, sampled at temperature 1 or greedy. Uses torch's global random state."""
    prompts = tokenizer([problem.prompt for problem in problems], padding=True, return_tensors="pt")
    right = 0
    for _ in range(samples_per_problem):
        # top_k=0: HF's default would cut the distribution at 50 tokens.
        output = model.generate(
            input_ids=prompts["input_ids"],
            attention_mask=prompts["attention_mask"],
            do_sample=sampled,
            top_k=0 if sampled else None,
            max_new_tokens=max_response_tokens,
        )
        responses = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(
            response.rpartition("Answer:")[2].strip() == problem.ground_truth
            for response, problem in zip(responses, problems, strict=True)
        )
    return right / (samples_per_problem * len(problems))


def write_rows(path: Path, problems: Sequence[task.Problem], first_index: int) -> None:
    """Write problems as JSONL, numbered from `first_index`."""
    rows = (task.as_row(problem, index) for index, problem in enumerate(problems, first_index))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(folder: Path, settings: Settings) -> bool:
    """Fill `folder`; returns False, having done nothing, where it already holds the result of these settings.

    Raises:
        RuntimeError: the base policy came out too weak or too strong to learn from.
    """
    manifest = folder / "prepared.json"
    if manifest.is_file() and json.loads(manifest.read_text())["key"] == settings.key():
        logger.info("%s is up to date: nothing to prepare", folder)
        return False

    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    manifest.unlink(missing_ok=True)
    train, heldout = task.split_problems(
        Random(settings.seed), settings.max_digits, settings.train_problems, settings.heldout_problems
    )
    write_rows(folder / "train.jsonl", train, 0)
    write_rows(folder / "heldout.jsonl", heldout, len(train))

    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(settings.seed)
    tokenizer = task.build_tokenizer()
    model = build_model(settings, tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    logger.info("warm start of a %.2fM-parameter policy: %d steps", parameters / 1e6, settings.steps)
    warm_start(model, heldout, settings, tokenizer)

    limit = settings.max_response_tokens
    k = settings.samples_per_problem
    greedy = accuracy(model, heldout, tokenizer, samples_per_problem=1, max_response_tokens=limit, sampled=False)
    sampled = accuracy(model, heldout, tokenizer, samples_per_problem=k, max_response_tokens=limit, sampled=True)
    logger.info(
        "base policy on %d held-out problems: mean@%d %.1f%% at temperature 1, %.1f%% greedy",
        len(heldout),
        k,
        100 * sampled,
        100 * greedy,
    )
    low, high = ACCURACY_RANGE
    if not low <= sampled <= high:
        raise RuntimeError(
            f"the base policy solves {sampled:.1%} of the held-out problems at temperature 1, not {low:.0%} to "
            f"{high:.0%}: change Settings.steps (now {settings.steps}) or Settings.sloppiness ({settings.sloppiness})"
        )

    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    record = {"key": settings.key(), "accuracy_sampled": sampled, "accuracy_greedy": greedy, "parameters": parameters}
    manifest.write_text(json.dumps(record | {"settings": asdict(settings)}, indent=2) + "\n")
    logger.info("prepared %s in %.0f s", folder, time.monotonic() - started)
    return True


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make the quick start's problems and base policy.")
    parser.add_argument("--folder", type=Path, default=Path(".cache/quickstart"), help="default: %(default)s")
    prepare(parser.parse_args().folder, Settings())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main()
