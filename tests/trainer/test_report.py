"""The report: self-contained, escaped, and made from whatever a run has left behind so far."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.trainer.figures import FIGURES, LIGHT, Limits, draw, moving_average
from dapo_megatron.trainer.report import accuracy_figure, summary, write_report
from dapo_megatron.trainer.rollouts import choose, is_right, move, pair_up
from dapo_megatron.trainer.tracking import RunDirectory, samples_name

PNG = b"\x89PNG"
CONFIG = "model:\n  path: base_policy\nrollout:\n  max_response_tokens: 96\ntrainer:\n  steps: 40\n"


def step_metrics(step: int) -> dict[str, float]:
    return {
        "step": step,
        "update": 4 * step,
        "reward/mean": -0.2 + step / 50,
        "reward/accuracy": 0.4 + step / 100,
        "response_length/mean": 40.0,
        "response_length/max": 96,
        "response_length/clipped_fraction": 0.02,
        "policy/entropy": 0.3,
        "policy/clip_fraction_low": 0.001,
        "policy/clip_fraction_high": 0.002,
        "policy/grad_norm": 1.0 if step > 1 else 100.0,
        "mismatch/logprob_diff_mean": 1e-6,
        "mismatch/logprob_diff_max": 1e-4,
        "sampling/accepted": 32,
        "sampling/rejected_all_right": step,
        "sampling/rejected_all_wrong": 0,
        "sampling/wasted_tokens_fraction": 0.1,
        "timing_s/generate": 2.0,
        "timing_s/update": 2.0,
        "timing_s/step": 4.5,
        "throughput/tokens_per_s": 3000.0,
    }


def sample(uid: int, accuracy: float, response: str = "Answer: 2", **fields: Any) -> dict[str, Any]:
    kind = "right" if accuracy else "wrong"
    return {
        "uid": str(uid), "index": 0, "prompt": f"problem {uid}", "ground_truth": "2", "response": response,
        "kind": kind, "response_tokens": 9, "finish_reason": "stop", "accuracy": accuracy, "extracted": "2", **fields,
    }  # fmt: skip


def make_run(folder: Path, steps: int, evaluated: bool = True) -> RunDirectory:
    run = RunDirectory.create(folder, CONFIG)
    if evaluated:
        run.log_metrics({"step": 0, "val/addition/mean@4": 0.412, "val/addition/pass@4": 0.7})
        run.write_samples(samples_name(0, "addition"), [sample(uid, float(uid % 2)) for uid in range(8)])
    for step in range(1, steps + 1):
        run.log_metrics(step_metrics(step))
    if evaluated and steps:
        run.log_metrics({"step": steps, "val/addition/mean@4": 0.923, "val/addition/pass@4": 0.96})
        run.write_samples(samples_name(steps, "addition"), [sample(uid, float(uid != 6)) for uid in range(8)])
    return run


class Page(HTMLParser):
    """What a browser would make of a page: its tags, its text, and the addresses that it would fetch."""

    VOID = frozenset({"meta", "img", "source", "br"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[str] = []
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(self.source)
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of 30 steps with its report."""
    run = make_run(tmp_path_factory.mktemp("runs") / "quick", steps=30)
    assert write_report(run.path) == run.report_path
    return run


def test_a_whole_run(whole: RunDirectory) -> None:
    page = Page(whole.report_path)
    assert "41.2% → 92.3%" in page.text and "30 of 40 steps" in page.text and "base_policy" in page.text
    assert "wrong → right" in page.text and "stayed wrong" in page.text and "max_response_tokens: 96" in page.text
    assert page.tags.count("img") == len(FIGURES)
    pictures = list(whole.path.glob("report_*.png"))
    assert {path.name for path in pictures} == {f"report_{spec.name}.png" for spec in FIGURES}
    assert all(path.read_bytes().startswith(PNG) for path in pictures)


def test_nothing_is_fetched_from_elsewhere(whole: RunDirectory) -> None:
    page = Page(whole.report_path)
    assert page.addresses and all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert not re.search(r"https?://|@import|url\(|<script|<link", page.source)


def test_summary(whole: RunDirectory) -> None:
    lines = [" ".join(line.split()) for line in summary(whole.path).splitlines()]
    assert lines[0] == "Held-out accuracy 41.2% -> 92.3% addition, mean@4 (pass@4 70.0% -> 96.0%)"
    assert lines[1] == "Training 30 steps in 2 min 15 s"
    assert lines[-1] == f"Report {whole.report_path}"


def test_accuracy_figure(whole: RunDirectory, tmp_path: Path) -> None:
    assert accuracy_figure(whole.path, tmp_path / "accuracy.png").read_bytes().startswith(PNG)
    with pytest.raises(ValueError, match="no evaluation to draw"):
        accuracy_figure(make_run(tmp_path / "run", 2, evaluated=False).path, tmp_path / "none.png")


@pytest.mark.parametrize(("steps", "evaluated"), [(0, False), (0, True), (1, False), (1, True)])
def test_whatever_there_is_so_far(tmp_path: Path, steps: int, evaluated: bool) -> None:
    run = make_run(tmp_path / "run", steps, evaluated)
    page = Page(write_report(run.path))
    assert ("no evaluation" in page.text) == (not evaluated)
    assert page.tags.count("img") == (len(FIGURES) - 1 if steps else 0) + evaluated
    assert str(run.report_path) in summary(run.path)


def test_a_picture_that_is_no_longer_drawn_does_not_stay(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=0)
    stale = run.path / "report_entropy.png"
    stale.write_bytes(PNG)
    write_report(run.path)
    assert not stale.exists()


SHOWN_IN = {
    "reward": "training", "response_length": "length", "policy": "clip entropy grad_norm", "mismatch": "mismatch",
    "sampling": "sampling", "timing_s": "time",
}  # fmt: skip


@pytest.mark.parametrize("missing", [key for key in step_metrics(1) if key.partition("/")[0] in SHOWN_IN])
def test_every_metric_may_be_missing_or_not_finite(missing: str) -> None:
    lines = [step_metrics(step) for step in range(1, 101)]
    for at, line in enumerate(lines):
        if at % 2:
            line[missing] = math.nan
        else:
            del line[missing]
    specs = [spec for spec in FIGURES if spec.name in SHOWN_IN[missing.partition("/")[0]].split()]
    drawn = [draw(spec, lines, Limits(), LIGHT) for spec in specs]
    assert specs and all(png is None or png.startswith(PNG) for png in drawn)


def test_a_run_that_measured_nothing(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "")
    run.log_metrics({"step": 1})
    assert "img" not in Page(write_report(run.path)).tags
    assert summary(run.path).startswith("Held-out accuracy  not measured")


HOSTILE = "</pre><script>alert(1)</script> <img src=x onerror=y> & \"q\" 'a' \x00\x1b[31m ∑ 答案 عربي \ud83d $name ${x}"


def test_text_of_rollouts_and_config_is_escaped(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "<u>&run", "model:\n  path: <u>policy\n")
    run.log_metrics({"step": 0, "val/<u>set/mean@2": 0.5})
    run.log_metrics({"step": 1, "val/<u>set/mean@2": 0.5})
    for step in (0, 1):
        fields = {"uid": HOSTILE, "prompt": HOSTILE, "ground_truth": HOSTILE, "kind": HOSTILE, "extracted": HOSTILE}
        run.write_samples(f"<u>set_step_{step:07d}", [sample(1, 1.0, HOSTILE) | fields])
    page = Page(write_report(run.path))
    assert not {"script", "u"} & set(page.tags) and page.tags.count("img") == 1
    assert page.text.count("</pre><script>alert(1)</script>") == 9, "each field, and three of each side"
    assert "∑ 答案 عربي" in page.text and "$name ${x}" in page.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", page.source)


def test_a_very_long_response_loses_its_middle(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1, evaluated=False)
    run.write_samples(samples_name(1), [sample(0, 0.0, "begin" + "x" * 100_000 + "end", finish_reason="length")])
    page = Page(write_report(run.path))
    assert "characters left out" in page.text and "begin" in page.text and "xend" in page.text
    assert "cut at the limit" in page.text and len(page.text) < 20_000


def test_no_run_directory(tmp_path: Path) -> None:
    for function in (write_report, summary):
        with pytest.raises(ValueError, match="no run directory"):
            function(tmp_path / "missing")


def records() -> st.SearchStrategy[list[dict[str, Any]]]:
    record = st.fixed_dictionaries({
        "uid": st.sampled_from("abcd"), "index": st.integers(0, 3),
        "kind": st.sampled_from(["right", "wrong", "no answer"]), "accuracy": st.sampled_from([0.0, 1.0, None]),
    })  # fmt: skip
    return st.lists(record, max_size=16, unique_by=lambda record: (record["uid"], record["index"]))


@settings(deadline=None)
@given(records(), records())
def test_pairs_are_of_one_prompt_and_index_and_the_choice_shows_each_way_it_went(
    before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> None:
    pairs = pair_up(before, after)
    expected = [(b, a) for b in before for a in after if (b["uid"], b["index"]) == (a["uid"], a["index"])]
    assert pairs == expected
    chosen = choose(pairs)
    assert bool(chosen) == bool(pairs) and all(pair in pairs for pair in chosen)
    moves = [move(pair) for pair in chosen]
    there = {move(pair) for pair in pairs}
    assert {"gained", "missed", "lost"} & there <= set(moves)
    gained = [b for b, a in pairs if not is_right(b) and is_right(a)]
    assert moves.count("gained") == min(3, len({record["uid"] for record in gained}))
    assert moves.count("missed") <= 1 and moves.count("lost") <= 1


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), max_size=20))
def test_moving_average_against_a_plain_loop(values: list[float]) -> None:
    def plain() -> Iterator[float]:
        for at in range(len(values)):
            near = [values[other] for other in range(len(values)) if abs(other - at) <= 2]
            yield sum(near) / len(near)

    assert moving_average(values) == pytest.approx(list(plain()))
