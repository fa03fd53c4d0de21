"""The report's curves: one table, `FIGURES`, of what is drawn from the metrics and why one looks at it.

Every figure copes with missing metrics, gaps and a single step. Adding one is a function and a row in the table.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter, StrMethodFormatter

from dapo_megatron.trainer.tracking import Metrics, evaluation_metrics

SMOOTHED_FROM_STEPS = 25
_BARS_UP_TO_STEPS = 80


@dataclass(frozen=True)
class Theme:
    """Colours of a figure."""

    surface: str
    ink: str
    muted: str
    grid: str
    blue: str
    orange: str
    green: str
    red: str
    violet: str
    teal: str
    grey: str


LIGHT = Theme(
    surface="#ffffff",
    ink="#1c2333",
    muted="#667085",
    grid="#eaecf0",
    blue="#2f6fed",
    orange="#e8710a",
    green="#0f9d58",
    red="#d92d20",
    violet="#7a5af8",
    teal="#12b5a6",
    grey="#b6bfcc",
)
DARK = Theme(
    surface="#161b26",
    ink="#e6e9f0",
    muted="#98a2b3",
    grid="#2a3140",
    blue="#74a4ff",
    orange="#ffa657",
    green="#4cc38a",
    red="#ff7b72",
    violet="#b39dff",
    teal="#5fd7cb",
    grey="#5d6779",
)


@dataclass(frozen=True)
class Limits:
    """What figures mark from the configuration; None where there is no bound."""

    max_response_tokens: float | None = None
    clip_grad: float | None = None
    reward_right: float = 1.0
    reward_wrong: float = -1.0


@dataclass
class Plot:
    """One figure while it is drawn: metrics by step on the left axes and, on demand, on the right ones."""

    metrics: Sequence[Metrics]
    limits: Limits
    theme: Theme
    figure: Figure
    axes: Axes
    drawn: bool = False
    right: Axes | None = field(default=None)

    def points(self, key: str) -> tuple[list[float], list[float]]:
        """Steps and values of a metric where it is there and finite."""
        pairs = [(line["step"], line[key]) for line in self.metrics if math.isfinite(line.get(key, math.nan))]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def line(
        self, key: str, label: str, color: str, *, on_right: bool = False, raw: bool = False, dashed: bool = False
    ) -> None:
        """A metric as a line; a long noisy one as its moving average over the faint original, unless `raw`."""
        steps, values = self.points(key)
        if not steps:
            return
        self.drawn = True
        axes = self.right_axes(color) if on_right else self.axes
        style = {
            "linestyle": (0, (4, 2)) if dashed else "-",
            "marker": "o" if len(steps) <= (1 if dashed else 12) else "",
        }
        if len(steps) >= SMOOTHED_FROM_STEPS and not raw:
            axes.plot(steps, values, color=color, alpha=0.28, linewidth=1)
            values = moving_average(values, half_window=max(2, len(values) // 60))
        axes.plot(steps, values, color=color, label=label, **style)

    def bound(self, value: float | None, label: str) -> None:
        """A dotted level from the configuration; only beside something that was measured."""
        if value and self.drawn:
            self.axes.axhline(value, color=self.theme.muted, linewidth=1, linestyle=":", label=label)

    def stack(self, layers: dict[str, tuple[str, list[float]]], steps: list[float]) -> None:
        """Label -> (colour, a value for each of `steps`), one above the other."""
        if not steps or not layers:
            return
        self.drawn = True
        if len(steps) > _BARS_UP_TO_STEPS:
            colors = [color for color, _ in layers.values()]
            heights = [values for _, values in layers.values()]
            self.axes.stackplot(steps, *heights, colors=colors, labels=list(layers), step="mid", linewidth=0)
            return
        below = [0.0] * len(steps)
        for label, (color, values) in layers.items():
            self.axes.bar(steps, values, width=0.82, bottom=below, color=color, label=label, linewidth=0)
            below = [low + value for low, value in zip(below, values, strict=True)]

    def right_axes(self, color: str) -> Axes:
        """The axes with their scale on the right, in the colour of what is drawn there."""
        if self.right is None:
            self.right = self.axes.twinx()
            self.right.grid(False)
            self.right.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
            self.right.tick_params(colors=color)
        return self.right


def moving_average(values: Sequence[float], half_window: int = 2) -> list[float]:
    """Centred mean over 2 x half_window + 1 values, over fewer near the ends."""
    return [
        sum(window) / len(window)
        for at in range(len(values))
        if (window := values[max(0, at - half_window) : at + half_window + 1])
    ]


def _held_out(plot: Plot) -> None:
    t = plot.theme
    names = evaluation_metrics(key for line in plot.metrics for key in line)
    for color, (name, metric) in zip(
        [t.blue, t.orange, t.violet, t.teal, t.red] * len(names), names.items(), strict=False
    ):
        before = f"{name} " if len(names) > 1 else ""
        for what, dashed in (("mean", False), ("pass", True)):
            if what in metric:
                label = before + metric[what].rpartition("/")[2]
                plot.line(metric[what], label, t.grey if dashed and len(names) == 1 else color, raw=True, dashed=dashed)
        if "mean" in metric and len(names) == 1:
            steps, values = plot.points(metric["mean"])
            plot.axes.fill_between(steps, values, color=color, alpha=0.08, linewidth=0)
            _annotate_ends(plot, steps, values, color)
    _percent_axis(plot.axes)


def _annotate_ends(plot: Plot, steps: list[float], values: list[float], color: str) -> None:
    """The first and the last value, written beside their points."""
    for at in dict.fromkeys((0, len(steps) - 1)) if steps else ():
        last = at == len(steps) - 1 and at > 0
        plot.axes.plot(steps[at], values[at], "o", color=color, markersize=6, markeredgecolor=plot.theme.surface)
        plot.axes.annotate(
            f"{100 * values[at]:.1f}%",
            (steps[at], values[at]),
            (-4 if last else 6, -13),
            textcoords="offset points",
            color=color,
            fontweight="bold",
            va="center",
            ha="right" if last else "left",
        )


def _training(plot: Plot) -> None:
    plot.line("reward/accuracy", "accuracy", plot.theme.blue)
    plot.line("reward/mean", "mean reward (right)", plot.theme.orange, on_right=True)
    _percent_axis(plot.axes)
    wrong, span = (plot.limits.reward_wrong, plot.limits.reward_right - plot.limits.reward_wrong)
    if plot.right is not None and span > 0:
        # Both axes mean the same heights: all wrong at the bottom, all right at the top.
        lowest = min((value - wrong) / span for value in plot.points("reward/mean")[1])
        low, high = min(-0.02, lowest - 0.02), 1.02
        plot.axes.set_ylim(low, high)
        plot.right.set_ylim(wrong + low * span, wrong + high * span)


def _length(plot: Plot) -> None:
    plot.line("response_length/max", "longest", plot.theme.grey)
    plot.line("response_length/mean", "mean", plot.theme.blue)
    plot.bound(plot.limits.max_response_tokens, "limit")
    plot.line("response_length/clipped_fraction", "cut at the limit (right)", plot.theme.red, on_right=True)
    if plot.right is not None:
        plot.right.set_ylim(0, max(0.05, *plot.points("response_length/clipped_fraction")[1]) * 1.6)
        plot.right.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    plot.axes.set_ylim(bottom=0)
    plot.axes.set_ylabel("tokens")
    plot.axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _entropy(plot: Plot) -> None:
    plot.line("policy/entropy", "entropy", plot.theme.violet)
    plot.axes.set_ylim(bottom=0)
    plot.axes.set_ylabel("nats a token")


def _clip(plot: Plot) -> None:
    plot.line("policy/clip_fraction_low", "low", plot.theme.blue)
    plot.line("policy/clip_fraction_high", "high", plot.theme.orange)
    if any(plot.points("policy/clip_fraction_dual")[1]):
        plot.line("policy/clip_fraction_dual", "dual", plot.theme.violet)
    plot.axes.set_ylim(bottom=0)
    plot.axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))


def _grad_norm(plot: Plot) -> None:
    plot.line("policy/grad_norm", "gradient norm", plot.theme.teal)
    plot.bound(plot.limits.clip_grad, "clipped above")
    values = plot.points("policy/grad_norm")[1]
    if values and 0 < 50 * min(values) < max(values):
        _log_axis(plot.axes, values)
    else:
        plot.axes.set_ylim(bottom=0)


def _mismatch(plot: Plot) -> None:
    for key, label, color in (("max", "largest", plot.theme.grey), ("mean", "mean", plot.theme.blue)):
        plot.line(f"mismatch/logprob_diff_{key}", label, color)
    _log_axis(plot.axes, [v for key in ("max", "mean") for v in plot.points(f"mismatch/logprob_diff_{key}")[1]])


def _sampling(plot: Plot) -> None:
    t = plot.theme
    colors = {"accepted": t.blue, "rejected_all_right": t.teal, "rejected_all_wrong": t.orange}
    others = [key for line in plot.metrics for key in line if key.startswith("sampling/rejected_")]
    kinds = list(dict.fromkeys([*colors, *(key.removeprefix("sampling/") for key in others)]))
    plot.stack(
        *_layers(
            plot,
            {
                f"sampling/{kind}": (kind.removeprefix("rejected_").replace("_", " "), colors.get(kind, t.grey))
                for kind in kinds
            },
        )
    )
    plot.axes.set_ylabel("prompts")
    plot.line("sampling/wasted_tokens_fraction", "tokens wasted (right)", t.red, on_right=True)
    if plot.right is not None:
        plot.right.set_ylim(0, 1)
        plot.right.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _time(plot: Plot) -> None:
    t = plot.theme
    colors = {
        "generate": t.blue,
        "reward": t.orange,
        "old_log_probs": t.teal,
        "update": t.violet,
        "sync": t.red,
        "checkpoint": t.green,
    }
    measured = [key.removeprefix("timing_s/") for line in plot.metrics for key in line if key.startswith("timing_s/")]
    phases = [phase for phase in dict.fromkeys([*colors, *measured]) if phase != "step"]
    layers, steps = _layers(
        plot, {f"timing_s/{phase}": (phase.replace("_", " "), colors.get(phase, t.grey)) for phase in phases}
    )
    known_s = [sum(values) for values in zip(*(values for _, values in layers.values()), strict=True)]
    step_s = {line["step"]: line.get("timing_s/step", math.nan) for line in plot.metrics}
    others_s = [
        max(0.0, step_s[at] - known) if step_s[at] > 0 else 0.0 for at, known in zip(steps, known_s, strict=False)
    ]
    if any(others_s):
        layers["other"] = (t.grey, others_s)
    total_s = sum(sum(values) for _, values in layers.values())
    shares = {f"{label} {sum(layer[1]) / total_s:.0%}": layer for label, layer in layers.items()}
    plot.stack(shares, steps)
    plot.axes.set_ylabel("seconds a step")


def _layers(plot: Plot, named: dict[str, tuple[str, str]]) -> tuple[dict[str, tuple[str, list[float]]], list[float]]:
    """From metric -> (label, colour) to what `Plot.stack` takes: the layers that are not always 0, and the steps."""
    lines = [line for line in plot.metrics if any(key in line for key in named)]
    layers = {
        label: (color, [0.0 if math.isnan(line.get(key, math.nan)) else line[key] for line in lines])
        for key, (label, color) in named.items()
    }
    return {label: layer for label, layer in layers.items() if any(layer[1])}, [line["step"] for line in lines]


def _log_axis(axes: Axes, values: Sequence[float]) -> None:
    """Whole decades around the positive values; as it was if there are none."""
    if positive := [value for value in values if value > 0]:
        axes.set_yscale("log")
        axes.set_ylim(
            10 ** math.floor(math.log10(0.9 * min(positive))), 10 ** math.ceil(math.log10(1.1 * max(positive)))
        )
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())


def _percent_axis(axes: Axes) -> None:
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


@dataclass(frozen=True)
class FigureSpec:
    """One figure: the name of its file, its title, what one looks for in it, and how it is drawn."""

    name: str
    title: str
    caption: str
    draw: Callable[[Plot], None]


FIGURES = (
    FigureSpec(
        "held_out",
        "Held-out accuracy",
        "Problems that are never trained on. mean@k is the share of right samples, pass@k the share of problems "
        "that at least one of k samples solves.",
        _held_out,
    ),
    FigureSpec(
        "training",
        "Training batch: accuracy and reward",
        "All sampled groups, before dynamic sampling drops any. The scales correspond: where the reward lies lower "
        "than the accuracy, that is the overlong penalty.",
        _training,
    ),
    FigureSpec(
        "length",
        "Response length",
        "A mean that nears the limit, or more and more cut responses, ask for a larger limit or a stronger penalty.",
        _length,
    ),
    FigureSpec(
        "entropy",
        "Policy entropy",
        "A fall to nearly 0 ends exploration, which Clip-Higher is there to prevent. A steady climb means instability.",
        _entropy,
    ),
    FigureSpec(
        "clip",
        "Clipped tokens",
        "Share of trained tokens whose ratio left the trust region. Always 0 where a step makes a single update.",
        _clip,
    ),
    FigureSpec(
        "grad_norm",
        "Gradient norm",
        "Before clipping. A climb that does not come back down often comes before a collapse.",
        _grad_norm,
    ),
    FigureSpec(
        "mismatch",
        "Rollout against training log-probs",
        "How far the log-probs of the same sampled tokens differ between the two engines. It should not climb.",
        _mismatch,
    ),
    FigureSpec(
        "sampling",
        "Dynamic sampling",
        "Prompts of each step by the outcome of their group. Only accepted groups carry a training signal.",
        _sampling,
    ),
    FigureSpec("time", "Time of each phase", "Wall time of each step, and each phase's share of the run.", _time),
)
"""The report's figures, in order."""


def draw(spec: FigureSpec, metrics: Sequence[Metrics], limits: Limits, theme: Theme) -> bytes | None:
    """The figure as PNG, or None if nothing that it shows was measured."""
    with matplotlib.rc_context(_style(theme)):
        figure = Figure(figsize=(6.0, 3.6), dpi=160, layout="constrained")
        plot = Plot(metrics, limits, theme, figure, figure.add_subplot())
        spec.draw(plot)
        if not plot.drawn:
            return None
        _finish_axes(plot, spec.title)
        return _png(figure)


def draw_accuracy(metrics: Sequence[Metrics], subtitle: str) -> bytes | None:
    """Held-out accuracy by step and training time, as a picture that stands alone; None as in `draw`."""
    with matplotlib.rc_context({**_style(LIGHT), "font.size": 11, "lines.linewidth": 2.6}):
        figure = Figure(figsize=(8.0, 4.2), dpi=200, layout="constrained")
        plot = Plot(metrics, Limits(), LIGHT, figure, figure.add_subplot())
        _held_out(plot)
        if not plot.drawn:
            return None
        _finish_axes(plot, "Held-out accuracy")
        plot.axes.set_title("Held-out accuracy", loc="left", fontsize=15, pad=48)
        plot.axes.annotate(
            subtitle, (0, 1), (0, 28), xycoords="axes fraction", textcoords="offset points", color=LIGHT.muted
        )
        times_s = training_time_s(metrics)
        if times_s:
            plot.axes.set_xlabel("step, and minutes of training")
            plot.axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: _step_and_time(step, times_s)))
        return _png(figure)


def training_time_s(metrics: Sequence[Metrics]) -> dict[int, float]:
    """Step -> seconds of training up to its end (`timing_s/step` summed; evaluations are not in it)."""
    total_s, times_s = 0.0, {}
    for line in metrics:
        if math.isfinite(line.get("timing_s/step", math.nan)):
            total_s += line["timing_s/step"]
            times_s[int(line["step"])] = total_s
    return times_s


def _step_and_time(step: float, times_s: dict[int, float]) -> str:
    seconds = times_s.get(round(step), 0.0 if step == 0 else None)
    return f"{step:.0f}" if seconds is None else f"{step:.0f}\n{seconds // 60:.0f}:{seconds % 60:02.0f}"


def _finish_axes(plot: Plot, title: str) -> None:
    both = [axes.get_legend_handles_labels() for axes in (plot.axes, plot.right) if axes]
    handles, labels = ([h for pair in both for h in pair[0]], [label for pair in both for label in pair[1]])
    columns = 3 if len(handles) > 4 else 4
    rows = math.ceil(len(handles) / columns) if len(handles) > 1 else 0
    if rows:
        plot.axes.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(-0.012, 1.0), ncols=columns, borderaxespad=0.2
        )
    plot.axes.set_title(title, loc="left", pad=10 + 15 * rows)
    plot.axes.set_xlabel("step")
    plot.axes.margins(x=0.02)
    low, high = plot.axes.get_xlim()
    if high - low < 1:  # a single step
        plot.axes.set_xlim(round(low) - 1, round(low) + 1)
    plot.axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _style(theme: Theme) -> dict[str, object]:
    return {
        "figure.facecolor": theme.surface,
        "savefig.facecolor": theme.surface,
        "axes.facecolor": theme.surface,
        "axes.edgecolor": theme.grid,
        "axes.labelcolor": theme.muted,
        "axes.titlecolor": theme.ink,
        "axes.titleweight": "bold",
        "axes.titlesize": 12,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "grid.color": theme.grid,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "text.color": theme.ink,
        "text.parse_math": False,
        "font.size": 10,
        "legend.frameon": False,
        "legend.labelcolor": theme.muted,
        "legend.handlelength": 1.4,
        "legend.columnspacing": 1.4,
        "lines.linewidth": 2,
        "lines.markersize": 4,
        "lines.solid_capstyle": "round",
    }
