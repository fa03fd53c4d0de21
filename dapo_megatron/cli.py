"""The command line: dapo-megatron train | evaluate | convert | report | doctor.

Only light imports stand at the top: each command imports what it runs, so that `--help` needs no engine. A ValueError
is a user's mistake and becomes one `error:` line and exit code 2; Ctrl-C is exit code 130.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dapo_megatron import cli_convert
from dapo_megatron.user_errors import reported as _reported

if TYPE_CHECKING:
    from dapo_megatron.config.schema import Config
    from dapo_megatron.trainer.tracking import RunDirectory

app = typer.Typer(
    name="dapo-megatron",
    help="DAPO reinforcement learning for reasoning LLMs: Megatron-Core actors, vLLM rollouts, Ray placement.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(cli_convert.app, name="convert")

ConfigName = Annotated[str, typer.Option("--config-name", help="A file under conf/ without its ending.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[OVERRIDES]...", help="`a.b=c` sets a value, `algorithm=grpo` takes conf/algorithm/grpo."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Log more, and show the traceback of an error.")]


@app.command()
def train(
    config_name: ConfigName,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")] = False,
    debug: Debug = False,
) -> None:
    """Train a policy."""
    with _reported(debug):
        from dapo_megatron.config.compose import load_config, to_yaml
        from dapo_megatron.config.validate import validate
        from dapo_megatron.config.validate_model import validate_files

        config = load_config(config_name, overrides or [])
        validate(config)
        if dry_run:
            typer.echo(to_yaml(config), nl=False)
            return
        validate_files(config)
        _log_to_terminal(debug)
        from dapo_megatron import commands

        commands.train(config)


@app.command()
def evaluate(
    overrides: Overrides = None,
    run: Annotated[Path | None, typer.Option(help="Evaluate a checkpoint of this run.")] = None,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; the last one by default.")] = None,
    model: Annotated[Path | None, typer.Option(help="Evaluate this HF model folder.")] = None,
    config_name: Annotated[
        str | None, typer.Option(help="A file under conf/ without its ending; with --run, the run's own by default.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the metrics to this file.")] = None,
    debug: Debug = False,
) -> None:
    """Sample the evaluation sets and print mean@k and pass@k."""
    with _reported(debug):
        from dapo_megatron.config.validate import validate
        from dapo_megatron.config.validate_model import validate_files

        config = _evaluation_config(config_name, run, overrides or [])
        folder = _model_folder(run, step, model)
        config.model.path, config.model.gguf_file, config.model.made_by = str(folder), None, None
        if not config.evaluation.sets:
            raise ValueError("evaluation.sets is empty: name a set, e.g. evaluation.sets.test.dataset.path=test.jsonl")
        # The training problems play no part: they may be gone.
        config.data.train = next(iter(config.evaluation.sets.values())).dataset
        validate(config)
        validate_files(config)
        _log_to_terminal(debug)
        from dapo_megatron import commands

        metrics = commands.evaluate(config, folder).metrics
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(json.dumps({"model": str(folder), **metrics}, indent=2) + "\n")
        typer.echo(f"model: {folder}")
        width = max(map(len, metrics))
        for name, value in metrics.items():
            typer.echo(f"{name.ljust(width)}  {value:.4f}")


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.")],
    debug: Debug = False,
) -> None:
    """Write report.html and the pictures of a run, and print a summary."""
    with _reported(debug):
        from dapo_megatron.trainer.report import write_report
        from dapo_megatron.trainer.tracking import RunDirectory

        run = RunDirectory.open(run_dir)
        path = write_report(run_dir)
        for line in _summary(run):
            typer.echo(line)
        typer.echo(f"report: {path}")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Say what is installed, what is missing for cpu / gpu / fp8 / launch, and what to do about it."""
    with _reported(debug):
        from dapo_megatron.doctor import diagnose, probe, render

        diagnosis = diagnose(probe())
        if as_json:
            typer.echo(json.dumps(diagnosis.to_dict(), indent=2))
        else:
            render(diagnosis)
    raise typer.Exit(0 if diagnosis.usable else 1)


def main() -> None:
    """Entry point of the `dapo-megatron` program."""
    app()


def _log_to_terminal(debug: bool) -> None:
    """Log lines that a live progress display does not tear apart; plain lines where there is no terminal."""
    import rich
    from rich.logging import RichHandler

    handler: logging.Handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    if sys.stdout.isatty():
        handler = RichHandler(console=rich.get_console(), show_path=False, markup=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, handlers=[handler])


def _evaluation_config(config_name: str | None, run: Path | None, overrides: list[str]) -> Config:
    from dapo_megatron.config.compose import load_config, load_file

    if config_name is not None:
        return load_config(config_name, overrides)
    if run is None:
        raise ValueError("name the evaluation sets with --config-name, or the run with --run")
    return load_file(run / "config.yaml", overrides)


def _model_folder(run: Path | None, step: int | None, model: Path | None) -> Path:
    """The HF folder to evaluate: `model`, or a checkpoint of `run`."""
    if (run is None) == (model is None):
        raise ValueError("name what to evaluate: either --run RUN_DIR or --model HF_FOLDER")
    if model is not None:
        return model
    assert run is not None
    from dapo_megatron.trainer.tracking import RunDirectory

    directory = RunDirectory.open(run)
    last, folder = directory.last_checkpoint()
    if step is not None:
        folder = directory.checkpoint_folder(step)
        if not folder.is_dir():
            raise ValueError(f"{run} has no checkpoint of step {step}; the last one is of step {last}")
    return folder / "hf"


def _summary(run: RunDirectory) -> Iterator[str]:
    """Accuracy before and after, and the time that training took."""
    from dapo_megatron.trainer.progress import duration, percent
    from dapo_megatron.trainer.tracking import evaluation_metrics

    steps = run.read_metrics()
    for name, metrics in evaluation_metrics(dict.fromkeys(key for step in steps for key in step)).items():
        for what, key in metrics.items():
            found = [(step["step"], step[key]) for step in steps if key in step]
            (first, before), (last, after) = found[0], found[-1]
            k = key.rpartition("@")[2]
            yield f"{name} {what}@{k}: {percent(before)} -> {percent(after)} (step {first} -> {last})"
    trained = [step for step in steps if "timing_s/step" in step]
    if trained:
        yield f"training: {len(trained)} steps in {duration(sum(step['timing_s/step'] for step in trained))}"


if __name__ == "__main__":
    main()
