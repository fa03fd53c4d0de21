"""The command line: what it prints, its exit codes, and that it hands the right thing on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import dapo_megatron
from dapo_megatron import doctor
from dapo_megatron.cli import app
from dapo_megatron.config.compose import load_config, load_file, to_yaml
from dapo_megatron.config.schema import Config

CONF = Path(__file__).parents[1] / "conf"
METRICS = {"val/heldout/mean@4": 0.25, "val/heldout/pass@4": 0.5}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


class Calls:
    """Stands in for dapo_megatron.commands and keeps what it was called with."""

    def __init__(self) -> None:
        self.trained: list[Config] = []
        self.evaluated: list[tuple[Config, Path]] = []
        self.error: BaseException | None = None

    def train(self, config: Config) -> None:
        if self.error is not None:
            raise self.error
        self.trained.append(config)

    def evaluate(self, config: Config, folder: Path) -> SimpleNamespace:
        self.evaluated.append((config, folder))
        return SimpleNamespace(metrics=METRICS)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    module = ModuleType("dapo_megatron.commands")
    module.__dict__.update(train=calls.train, evaluate=calls.evaluate)
    monkeypatch.setitem(sys.modules, "dapo_megatron.commands", module)
    monkeypatch.setattr(dapo_megatron, "commands", module, raising=False)
    return calls


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which the quick start is prepared."""
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / ".cache/quickstart/base")
    for name in ("train", "heldout"):
        (tmp_path / f".cache/quickstart/{name}.jsonl").touch()
    return tmp_path


def make_run(folder: Path, *steps: int) -> Path:
    for step in steps:
        make_model(folder / f"checkpoints/step_{step:07d}/hf")
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(load_config("quickstart", ["evaluation.seed=7"], [CONF])))
    return folder


def test_dry_run_prints_the_resolved_configuration_and_stops(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("train", "--config-name", "quickstart", "--dry-run", "trainer.steps=2", "rollout.sampling.top_k=-1")
    assert result.exit_code == 0, result.output
    assert not calls.trained
    assert not list(tmp_path.iterdir())
    (tmp_path / "printed.yaml").write_text(result.stdout)
    assert load_file(tmp_path / "printed.yaml") == load_config("quickstart", ["trainer.steps=2"], [CONF])


def test_train_hands_the_configuration_on(calls: Calls, prepared: Path) -> None:
    result = run("train", "--config-name", "quickstart", "trainer.steps=2")
    assert result.exit_code == 0, result.output
    assert [config.trainer.steps for config in calls.trained] == [2]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config-name", "quick"], "unknown configuration 'quick'"),
        (["--config-name", "quickstart", "trainer.stepz=1"], "the nearest is 'trainer.steps'"),
        (["--config-name", "quickstart", "trainer.update_batch_size=60"], "nearest valid size is 64"),
        (["--config-name", "quickstart", "--dry-run", "optimizer.lr=0"], "optimizer.lr=0.0 must be above 0"),
        (["--config-name", "quickstart"], "make it with: python examples/quickstart/prepare.py"),
    ],
)
def test_a_users_mistake_is_one_message_and_exit_code_2(
    arguments: list[str], expected: str, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("train", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert expected in result.stderr
    assert "Traceback" not in result.output
    assert not calls.trained


def test_mistakes_found_later_are_reported_alike(calls: Calls, prepared: Path) -> None:
    class FromAnotherProcess(ValueError):
        cause = ValueError("row 7 has no prompt")

    calls.error = FromAnotherProcess("a long remote traceback")
    result = run("train", "--config-name", "quickstart")
    assert (result.exit_code, result.stderr) == (2, "error: row 7 has no prompt\n")
    result = run("train", "--config-name", "quickstart", "--debug")
    assert result.exception is calls.error


def test_a_bug_keeps_its_traceback(calls: Calls, prepared: Path) -> None:
    calls.error = RuntimeError("lost")
    assert run("train", "--config-name", "quickstart").exception is calls.error


def test_an_interrupt_is_one_line_and_exit_code_130(calls: Calls, prepared: Path) -> None:
    calls.error = KeyboardInterrupt()
    result = run("train", "--config-name", "quickstart")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_evaluate_takes_the_last_checkpoint_and_the_runs_configuration(calls: Calls, prepared: Path) -> None:
    folder = make_run(prepared / "run", 5, 10)
    result = run("evaluate", "--run", str(folder), "--json", "out/metrics.json", "evaluation.sampling.top_p=0.7")
    assert result.exit_code == 0, result.output
    (config, model), *_ = calls.evaluated
    assert model == folder / "checkpoints/step_0000010/hf"
    assert config.model.path == str(model)
    assert (config.evaluation.seed, config.evaluation.sampling.top_p) == (7, 0.7)
    assert "val/heldout/mean@4  0.2500" in result.stdout
    assert json.loads(Path("out/metrics.json").read_text()) == {"model": str(model), **METRICS}


def test_evaluate_one_step_and_a_folder(calls: Calls, prepared: Path) -> None:
    folder = make_run(prepared / "run", 5, 10)
    assert run("evaluate", "--run", str(folder), "--step", "5").exit_code == 0
    (prepared / ".cache/quickstart/train.jsonl").unlink()
    base = ".cache/quickstart/base"
    assert run("evaluate", "--model", base, "--config-name", "quickstart").exit_code == 0
    assert [model for _, model in calls.evaluated] == [folder / "checkpoints/step_0000005/hf", Path(base)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--config-name"),
        (["--config-name", "quickstart"], "either --run RUN_DIR or --model HF_FOLDER"),
        (["--run", "run", "--model", "x"], "either --run RUN_DIR or --model HF_FOLDER"),
        (["--run", "run", "--step", "7"], "no checkpoint of step 7; the last one is of step 10"),
        (["--run", "empty"], "no checkpoint"),
        (["--run", "nowhere"], "nowhere"),
        (["--run", "run", "~evaluation.sets", "evaluation.every_steps=null"], "evaluation.sets is empty"),
        (["--config-name", "quickstart", "--model", "nowhere"], "model.path=nowhere: there is no such folder"),
    ],
)
def test_evaluate_refuses(arguments: list[str], expected: str, calls: Calls, prepared: Path) -> None:
    make_run(prepared / "run", 10)
    make_run(prepared / "empty")
    result = run("evaluate", *arguments)
    assert result.exit_code == 2, result.output
    assert expected in result.stderr
    assert not calls.evaluated


def test_report_ends_with_a_summary(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(prepared / "run")
    lines = [
        {"step": 0, "val/heldout/mean@4": 0.25},
        {"step": 1, "timing_s/step": 61.0, "reward/accuracy": 0.3},
        {"step": 2, "timing_s/step": 64.0, "val/heldout/mean@4": 0.925},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    module = ModuleType("dapo_megatron.trainer.report")
    module.__dict__["write_report"] = lambda run_dir: Path(run_dir) / "report.html"
    monkeypatch.setitem(sys.modules, "dapo_megatron.trainer.report", module)
    result = run("report", "run")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "heldout mean@4: 25.0% -> 92.5% (step 0 -> 2)",
        "training: 2 steps in 2 min 05 s",
        "report: run/report.html",
    ]


def test_report_refuses_what_is_no_run(prepared: Path) -> None:
    result = run("report", ".cache")
    assert result.exit_code == 2
    assert "is not a run directory" in result.stderr


@pytest.mark.parametrize("usable", [True, False])
def test_doctor_says_by_its_exit_code_whether_training_runs(usable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = () if usable else doctor.TRAINING
    diagnosis = doctor.Diagnosis([doctor.Finding("torch", "2.13.0", "advice", blocks)])
    monkeypatch.setattr(doctor, "probe", doctor.Facts)
    monkeypatch.setattr(doctor, "diagnose", lambda facts: diagnosis)
    result = run("doctor", "--json")
    assert result.exit_code == (0 if usable else 1)
    assert json.loads(result.stdout)["usable"] is usable
    result = run("doctor")
    assert result.exit_code == (0 if usable else 1)
    assert "2.13.0" in result.stdout


def test_help_names_the_commands() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("train", "evaluate", "report", "doctor"):
        assert command in result.stdout
