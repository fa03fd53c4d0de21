"""The report of a run: one HTML file that needs nothing beside it, made from a run directory at any time.

`write_report` makes the page (report.html holds its frame and its looks, figures.py draws the curves, rollouts.py
chooses and shows samples), `summary` says the same in a few lines, `accuracy_figure` draws one picture.
"""

from __future__ import annotations

import base64
import math
import time
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dapo_megatron.trainer.figures import (
    DARK,
    FIGURES,
    LIGHT,
    SMOOTHED_FROM_STEPS,
    FigureSpec,
    Limits,
    draw,
    draw_accuracy,
    training_time_s,
)
from dapo_megatron.trainer.progress import duration, percent
from dapo_megatron.trainer.rollouts import rollouts_section
from dapo_megatron.trainer.tracking import Metrics, RunDirectory, evaluation_metrics, write_whole

_SMOOTHING_NOTE = "A faint line is what was measured, the strong one its moving average."


@dataclass(frozen=True)
class Change:
    """A metric at the first and at the last evaluation; both the same where there was one."""

    metric: str
    first: float
    last: float
    evaluations: int

    @property
    def short(self) -> str:
        """The metric without its set: mean@4."""
        return self.metric.rpartition("/")[2]

    def __str__(self) -> str:
        return percent(self.last) if self.evaluations == 1 else f"{percent(self.first)} -> {percent(self.last)}"


@dataclass(frozen=True)
class Run:
    """What the report says of a run, read from its directory."""

    directory: RunDirectory
    config_yaml: str
    config: DictConfig
    metrics: list[Metrics]

    @classmethod
    def read(cls, run_dir: str | Path) -> Run:
        """Raises ValueError where `run_dir` is not a run directory (`RunDirectory.open`)."""
        directory = RunDirectory.open(run_dir)
        config_yaml = directory.config_path.read_text(encoding="utf-8", errors="replace")
        config = OmegaConf.create(config_yaml)
        return cls(
            directory,
            config_yaml,
            config if isinstance(config, DictConfig) else DictConfig({}),
            directory.read_metrics(),
        )

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.directory.path.resolve().name

    @property
    def steps(self) -> int:
        """The last step that was recorded."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def training_s(self) -> float | None:
        """Seconds in steps, evaluations and checkpoints aside; None if no step was timed."""
        return max(training_time_s(self.metrics).values(), default=None)

    @property
    def wall_s(self) -> float | None:
        """Seconds from the first metrics line (or the beginning of its step) to the last; None if unknown."""
        stamps = [line["timestamp_s"] for line in self.metrics if "timestamp_s" in line]
        if not stamps:
            return None
        first_s = self.metrics[0].get("timing_s/step", 0.0)
        return stamps[-1] - stamps[0] + (first_s if math.isfinite(first_s) else 0.0)

    def setting(self, path: str) -> Any:
        """A value of the resolved configuration; None where it is not there."""
        return OmegaConf.select(self.config, path)

    def change(self, metric: str) -> Change | None:
        """First and last finite value of a metric."""
        values = [line[metric] for line in self.metrics if math.isfinite(line.get(metric, math.nan))]
        return Change(metric, values[0], values[-1], len(values)) if values else None

    def held_out(self) -> dict[str, dict[str, Change]]:
        """Evaluation set -> mean, pass, maj -> its change; sets without a mean are left out."""
        sets = {}
        for name, metrics in evaluation_metrics(key for line in self.metrics for key in line).items():
            changes = {what: change for what, metric in metrics.items() if (change := self.change(metric))}
            if "mean" in changes:
                sets[name] = changes
        return sets


def summary(run_dir: str | Path) -> str:
    """What came out, in a few lines: accuracy before -> after, steps, time, and where the report is."""
    run = Run.read(run_dir)
    lines = []
    for name, changes in run.held_out().items():
        also = f" ({changes['pass'].short} {changes['pass']})" if "pass" in changes else ""
        lines.append(("Held-out accuracy", f"{changes['mean']}  {name}, {changes['mean'].short}{also}"))
    lines = lines or [("Held-out accuracy", "not measured")]
    lines.append(("Training", f"{run.steps} steps" + (f" in {duration(run.training_s)}" if run.training_s else "")))
    if run.wall_s:
        lines.append(("With evaluations", duration(run.wall_s)))
    if run.directory.report_path.exists():
        lines.append(("Report", str(run.directory.report_path)))
    width = max(len(label) for label, _ in lines) + 2
    return "\n".join(f"{label:<{width}}{text}" for label, text in lines)


def accuracy_figure(run_dir: str | Path, path: str | Path) -> Path:
    """Draw held-out accuracy by step and training time as a PNG at `path`.

    Raises:
        ValueError: the run was not evaluated.
    """
    run = Run.read(run_dir)
    parts = [run.name, f"{run.steps} steps", f"{duration(run.training_s)} of training" if run.training_s else ""]
    png = draw_accuracy(run.metrics, ", ".join(part for part in parts if part))
    if png is None:
        raise ValueError(f"{run.directory.path} has no evaluation to draw (evaluation.sets was empty, or none ended)")
    Path(path).write_bytes(png)
    return Path(path)


def write_report(run_dir: str | Path) -> Path:
    """Write report.html and report_*.png into the run directory; returns the path of the page.

    Works at any time, also while the run goes on: what was not measured is left out.

    Raises:
        ValueError: `run_dir` is not a run directory.
    """
    run = Run.read(run_dir)
    figures = {spec.name: _figure(run, spec) for spec in FIGURES}
    hero_figure = figures.pop("held_out")
    curves = "\n".join(figure for figure in figures.values() if figure)
    note = f'<p class="lead">{_SMOOTHING_NOTE}</p>' if run.steps >= SMOOTHED_FROM_STEPS else ""
    template = Template(resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8"))
    page = template.substitute(
        name=escape(run.name),
        subtitle=escape(_subtitle(run)),
        hero=_hero(run, hero_figure),
        curves=f'<h2>Training</h2>\n{note}<div class="figures">{curves}</div>' if curves else "",
        rollouts=rollouts_section(run.directory, list(run.held_out())),
        metrics=_metrics_table(run),
        config=escape(run.config_yaml),
        footer=escape(
            f"Made by dapo-megatron report from {run.directory.path.name}/ on {time.strftime('%Y-%m-%d %H:%M')}."
        ),
    )
    return write_whole(run.directory.report_path, page.encode(errors="replace").decode())


def _subtitle(run: Run) -> str:
    planned = run.setting("trainer.steps")
    part_done = f"{run.steps} of {planned} steps" if planned and run.steps < planned else ""
    model = run.setting("model.path")
    return " · ".join(part for part in (str(model or ""), part_done) if part)


def _hero(run: Run, figure: str) -> str:
    scores = []
    for at, (name, changes) in enumerate(run.held_out().items()):
        mean = changes["mean"]
        values = f'<span class="after">{percent(mean.last)}</span>'
        if mean.evaluations > 1:
            values = f'<span class="before">{percent(mean.first)}</span> <span class="arrow">→</span> {values}'
        others = [changes[what] for what in ("pass", "maj") if what in changes]
        also = ", ".join(f"{change.short} {change}".replace("->", "→") for change in others)
        scores.append(
            f'<div class="score{" small" if at else ""}">'
            f'<p class="label">Held-out accuracy, {escape(name)} ({mean.short})</p>'
            f'<p class="values">{values}</p><p class="also">{also}</p></div>'
        )
    said = "".join(scores) or '<p class="note">This run has no evaluation on held-out problems.</p>'
    left = f'<div class="left"><div class="card scores">{said}</div>{_facts(run)}</div>'
    return f'<div class="hero{"" if figure else " alone"}">{left}{figure}</div>'


def _facts(run: Run) -> str:
    last = run.metrics[-1] if run.metrics else {}
    rates = [
        line["throughput/tokens_per_s"]
        for line in run.metrics
        if math.isfinite(line.get("throughput/tokens_per_s", math.nan))
    ]
    length = run.change("response_length/mean")
    facts = {
        "Steps": str(run.steps),
        "Updates": f"{updates:.0f}" if (updates := last.get("update")) else "",
        "Training time": duration(run.training_s) if run.training_s else "",
        "Wall time": duration(run.wall_s) if run.wall_s else "",
        "Tokens sampled/s": f"{sum(rates) / len(rates):,.0f}" if rates else "",
        "Response tokens": f"{length.first:,.0f} → {length.last:,.0f}" if length else "",
    }
    cells = "".join(f"<div><dt>{label}</dt><dd>{text}</dd></div>" for label, text in facts.items() if text)
    return f'<dl class="facts card">{cells}</dl>'


def _figure(run: Run, spec: FigureSpec) -> str:
    """The figure as HTML, light and dark, its light PNG also beside the page; empty if there is nothing to draw."""
    marked = {
        "max_response_tokens": run.setting("rollout.max_response_tokens"),
        "clip_grad": run.setting("optimizer.clip_grad"),
        "reward_right": run.setting("algorithm.reward.right"),
        "reward_wrong": run.setting("algorithm.reward.wrong"),
    }
    limits = Limits(**{name: value for name, value in marked.items() if value is not None})
    beside = run.directory.path / f"report_{spec.name}.png"
    light, dark = (draw(spec, run.metrics, limits, theme) for theme in (LIGHT, DARK))
    if light is None or dark is None:
        beside.unlink(missing_ok=True)
        return ""
    beside.write_bytes(light)
    dark_url, light_url = (f"data:image/png;base64,{base64.b64encode(png).decode()}" for png in (dark, light))
    return (
        f'<figure class="card"><picture><source media="(prefers-color-scheme: dark)" srcset="{dark_url}">'
        f'<img src="{light_url}" alt="{escape(spec.title)}"></picture>'
        f"<figcaption>{escape(spec.caption)}</figcaption></figure>"
    )


def _metrics_table(run: Run) -> str:
    """Every metric at its first and last step, and its range."""
    rows = []
    for key in sorted({key for line in run.metrics for key in line} - {"step", "timestamp_s"}):
        values = [line[key] for line in run.metrics if math.isfinite(line.get(key, math.nan))]
        if values:
            cells = "".join(f"<td>{number:,.4g}</td>" for number in (values[0], values[-1], min(values), max(values)))
            rows.append(f"<tr><td>{escape(key)}</td>{cells}</tr>")
    if not rows:
        return '<p class="card note">No step was recorded.</p>'
    head = "<tr><th>metric</th><th>first</th><th>last</th><th>lowest</th><th>highest</th></tr>"
    return (
        f'<details class="card"><summary>All metrics</summary><div><table>{head}{"".join(rows)}</table></div></details>'
    )
