"""The progress display: plain log lines where there is no terminal, the same numbers in a panel where there is one."""

from __future__ import annotations

import io
import logging
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from dapo_megatron.trainer.progress import Progress, duration, percent, trend

METRICS = {
    "step": 1,
    "reward/mean": -0.25,
    "reward/accuracy": 0.4,
    "response_length/mean": 38.25,
    "response_length/clipped_fraction": 0.012,
    "policy/entropy": 0.31,
    "policy/grad_norm": 0.7,
    "throughput/tokens_per_s": 2963.4,
    "timing_s/step": 4.75,
}


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_plain_lines_without_a_terminal(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI systems do: still no terminal
    file = io.StringIO()
    with caplog.at_level(logging.INFO), Progress(60, console=Console(file=file)) as progress:
        progress.phase("evaluate")
        progress.evaluated({"step": 0, "val/addition/mean@4": 0.41, "val/addition/pass@4": 0.7})
        progress.phase("generate")
        progress.step_done(METRICS)
        progress.evaluated({"step": 1, "val/addition/mean@4": 0.5, "val/addition/pass@4": 0.8})
        progress.warn("no response has an answer")
    assert file.getvalue() == ""
    first, step, last, warning = (record.getMessage() for record in caplog.records)
    assert first == "evaluation at step 0: addition mean@4 41.0%, pass@4 70.0%"
    assert step.startswith(
        "step 1/60 | accuracy 40.0% | reward -0.250 | length 38.2 | clipped 1.2% | entropy 0.310 | grad norm 0.7"
        " | tokens/s 2,963 | step time 4.8 s"
    )
    assert last == "evaluation at step 1: addition mean@4 41.0% -> 50.0%, pass@4 70.0% -> 80.0%"
    assert warning == "no response has an answer" and caplog.records[-1].levelno == logging.WARNING
    assert not any("\x1b" in record.getMessage() for record in caplog.records)


def test_missing_metrics_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), Progress(2, live=False) as progress:
        progress.step_done({"step": 2, "policy/entropy": math.nan})
    assert caplog.messages == ["step 2/2 | entropy nan"]


def test_the_panel_shows_phase_numbers_evaluation_and_warnings() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, color_system=None)
    with Progress(60, name="[quick] start", console=console, live=True) as progress:
        progress.evaluated({"step": 0, "val/addition/mean@4": 0.41})
        progress.phase("generate")
        for step in (1, 2):
            progress.step_done({**METRICS, "step": step})
        progress.evaluated({"step": 2, "val/addition/mean@4": 0.5})
        progress.warn("entropy collapses")
        progress.phase("update")
        page = Console(file=io.StringIO(), width=100, color_system=None, record=True)
        page.print(progress)
    text = page.export_text()
    for shown in (
        "[quick] start",
        "step 2/60",
        "update",
        "40.0%",
        "2,963",
        "mean@4 41.0% -> 50.0%",
        "entropy collapses",
    ):
        assert shown in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "\x1b[?25h" in file.getvalue(), "the cursor is shown again"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_ends_the_panel_and_passes_through(error: type[BaseException]) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, color_system=None)
    with pytest.raises(error), Progress(5, console=console, live=True):
        raise error
    assert ("interrupted" if error is KeyboardInterrupt else "failed") in file.getvalue()
    assert file.getvalue().rstrip("\n").endswith("\x1b[?25h")


def test_eta_is_the_mean_step_with_its_evaluations_times_what_is_left() -> None:
    clock = Clock()
    progress = Progress(10, live=False, clock=clock)
    progress.phase("evaluate")
    clock.now_s = 100.0
    progress.phase("generate")  # the first step begins
    assert progress.eta_s() is None
    clock.now_s = 104.0
    progress.step_done({"step": 1})
    assert progress.eta_s() == pytest.approx(9 * 4)
    progress.phase("evaluate")
    clock.now_s = 112.0
    progress.step_done({"step": 2})
    assert progress.eta_s() == pytest.approx(8 * 6)
    clock.now_s = 115.0
    assert progress.eta_s() == pytest.approx(8 * 6 - 3)
    clock.now_s = 1000.0
    assert progress.eta_s() == 0


@settings(deadline=None)
@given(st.lists(st.floats(width=32)))
def test_trend_orders_as_the_values_do(values: list[float]) -> None:
    blocks = trend(values)
    finite = [(value, block) for value, block in zip(values, blocks, strict=False) if math.isfinite(value)]
    assert len(blocks) in (0, len(values))
    assert all(a <= b for (v, a) in finite for (w, b) in finite if v <= w)
    assert all(block == " " for value, block in zip(values, blocks, strict=False) if not math.isfinite(value))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (59.96, "1 min 00 s"), (125, "2 min 05 s"), (11220, "3 h 07 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_percent() -> None:
    assert percent(0.4232) == "42.3%"
