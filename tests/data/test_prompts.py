"""Loading real and broken problem files, and the order of the stream."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dapo_megatron.config.schema import ColumnsConfig, DatasetConfig, OnBadRow, OnOverlongPrompt
from dapo_megatron.data.prompts import LoadedPrompts, PromptStream, load_prompts, sample_seed
from dapo_megatron.data.types import Prompt

GSM8K = {
    "columns": ColumnsConfig(prompt="question", ground_truth="answer"),
    "ground_truth_pattern": r"####\s*(.+)",
}


@pytest.fixture(scope="module")
def tokenizer(shared: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(shared / "tokenizers" / "qwen2_5")


@pytest.fixture
def load(tokenizer: PreTrainedTokenizerBase) -> Callable[..., LoadedPrompts]:
    def load(path: Path, *, max_prompt_tokens: int = 2048, **fields: Any) -> LoadedPrompts:
        policies = {key: fields.pop(key) for key in ("overlong_prompts", "bad_rows") if key in fields}
        return load_prompts(
            DatasetConfig(path=str(path), **fields), tokenizer, max_prompt_tokens=max_prompt_tokens, **policies
        )

    return load


def row_of(index: object = 0, content: str = "1 + 1?", ground_truth: object = "2") -> dict[str, Any]:
    """A row in DAPO-Math-17k's schema."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"ground_truth": ground_truth, "style": "rule"},
        "extra_info": {"index": index},
    }


def write(file: Path, *rows: object) -> Path:
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return file


# Real files


def test_dapo_parquet_collapses_to_its_30_prompts(
    shared: Path, load: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    path = shared / "data" / "aime-2024.dapo.parquet"
    with caplog.at_level(logging.INFO):
        loaded = load(path)
    assert (loaded.rows, len(loaded.prompts), loaded.duplicates, loaded.skipped) == (960, 30, 930, [])
    assert f"{path}: 30 prompts from 960 rows (930 duplicates, 0 skipped, 0 too long)" in caplog.text
    first = loaded.prompts[0]
    assert (first.uid, first.ground_truth, first.data_source) == ("math_dapo:2", "540", "math_dapo")


@pytest.mark.parametrize(
    ("name", "prompts", "ground_truth"),
    [
        ("dapo_math_17k_first16.jsonl", 16, "34"),
        ("aime_2024.jsonl", 30, "204"),
        ("aime_2025.jsonl", 30, "70"),
        ("amc23.jsonl", 40, "27"),
        ("math_500.jsonl", 500, r"\left( 3, \frac{\pi}{2} \right)"),
    ],
)
def test_dapo_schema_works_as_it_is(
    shared: Path, load: Callable, tokenizer: PreTrainedTokenizerBase, name: str, prompts: int, ground_truth: str
) -> None:
    loaded = load(shared / "data" / name)
    assert (loaded.rows, len(loaded.prompts), loaded.duplicates) == (prompts, prompts, 0)
    assert loaded.prompts[0].ground_truth == ground_truth
    row = json.loads((shared / "data" / name).read_text().splitlines()[-1])
    expected = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    assert list(loaded.prompts[-1].token_ids) == expected
    assert tokenizer.decode(expected) == loaded.prompts[-1].text


def test_gsm8k_with_columns_pattern_and_template(shared: Path, load: Callable) -> None:
    template = "Solve. End with \\boxed{x} and 'Answer: x'.\n{prompt}\n"
    loaded = load(shared / "data" / "gsm8k_train.jsonl", chat_template=False, prompt_template=template, **GSM8K)
    assert (loaded.rows, len(loaded.prompts), loaded.duplicates) == (7473, 7473, 0)
    first = loaded.prompts[0]
    assert first.ground_truth == "72"
    assert first.text.startswith("Solve. End with \\boxed{x} and 'Answer: x'.\nNatalia sold")
    assert first.text.endswith("in April and May?\n")
    assert sum("," in prompt.ground_truth for prompt in loaded.prompts) == 79
    assert load(shared / "data" / "gsm8k_train.jsonl", limit=5, **GSM8K).rows == 5


def test_plain_prompts_get_the_tokenizers_own_special_tokens(shared: Path, tmp_path: Path) -> None:
    llama = AutoTokenizer.from_pretrained(shared / "tokenizers" / "llama3_1")
    file = write(tmp_path / "rows.jsonl", row_of())
    for chat_template in (False, True):
        dataset = DatasetConfig(path=str(file), chat_template=chat_template)
        (prompt,) = load_prompts(dataset, llama, max_prompt_tokens=100).prompts
        assert prompt.token_ids.count(llama.bos_token_id) == 1
        assert prompt.token_ids[0] == llama.bos_token_id


# File kinds


def test_every_kind_of_file_gives_the_same_prompts(
    tmp_path: Path, load: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [row_of(i, f"{i} + 1?", str(i + 1)) for i in range(6)]
    expected = load(write(tmp_path / "all.jsonl", *rows)).prompts
    assert [prompt.uid for prompt in expected] == [f"math_dapo:{i}" for i in range(6)]

    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "all.parquet")
    write(tmp_path / "part_0.jsonl", *rows[:2])
    pq.write_table(pa.Table.from_pylist(rows[2:]), tmp_path / "part_1.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "saved_splits")
    (tmp_path / "hub").mkdir()
    write(tmp_path / "hub" / "train.jsonl", *rows)
    for path in ("all.parquet", "part_*", "saved", "saved_splits", "hub"):
        assert load(tmp_path / path).prompts == expected, path

    for folder in ("saved_splits", "hub"):
        with pytest.raises(ValueError, match="no split 'test': it has train"):
            load(tmp_path / folder, split="test")


def test_int_and_string_index_and_no_index(tmp_path: Path, load: Callable) -> None:
    rows = [row_of(7, "a?"), row_of("x-1", "b?"), row_of(None, "c?"), row_of(None, "c?")]
    rows += [{"prompt": "d?", "reward_model": {"ground_truth": 3}}]
    loaded = load(write(tmp_path / "rows.jsonl", *rows))
    assert [prompt.uid for prompt in loaded.prompts[:2]] == ["math_dapo:7", "math_dapo:x-1"]
    assert len(loaded.prompts) == 4 and loaded.duplicates == 1
    assert (loaded.prompts[3].ground_truth, loaded.prompts[3].data_source) == ("3", "")


# Mistakes


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "path is empty"),
        ("{tmp}/trian.jsonl", "does not exist.*did you mean .*train.jsonl"),
        ("{tmp}/quite_another.csv", "does not exist .working directory [^?]*$"),
        ("{tmp}/no*.parquet", "does not exist"),
        ("{tmp}/notes.txt", "suffix must be one of .jsonl, .parquet, got '.txt'"),
        ("{tmp}/broken.parquet", "broken.parquet: cannot be read as parquet"),
        ("{tmp}/empty.jsonl", "no usable prompt: 0 rows"),
        ("{tmp}/folder", "not an HF dataset folder"),
    ],
)
def test_missing_and_broken_files(tmp_path: Path, load: Callable, path: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("notes.txt", "broken.parquet", "empty.jsonl"):
        (tmp_path / name).write_text("" if name == "empty.jsonl" else "hello")
    write(tmp_path / "train.jsonl", row_of())
    with pytest.raises(ValueError, match=message):
        load(path.format(tmp=tmp_path))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "must be an object, got list"),
        ({"promt": "x", "reward_model": {"ground_truth": "1"}}, "no column 'prompt'; there are .*mean 'promt'"),
        ({"prompt": "x", "reward_model": {"ground_truht": "1"}}, "did you mean 'reward_model.ground_truht'"),
        ({"prompt": None, "reward_model": {"ground_truth": "1"}}, "'prompt' is null"),
        ({"prompt": " ", "reward_model": {"ground_truth": "1"}}, "empty prompt"),
        ({"prompt": [], "reward_model": {"ground_truth": "1"}}, "empty prompt"),
        ({"prompt": 5, "reward_model": {"ground_truth": "1"}}, "must be a string or a list of messages, got int 5"),
        ({"prompt": [{"role": "user"}], "reward_model": {"ground_truth": "1"}}, "must have a role and a content"),
        ({"prompt": ["hello"], "reward_model": {"ground_truth": "1"}}, "must have a role and a content"),
        (row_of(ground_truth=None), "'reward_model.ground_truth' is null"),
        (row_of(ground_truth=" "), "empty ground truth"),
        (row_of(ground_truth=204.0), "must be a string or an integer, got float 204.0"),
        (row_of(ground_truth=True), "must be a string or an integer, got bool"),
        (row_of(index={"a": 1}), "'extra_info.index' must be a string or an integer, got dict"),
        ({**row_of(), "data_source": 3}, "'data_source' must be a string, got int 3"),
        (row_of(content="\ud800"), "lone surrogate"),
    ],
)
def test_bad_rows_are_refused_or_skipped_with_number_and_reason(
    tmp_path: Path, load: Callable, row: object, reason: str
) -> None:
    file = write(tmp_path / "rows.jsonl", row_of("good"), "", row)
    with pytest.raises(ValueError, match=f"rows.jsonl row 3: .*{reason}"):
        load(file)
    loaded = load(file, bad_rows=OnBadRow.skip)
    assert [prompt.uid for prompt in loaded.prompts] == ["math_dapo:good"]
    assert loaded.rows == 2
    ((place, _),) = loaded.skipped
    assert place == f"{file} row 3"


def test_only_bad_rows_is_an_error_that_shows_the_first(tmp_path: Path, load: Callable) -> None:
    file = write(tmp_path / "rows.jsonl", {"question": "x"}, {"question": "y"})
    with pytest.raises(ValueError, match=r"no usable prompt: 2 rows, 2 skipped.*row 1: no column 'prompt'"):
        load(file, bad_rows=OnBadRow.skip)


def test_pattern_that_does_not_match_or_cannot_work(tmp_path: Path, load: Callable) -> None:
    file = write(tmp_path / "rows.jsonl", {"question": "x", "answer": "no mark"})
    with pytest.raises(ValueError, match=r"row 1: ground_truth_pattern .* does not match 'answer': 'no mark'"):
        load(file, **GSM8K)
    with pytest.raises(ValueError, match="not a regular expression"):
        load(file, ground_truth_pattern="(")
    with pytest.raises(ValueError, match="needs a group"):
        load(file, ground_truth_pattern="#### .+")


@pytest.mark.parametrize(("content", "truth", "what"), [("2 + 2?", "2", "prompts"), ("1 + 1?", "3", "ground truths")])
def test_one_uid_for_two_problems_names_both_rows(
    tmp_path: Path, load: Callable, content: str, truth: str, what: str
) -> None:
    file = write(tmp_path / "rows.jsonl", row_of(1, "0?"), row_of(5), row_of(5, content, truth))
    message = f"row 2 and .*row 3 have the same uid 'math_dapo:5' but different {what}"
    for bad_rows in OnBadRow:
        with pytest.raises(ValueError, match=message):
            load(file, bad_rows=bad_rows)
    assert len(load(file, columns=ColumnsConfig(uid=None)).prompts) == 3


def test_long_prompts_are_refused_or_dropped(tmp_path: Path, load: Callable) -> None:
    file = write(tmp_path / "rows.jsonl", row_of(0), row_of(1, "1 + " * 100 + "1?"))
    with pytest.raises(ValueError, match=r"1 prompts are longer than data.max_prompt_tokens=50: .*row 2 \(\d+ tokens"):
        load(file, max_prompt_tokens=50)
    loaded = load(file, max_prompt_tokens=50, overlong_prompts=OnOverlongPrompt.drop)
    assert len(loaded.prompts) == loaded.dropped_overlong == 1
    with pytest.raises(ValueError, match="no usable prompt: 2 rows, 0 skipped, 2 too long"):
        load(file, max_prompt_tokens=5, overlong_prompts=OnOverlongPrompt.drop)


def test_templates(tmp_path: Path, load: Callable, tokenizer: PreTrainedTokenizerBase) -> None:
    file = write(tmp_path / "rows.jsonl", row_of())
    with pytest.raises(ValueError, match=r"must have {prompt} once, it has it 2 times"):
        load(file, prompt_template="{prompt}{prompt}")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    file = write(tmp_path / "chat.jsonl", {**row_of(), "prompt": chat})
    with pytest.raises(ValueError, match="row 1: a chat of 2 messages needs the chat template"):
        load(file, chat_template=False)
    (prompt,) = load(file, prompt_template="Q: {prompt} A:").prompts
    assert "Be brief." in prompt.text and "Q: 1 + 1? A:" in prompt.text


def test_tokenizer_without_chat_template(tmp_path: Path, shared: Path) -> None:
    plain = AutoTokenizer.from_pretrained(shared / "tokenizers" / "qwen2_5")
    plain.chat_template = None
    file = write(tmp_path / "rows.jsonl", row_of())
    with pytest.raises(ValueError, match="chat_template=false"):
        load_prompts(DatasetConfig(path=str(file)), plain, max_prompt_tokens=100)


# The stream


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt(str(i), (i,), str(i), str(i)) for i in range(count)]


@given(st.integers(1, 30), st.integers(0, 2**32), st.lists(st.integers(0, 300), min_size=1, max_size=20))
def test_stream_is_a_function_of_seed_and_position(count: int, seed: int, positions: list[int]) -> None:
    """In whatever order positions are asked for; each epoch has every prompt once."""
    prompts = prompts_of(count)
    stream = PromptStream(prompts, seed)
    for position in positions:
        assert stream[position] == PromptStream(prompts, seed)[position]
    for epoch in range(3):
        drawn = [stream[epoch * count + place].uid for place in range(count)]
        assert sorted(drawn) == sorted(prompt.uid for prompt in prompts)


def test_epochs_and_seeds_differ_and_no_shuffle_keeps_the_order() -> None:
    prompts = prompts_of(50)

    def order(seed: int, epoch: int, shuffle: bool = True) -> list[str]:
        stream = PromptStream(prompts, seed, shuffle)
        return [stream[epoch * 50 + place].uid for place in range(50)]

    orders = {tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1, 2)}
    assert len(orders) == 6
    assert order(0, 0, shuffle=False) == order(1, 2, shuffle=False) == [prompt.uid for prompt in prompts]


def test_order_and_seeds_are_the_same_on_every_machine() -> None:
    stream = PromptStream(prompts_of(8), seed=42)
    assert "".join(stream[position].uid for position in range(16)) == "0653127437102456"
    assert sample_seed(42, 0, 0) == 2255907753143063706


def test_sample_seeds_are_distinct_and_in_range() -> None:
    seeds = {sample_seed(run, position, i) for run in range(3) for position in range(50) for i in range(16)}
    assert len(seeds) == len({seed % 2**32 for seed in seeds}) == 3 * 50 * 16
    assert all(0 <= seed < 2**63 for seed in seeds)
