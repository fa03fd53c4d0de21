"""The run directory: what is written is read back, and a kill at any byte loses at most the line it cut."""

from __future__ import annotations

import json
import logging
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.trainer.tracking import RunDirectory, evaluation_metrics, samples_name


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", "trainer:\n  steps: 3\n")


def test_metrics_are_read_back_in_step_order(run: RunDirectory) -> None:
    run.log_metrics({"step": 0, "val/addition/mean@4": 0.25})
    run.log_metrics({"step": 1, "reward/mean": -0.5})
    run.log_metrics({"step": 1, "val/addition/mean@4": 0.5})
    first, second = RunDirectory.open(run.path).read_metrics()
    assert first["step"] == 0 and first["val/addition/mean@4"] == 0.25
    assert second["reward/mean"] == -0.5 and second["val/addition/mean@4"] == 0.5, "lines of a step are merged"
    assert second["timestamp_s"] >= first["timestamp_s"]


def test_a_number_that_is_not_finite_is_null_with_one_warning(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            values: dict[str, Any] = {"policy/loss": math.nan, "x": np.float32("inf"), "y": np.float32(0.5)}
            run.log_metrics({"step": step, **values})
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    assert [(line["policy/loss"], line["x"], line["y"]) for line in lines] == [(None, None, 0.5)] * 2
    assert len([r for r in caplog.records if "policy/loss" in r.getMessage()]) == 1
    assert math.isnan(run.read_metrics()[0]["policy/loss"])


@settings(deadline=None)
@given(lines=st.lists(st.dictionaries(st.sampled_from("abc"), st.floats()), min_size=1, max_size=5), data=st.data())
def test_cut_anywhere_the_earlier_lines_stay_and_writing_goes_on(
    lines: list[dict[str, float]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory.create(folder, "")
        for step, line in enumerate(lines):
            run.log_metrics({"step": step, "timestamp_s": 1.0, **line})
        whole = run.read_metrics()
        content = run.metrics_path.read_bytes()
        kept = data.draw(st.integers(0, len(content)))
        run.metrics_path.write_bytes(content[:kept])
        # A line without its newline is complete too.
        complete = content[: kept + 1].count(b"\n")
        assert repr(run.read_metrics()) == repr(whole[:complete])

        run.log_metrics({"step": 99})
        assert [line["step"] for line in run.read_metrics()] == [*range(complete), 99]


def test_no_metrics_yet(run: RunDirectory) -> None:
    assert run.read_metrics() == []


def test_samples_are_read_back_with_any_text(run: RunDirectory) -> None:
    records = [
        {"uid": "1", "response": "3 × 4 = 12, 答案 \u2028 <b> \ud83d", "reward": np.float32(0.5), "index": np.int64(3)},
        {"uid": "2", "response": "", "reward": math.nan, "extracted": None},
    ]
    path = run.write_samples(samples_name(7), records)
    assert path.name == "step_0000007.jsonl" and "答案" in path.read_text(encoding="utf-8")
    first, second = run.read_samples("step_0000007")
    assert first == {"uid": "1", "response": records[0]["response"], "reward": 0.5, "index": 3}
    assert second["reward"] is None
    assert [entry.name for entry in run.samples_folder.iterdir()] == ["step_0000007.jsonl"], "no temporary file stays"


def test_sample_steps_tell_sets_apart(run: RunDirectory) -> None:
    for name in (samples_name(10), samples_name(2), samples_name(0, "step_one"), samples_name(12_345_678, "gsm8k")):
        run.write_samples(name, [])
    assert run.sample_steps() == [2, 10]
    assert run.sample_steps("step_one") == [0]
    assert run.sample_steps("gsm8k") == [12_345_678]
    assert run.sample_steps("other") == []


def test_missing_samples_name_the_nearest(run: RunDirectory) -> None:
    run.write_samples(samples_name(10), [])
    with pytest.raises(ValueError, match=r"step_0000011\.jsonl does not exist; nearest: step_0000010"):
        run.read_samples(samples_name(11))


def test_a_run_directory_is_not_overwritten(run: RunDirectory) -> None:
    with pytest.raises(ValueError, match=r"not empty \(it holds config\.yaml, samples\).*trainer\.run_dir=.*run_2"):
        RunDirectory.create(run.path, "")
    assert run.config_path.read_text() == "trainer:\n  steps: 3\n"


def test_a_file_is_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        RunDirectory.create(tmp_path / "run", "")


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert RunDirectory.create(tmp_path, "a: 1\n").config_path.read_text() == "a: 1\n"


def test_opening_says_what_is_wrong(run: RunDirectory) -> None:
    with pytest.raises(ValueError, match=r"no run directory .*ruin; did you mean .*run\?"):
        RunDirectory.open(run.path.with_name("ruin"))
    with pytest.raises(ValueError, match=r"no config\.yaml; did you mean .*run\?"):
        RunDirectory.open(run.path.parent)


def test_last_checkpoint_is_the_newest_complete_one(run: RunDirectory) -> None:
    with pytest.raises(ValueError, match="has no checkpoint"):
        run.last_checkpoint()
    for step in (9, 10):
        run.checkpoint_folder(step).mkdir(parents=True)
    (run.path / "checkpoints" / ".step_0000011.tmp").mkdir()
    assert run.last_checkpoint() == (10, run.path / "checkpoints" / "step_0000010")


def test_evaluation_metrics_take_the_largest_k() -> None:
    names = ["val/a/b/mean@4", "val/c/pass@1", "val/c/pass@16", "val/c/pass@8", "val/c/time_s", "step"]
    assert evaluation_metrics(names) == {"a/b": {"mean": "val/a/b/mean@4"}, "c": {"pass": "val/c/pass@16"}}
