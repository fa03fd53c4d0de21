"""Live progress: a compact panel on a terminal, one plain log line a step elsewhere.

Both show the same few numbers, those that tell whether a run is healthy (`SHOWN`). The panel shares rich's default
console with `rich.logging.RichHandler`, so that log lines scroll by above it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import rich
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dapo_megatron.trainer.tracking import evaluation_metrics

logger = logging.getLogger(__name__)

_TREND_STEPS = 16
_ETA_STEPS = 10
_SHOWN_WARNINGS = 3
_BLOCKS = "▁▂▃▄▅▆▇█"


def percent(value: float) -> str:
    """0.423 -> 42.3%."""
    return f"{100 * value:.1f}%"


def duration(seconds: float) -> str:
    """Seconds as people say them: 8.3 s, 2 min 05 s, 3 h 07 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, rest_min = divmod(minutes, 60)
    return f"{hours} h {rest_min:02d} min" if hours else f"{minutes} min {rest_s:02d} s"


@dataclass(frozen=True)
class Shown:
    """One number of the display: its metric, what it is called, how it is written."""

    metric: str
    label: str
    text: Callable[[float], str]


SHOWN = (
    Shown("reward/accuracy", "accuracy", percent),
    Shown("reward/mean", "reward", "{:+.3f}".format),
    Shown("response_length/mean", "length", "{:,.1f}".format),
    Shown("response_length/clipped_fraction", "clipped", percent),
    Shown("policy/entropy", "entropy", "{:.3f}".format),
    Shown("policy/grad_norm", "grad norm", "{:.3g}".format),
    Shown("throughput/tokens_per_s", "tokens/s", "{:,.0f}".format),
    Shown("timing_s/step", "step time", duration),
)
"""What is shown of a step, in this order."""


class Progress:
    """Shows how a run of `total_steps` steps goes. Use it as a context manager.

    Args:
        total_steps: last step of the run.
        name: shown as the panel's title.
        console: where the panel is drawn; null for rich's default console.
        live: draw the panel; null: if the console is a terminal that can. Otherwise every step is a log line (INFO).
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        name: str = "dapo-megatron",
        console: Console | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._name = name
        self._console = console or rich.get_console()
        can_draw = self._console.file.isatty() and self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = (
            Live(self, console=self._console, refresh_per_second=4) if (can_draw if live is None else live) else None
        )
        self._clock = clock
        self._started_s = clock()
        # The display is drawn by a thread of its own: tuples are replaced, never changed.
        self._step = 0
        self._phase = "start"
        self._phase_started_s = self._started_s
        self._steps: tuple[Mapping[str, float], ...] = ()
        self._step_ends_s: tuple[float, ...] = ()
        self._evaluations: tuple[Mapping[str, float], ...] = ()
        self._warnings: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._begin("interrupted" if kind is KeyboardInterrupt else "failed" if kind else "done")
        if self._live:
            self._live.stop()

    def phase(self, name: str) -> None:
        """The run now does `name` (generate, reward, old_log_probs, update, sync, evaluate, checkpoint, ...)."""
        if not self._step_ends_s and name != "evaluate":
            self._step_ends_s = (self._clock(),)  # the first step begins
        self._begin(name)

    def step_done(self, metrics: Mapping[str, float]) -> None:
        """A step ended with these metrics; `step` is its number, counted from 1."""
        self._step = int(metrics["step"])
        self._steps = (*self._steps, dict(metrics))[-_TREND_STEPS:]
        self._step_ends_s = (*self._step_ends_s, self._clock())[-_ETA_STEPS - 1 :]
        if not self._live:
            logger.info("%s", self._step_line(metrics))

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """An evaluation ended: `step` and `val/<set>/...`."""
        self._evaluations = (*self._evaluations[:1], dict(metrics))  # the first one and the last
        if not self._live:
            logger.info("evaluation at step %d: %s", metrics["step"], "; ".join(self._evaluation_lines()))

    def warn(self, text: str) -> None:
        """Show a warning: it is logged, and the panel keeps the last few."""
        logger.warning("%s", text)
        self._warnings = (*self._warnings, text)[-_SHOWN_WARNINGS:]

    def eta_s(self) -> float | None:
        """Seconds to the last step by the mean wall time of the last ones, evaluations between them included."""
        ends_s = self._step_ends_s
        if len(ends_s) < 2:
            return None
        step_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)
        return max(0.0, (self._total_steps - self._step) * step_s - (self._clock() - ends_s[-1]))

    def _begin(self, phase: str) -> None:
        self._phase = phase
        self._phase_started_s = self._clock()

    def _step_line(self, metrics: Mapping[str, float]) -> str:
        numbers = [f"{shown.label} {shown.text(metrics[shown.metric])}" for shown in SHOWN if shown.metric in metrics]
        eta_s = self.eta_s()
        ahead = [f"ETA {duration(eta_s)}"] if eta_s else []
        return " | ".join([f"step {self._step}/{self._total_steps}", *numbers, *ahead])

    def _evaluation_lines(self) -> list[str]:
        """One line a set: its mean@k and pass@k, with what they were at the first evaluation."""
        if not self._evaluations:
            return []
        first, last = self._evaluations[0], self._evaluations[-1]
        lines = []
        for name, metrics in evaluation_metrics(last).items():
            values = []
            for key in (metrics[what] for what in ("mean", "pass") if what in metrics):
                before = f"{percent(first[key])} -> " if last is not first and key in first else ""
                values.append(f"{key.rpartition('/')[2]} {before}{percent(last[key])}")
            lines.append(f"{name} {', '.join(values)}")
        return lines

    def __rich__(self) -> RenderableType:
        now_s = self._clock()
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        eta_s = self.eta_s()
        clocks = f"{duration(now_s - self._started_s)} elapsed" + (f", ETA {duration(eta_s)}" if eta_s else "")
        head.add_row(Bar(self._total_steps, 0, self._step, color="green", bgcolor="grey23"), Text(clocks, style="dim"))

        numbers = Table.grid(expand=True, padding=(0, 1))
        for _ in range(2):
            numbers.add_column(style="dim", no_wrap=True)
            numbers.add_column(justify="right", no_wrap=True, min_width=9)
            numbers.add_column(style="cyan", no_wrap=True, ratio=1)
        cells = [cell for shown in SHOWN if (cell := self._cell(shown))]
        for left, right in zip(cells[::2], [*cells[1::2], ("", "", "")], strict=False):
            numbers.add_row(*left, *right)

        evaluations = [Text(f"held-out  {line}", style="bold") for line in self._evaluation_lines()]
        warnings = [Text(f"warning: {text}", style="yellow", overflow="ellipsis") for text in self._warnings]
        now = f"{self._phase} {duration(now_s - self._phase_started_s)}" if self._running() else self._phase
        return Panel(
            Group(head, *evaluations, *([numbers] if cells else []), *warnings),
            title=f"[bold]{escape(self._name)}[/] step {self._step}/{self._total_steps}",
            title_align="left",
            subtitle=f"[dim]{escape(now)}[/]",
            subtitle_align="right",
            border_style="blue",
        )

    def _running(self) -> bool:
        return self._phase not in ("done", "failed", "interrupted")

    def _cell(self, shown: Shown) -> tuple[str, str, str] | None:
        """Label, newest value and trend, or None before it was measured."""
        values = [step[shown.metric] for step in self._steps if shown.metric in step]
        return (shown.label, shown.text(values[-1]), trend(values)) if values else None


def trend(values: list[float]) -> str:
    """The values as a row of blocks, lowest to highest; a blank where one is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if len(values) < 2 or not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    top = len(_BLOCKS) - 1
    return "".join(
        " " if not math.isfinite(v) else _BLOCKS[round(top * (v - low) / span) if span else top // 2] for v in values
    )
