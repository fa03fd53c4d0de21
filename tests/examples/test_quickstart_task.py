"""The quick start's task and what is prepared for it: problems, demonstrations, tokenizer, files."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo_megatron.config.compose import load_config
from dapo_megatron.reward.dapo_rule import judge
from tests.conftest import PROJECT_ROOT

sys.path.insert(0, str(PROJECT_ROOT / "examples" / "quickstart"))
task: Any = importlib.import_module("task")
prepare: Any = importlib.import_module("prepare")

numbers = st.integers(0, 9999)
seeds = st.integers(0, 2**32)
SLOPPY = task.Sloppiness(wrong_column=0.5, written_twice=0.5)
COLUMN = re.compile(r"(\d)\+(\d)(\+1)?=(\d+);")


@given(numbers, numbers, seeds)
def test_a_careful_demonstration_is_right_in_every_column(left: int, right: int, seed: int) -> None:
    problem = task.Problem(left, right)
    response = task.demonstration(problem, Random(seed))
    columns = COLUMN.findall(response)
    assert len(columns) == max(len(str(left)), len(str(right)))
    for above, below, carry, column_sum in columns:
        assert int(above) + int(below) + bool(carry) == int(column_sum)
    assert judge(response, problem.ground_truth).kind == "right"


@given(numbers, numbers, seeds)
def test_a_wrong_column_goes_on_into_the_answer(left: int, right: int, seed: int) -> None:
    problem = task.Problem(left, right)
    response = task.demonstration(problem, Random(seed), task.Sloppiness(wrong_column=1.0))
    sums = [column_sum for *_, column_sum in COLUMN.findall(response)]
    answer = sums[-1] + "".join(column_sum[-1] for column_sum in reversed(sums[:-1]))
    verdict = judge(response, problem.ground_truth)
    assert (verdict.kind, verdict.extracted) == ("wrong", answer)


@given(numbers, numbers, seeds)
def test_working_written_twice_is_the_same_text_twice(left: int, right: int, seed: int) -> None:
    problem = task.Problem(left, right)
    once, twice = (task.demonstration(problem, Random(seed), task.Sloppiness(0.0, share)) for share in (0.0, 1.0))
    working, answer = once.split("\n")
    assert twice == f"{working}\n{working}\n{answer}"


def test_sloppiness_is_as_frequent_as_said() -> None:
    random = Random(0)
    problems = [task.random_problem(random, 4) for _ in range(4000)]
    responses = [task.demonstration(problem, random, task.Sloppiness(0.2, 0.1)) for problem in problems]
    workings = [response.split("\n") for response in responses]
    assert sum(len(lines) == 3 for lines in workings) / 4000 == pytest.approx(0.1, abs=0.02)
    columns = [column for lines in workings for column in COLUMN.findall(lines[0])]
    wrong = sum(int(above) + int(below) + bool(carry) != int(total) for above, below, carry, total in columns)
    assert wrong / len(columns) == pytest.approx(0.2, abs=0.02)


@given(seeds, st.integers(2, 5), st.integers(1, 60), st.integers(1, 20))
def test_no_problem_is_drawn_twice_in_either_order(seed: int, max_digits: int, train: int, heldout: int) -> None:
    for_training, held_out = task.split_problems(Random(seed), max_digits, train, heldout)
    assert (len(for_training), len(held_out)) == (train, heldout)
    assert len({frozenset((problem.left, problem.right)) for problem in for_training + held_out}) == train + heldout
    assert all(problem.left < 10**max_digits > problem.right for problem in for_training + held_out)
    assert (for_training, held_out) == task.split_problems(Random(seed), max_digits, train, heldout)


def test_lengths_of_numbers_are_equally_likely() -> None:
    random = Random(0)
    lengths = [len(str(task.random_problem(random, 4).left)) for _ in range(4000)]
    assert all(lengths.count(length) / 4000 == pytest.approx(0.25, abs=0.03) for length in (1, 2, 3, 4))


def test_too_few_different_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="use max_digits=2 or fewer problems"):
        task.split_problems(Random(0), 1, 40, 10)


@given(numbers, numbers, seeds)
def test_one_token_a_character(left: int, right: int, seed: int) -> None:
    text = task.Problem(left, right).prompt + task.demonstration(task.Problem(left, right), Random(seed), SLOPPY)
    tokenizer = task.build_tokenizer()
    token_ids = tokenizer(text)["input_ids"]
    assert len(token_ids) == len(text)
    assert tokenizer.decode([*token_ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_a_row_has_the_schema_of_dapo_math_17k() -> None:
    assert task.as_row(task.Problem(345, 78), 7) == {
        "data_source": "addition",
        "prompt": "345+78=",
        "reward_model": {"ground_truth": "423", "style": "rule"},
        "extra_info": {"index": 7},
    }


def test_the_shipped_configuration_fits_the_task() -> None:
    """Careful responses go unpunished, the longest sloppy ones are cut, and the base was measured under this limit."""
    config, settings = load_config("quickstart"), prepare.Settings()
    longest = task.Problem(10**settings.max_digits - 1, 10**settings.max_digits - 1)
    limit = config.rollout.max_response_tokens
    careful, sloppy = (
        len(task.demonstration(longest, Random(0), task.Sloppiness(0.0, share)) + "E") for share in (0.0, 1.0)
    )
    assert careful <= limit - config.algorithm.overlong.buffer_tokens
    assert limit < sloppy
    assert len(longest.prompt) <= config.data.max_prompt_tokens
    assert config.data.max_prompt_tokens + limit <= settings.window_tokens
    assert limit == settings.max_response_tokens


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Settings of a preparation that takes a second, with any accuracy allowed."""
    monkeypatch.setattr(prepare, "ACCURACY_RANGE", (0.0, 1.0))
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield replace(
        prepare.Settings(),
        train_problems=20,
        heldout_problems=8,
        max_response_tokens=4,
        samples_per_problem=1,
        hidden_size=32,
        intermediate_size=32,
        layers=1,
        steps=2,
        batch_size=4,
        threads=1,
    )
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_preparation_is_cached_and_repeatable(tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert prepare.prepare(first, tiny)
    made = contents(first)
    stamps = {file: file.stat().st_mtime_ns for file in first.rglob("*")}
    with caplog.at_level("INFO"):
        assert not prepare.prepare(first, tiny)
    assert "nothing to prepare" in caplog.text
    assert {file: file.stat().st_mtime_ns for file in first.rglob("*")} == stamps

    torch.manual_seed(99)
    assert prepare.prepare(second, tiny)
    assert contents(second) == made
    assert prepare.prepare(second, replace(tiny, seed=18))
    assert contents(second)["base/model.safetensors"] != made["base/model.safetensors"]


def test_what_is_prepared_loads_everywhere(tiny: Any, tmp_path: Path) -> None:
    prepare.prepare(tmp_path, tiny)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert tokenizer.get_vocab() == task.build_tokenizer().get_vocab()
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    text = "12+3=2+3=5;1+0=1;\nAnswer: 15"
    assert tokenizer(text)["input_ids"] == task.build_tokenizer()(text)["input_ids"]

    rows = {name: [json.loads(line) for line in (tmp_path / name).open()] for name in ("train.jsonl", "heldout.jsonl")}
    assert [len(part) for part in rows.values()] == [20, 8]
    both = [row for part in rows.values() for row in part]
    assert sorted(row["extra_info"]["index"] for row in both) == list(range(28))
    for row in both:
        left, right = map(int, row["prompt"].removesuffix("=").split("+"))
        assert row["reward_model"]["ground_truth"] == str(left + right)


def test_supervised_labels_cover_the_response_and_its_end_alone() -> None:
    tokenizer = task.build_tokenizer()
    problems = [task.Problem(1, 2), task.Problem(9999, 1)]
    batch = prepare.supervised_batch(problems, Random(0), prepare.Settings(), tokenizer)
    for row, problem in enumerate(problems):
        labels = batch["labels"][row]
        trained = labels != prepare.IGNORED
        assert torch.equal(labels[trained], batch["input_ids"][row][trained])
        assert not trained[: len(problem.prompt)].any()
        assert labels[trained][-1] == tokenizer.eos_token_id
        assert int(trained.sum()) + len(problem.prompt) == int(batch["attention_mask"][row].sum())


def test_a_base_that_is_too_weak_is_refused(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "ACCURACY_RANGE", (0.2, 0.5))
    with pytest.raises(RuntimeError, match=r"solves 0\.0% .* not 20% to 50%: change Settings\.steps"):
        prepare.prepare(tmp_path, tiny)
    assert not (tmp_path / "prepared.json").exists()
