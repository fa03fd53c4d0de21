"""The product as a user runs it: the command line in a process of its own, on a small random policy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.conftest import PROJECT_ROOT

sys.path.insert(0, str(PROJECT_ROOT / "examples" / "quickstart"))

Command = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that replace the quick start's policy and problems by small ones."""
    import task

    folder = tmp_path_factory.mktemp("problems")
    tokenizer = task.build_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    rows = [
        {"prompt": f"{i}+{i + 3}=", "reward_model": {"ground_truth": str(2 * i + 3)}, "extra_info": {"index": i}}
        for i in range(64)
    ]
    for name, part in (("train", rows[:48]), ("heldout", rows[48:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return [
        f"model.path={folder / 'base'}",
        f"data.train.path={folder / 'train.jsonl'}",
        f"evaluation.sets.heldout.dataset.path={folder / 'heldout.jsonl'}",
        "reward.scorer=tests.e2e.rewards:starts_with_a_digit",
        "rollout.max_response_tokens=24",
        "algorithm.overlong.buffer_tokens=8",
        "algorithm.filtering.max_prompts_per_step=32",
        "optimizer.lr=1e-2",
        "optimizer.warmup_steps=0",
        "trainer.train_batch_size=8",
        "trainer.update_batch_size=64",
        "evaluation.every_steps=null",
        "cluster.cpu_threads_per_actor=1",
        "rollout.cpu_threads=1",
    ]


def environment() -> dict[str, str]:
    """The process's own, with the tests importable (reward functions are named by import path)."""
    return os.environ | {"PYTHONPATH": str(PROJECT_ROOT), "RAY_DEDUP_LOGS": "1"}


@pytest.fixture(scope="session")
def command() -> Command:
    """Run `dapo-megatron ARGS`; fails the test with its output if it does not exit with 0."""

    def run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "dapo_megatron.cli", *arguments],
            cwd=PROJECT_ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        return done

    return run
