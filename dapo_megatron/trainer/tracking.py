"""The run directory: what a run leaves behind, written so that a kill at any moment leaves it readable.

    config.yaml                          the resolved configuration
    metrics.jsonl                        one JSON object a step
    samples/step_0000010.jsonl           rollouts of a training step
    samples/SET_step_0000010.jsonl       rollouts of an evaluation of SET after that step
    checkpoints/step_0000010/            a checkpoint
    report.html, report_*.png            what report.py makes of the above

A metrics line is appended whole; every other file is written under a temporary name and renamed last.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)

Metrics = dict[str, float]
"""Metric name -> value; `step` is always there."""

_EVALUATION_METRIC = re.compile(r"val/(?P<set>.+)/(?P<what>mean|pass|maj)@(?P<k>\d+)")
_SAMPLES_NAME = re.compile(r"(?:(?P<set>.+)_)?step_(?P<step>\d{7,})")
_CHECKPOINT_NAME = re.compile(r"step_(\d{7,})")


def samples_name(step: int, evaluation_set: str | None = None) -> str:
    """Name of the rollouts of a training step, or of an evaluation of `evaluation_set` after it."""
    return f"{evaluation_set}_step_{step:07d}" if evaluation_set else f"step_{step:07d}"


def evaluation_metrics(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Evaluation set -> `mean`, `pass`, `maj` -> the metric's name (of the largest k), in the order of `names`."""
    found = [match for name in names if (match := _EVALUATION_METRIC.fullmatch(name))]
    sets: dict[str, dict[str, str]] = {match["set"]: {} for match in found}
    for match in sorted(found, key=lambda match: int(match["k"])):
        sets[match["set"]][match["what"]] = match[0]
    return sets


class RunDirectory:
    """Reads and writes one run directory; made by `create` (a new run) or `open` (an existing one).

    One process writes. Readers may look at any time, also while the run goes on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._nulled: set[str] = set()

    @classmethod
    def create(cls, path: str | Path, config_yaml: str) -> RunDirectory:
        """Start a new run in `path`, a folder that is empty or does not exist yet.

        Raises:
            ValueError: `path` is a file, or a folder that holds something.
        """
        run = cls(Path(path))
        if run.path.exists() and not run.path.is_dir():
            raise ValueError(f"trainer.run_dir={run.path} is a file; a run needs a folder of its own")
        if run.path.is_dir() and (held := sorted(entry.name for entry in run.path.iterdir())):
            listed = ", ".join(held[:4]) + (", ..." if len(held) > 4 else "")
            raise ValueError(
                f"run directory {run.path} is not empty (it holds {listed}) and is not overwritten: "
                f"delete it, or choose another, for example trainer.run_dir={_next_free(run.path)}"
            )
        run.samples_folder.mkdir(parents=True, exist_ok=True)
        write_whole(run.config_path, config_yaml)
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Open the directory of a run that was started before.

        Raises:
            ValueError: there is no such folder, or it is not a run directory.
        """
        run = cls(Path(path))
        if not run.path.is_dir():
            nearest = _nearest_run(run.path)
            raise ValueError(
                f"there is no run directory {run.path}" + (f"; did you mean {nearest}?" if nearest else "")
            )
        if not run.config_path.is_file():
            inside = sorted(config.parent for config in run.path.glob("*/config.yaml"))
            hint = f"; did you mean {inside[-1]}?" if inside else ""
            raise ValueError(f"{run.path} is not a run directory: it has no config.yaml{hint}")
        return run

    @property
    def config_path(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def metrics_path(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def samples_folder(self) -> Path:
        """Rollouts as JSONL."""
        return self.path / "samples"

    @property
    def report_path(self) -> Path:
        """Where the report is, once it is written."""
        return self.path / "report.html"

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Append one line. `step` must be there; `timestamp_s` (seconds since 1970) is added.

        A number that is not finite becomes null, with a warning the first time for each key.
        """
        assert "step" in metrics, "a metrics line without its step"
        line = {"step": int(metrics["step"]), **{key: value for key, value in metrics.items() if key != "step"}}
        line.setdefault("timestamp_s", round(time.time(), 3))
        record = _json_ready(line)
        for key, value in record.items():
            if value is None and key not in self._nulled:
                self._nulled.add(key)
                logger.warning("step %d: %s is %s, written as null", line["step"], key, line[key])
        with open(self.metrics_path, "ab+") as file:
            file.write(_separator(file) + json.dumps(record, allow_nan=False).encode() + b"\n")

    def read_metrics(self) -> list[Metrics]:
        """All steps in ascending order; empty when no line was written yet.

        Lines of the same step are merged, the later value wins. null reads as NaN. A line that was cut by a kill is
        left out with a warning.
        """
        steps: dict[int, Metrics] = {}
        for line in _read_json_lines(self.metrics_path) if self.metrics_path.exists() else ():
            step = line.get("step")
            if not isinstance(step, int):
                logger.warning("%s: a line without a step is left out", self.metrics_path)
                continue
            numbers = {key: math.nan if value is None else value for key, value in line.items()}
            steps.setdefault(step, {}).update(numbers)
        return [steps[step] for step in sorted(steps)]

    def write_samples(self, name: str, records: Iterable[Mapping[str, Any]]) -> Path:
        """Write `samples/NAME.jsonl` (`samples_name` makes the names), one rollout a line; returns its path."""
        lines = [json.dumps(_json_ready(record), ensure_ascii=False, allow_nan=False) + "\n" for record in records]
        return write_whole(self._samples_path(name), "".join(lines))

    def read_samples(self, name: str) -> list[dict[str, Any]]:
        """The rollouts of `samples/NAME.jsonl`.

        Raises:
            ValueError: there is no such file.
        """
        path = self._samples_path(name)
        if not path.is_file():
            known = sorted(entry.stem for entry in self.samples_folder.glob("*.jsonl"))
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ValueError(f"{path} does not exist; " + (f"nearest: {nearest[0]}" if nearest else "there are none"))
        return list(_read_json_lines(path))

    def sample_steps(self, evaluation_set: str | None = None) -> list[int]:
        """Steps with rollouts of `evaluation_set` (None: of training), ascending."""
        names = (_SAMPLES_NAME.fullmatch(path.stem) for path in self.samples_folder.glob("*.jsonl"))
        return sorted(int(name["step"]) for name in names if name and name["set"] == evaluation_set)

    def checkpoint_folder(self, step: int) -> Path:
        """Folder of the checkpoint of `step`, whether or not it exists."""
        return self.path / "checkpoints" / f"step_{step:07d}"

    def last_checkpoint(self) -> tuple[int, Path]:
        """Step and folder of the newest complete checkpoint (an incomplete one has a temporary name).

        Raises:
            ValueError: there is none.
        """
        folders = [path for path in self.path.glob("checkpoints/*") if path.is_dir()]
        found = {int(name[1]): path for path in folders if (name := _CHECKPOINT_NAME.fullmatch(path.name))}
        if not found:
            raise ValueError(
                f"{self.path} has no checkpoint: the run did not get to one "
                "(they are written at the end and every trainer.checkpoint_every_steps)"
            )
        return max(found.items())

    def _samples_path(self, name: str) -> Path:
        assert _SAMPLES_NAME.fullmatch(name) and Path(name).name == name, f"not a name of samples: {name!r}"
        return self.samples_folder / f"{name}.jsonl"


def write_whole(path: Path, text: str) -> Path:
    """Write a UTF-8 file under a temporary name and rename it: readers see all of it or nothing. Returns `path`."""
    temporary = path.with_name(f".{path.name}.tmp")
    # A lone surrogate (half a character, from a decoded token) becomes \udXXX, which in JSON reads back as it was.
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(temporary, path)
    return path


def _json_ready(record: Mapping[str, Any]) -> dict[str, Any]:
    """NumPy and torch scalars to Python's, numbers that are not finite to None."""
    plain = {key: value.item() if hasattr(value, "item") else value for key, value in record.items()}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in plain.items()}


def _separator(file: IO[bytes]) -> bytes:
    """A newline where the last line was cut by a kill, so that the next one does not continue it."""
    if file.seek(0, os.SEEK_END) == 0:
        return b""
    file.seek(-1, os.SEEK_END)
    return b"" if file.read(1) == b"\n" else b"\n"


def _read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:  # JSONDecodeError, or a UTF-8 sequence that was cut
            record = None
        if isinstance(record, dict):
            yield record
        else:
            logger.warning("%s: line %d is cut off, it is left out", path, number)


def _next_free(path: Path) -> Path:
    path = path if path.name else path.resolve()
    return next(free for n in range(2, 10**6) if not (free := path.with_name(f"{path.name}_{n}")).exists())


def _nearest_run(path: Path) -> Path | None:
    """The run directory beside `path` whose name is most like it."""
    runs = [config.parent for config in path.parent.glob("*/config.yaml")]
    nearest = difflib.get_close_matches(path.name, [run.name for run in runs], n=1, cutoff=0.4)
    return path.parent / nearest[0] if nearest else None
