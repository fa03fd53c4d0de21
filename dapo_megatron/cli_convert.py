"""dapo-megatron convert hf-to-megatron | megatron-to-hf | verify: HF folders <-> Megatron distributed checkpoints."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dapo_megatron.user_errors import reported

if TYPE_CHECKING:
    import torch

EXIT_DIFFERENT = 1

_SECONDS_BETWEEN_LINES = 5

app = typer.Typer(help="Convert and compare checkpoints.", no_args_is_help=True)

Source = Annotated[Path, typer.Argument(metavar="SRC", help="An HF folder or a Megatron checkpoint.")]
Target = Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.")]
DType = Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; the source's by default.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace DST, and remove interrupted conversions to it.")]
RefuseNaN = Annotated[bool, typer.Option("--refuse-nan", help="First read everything, and refuse NaN and infinity.")]
HFConfig = Annotated[
    Path | None, typer.Option(help="Folder with config.json and tokenizer, for a Megatron checkpoint without.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command()
def hf_to_megatron(
    source: Source,
    target: Target,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    vpp: Annotated[int | None, typer.Option(help="Model chunks of a stage.")] = None,
    ep: Annotated[int, typer.Option(help="Expert-parallel ranks.")] = 1,
    dtype: DType = None,
    overwrite: Overwrite = False,
    refuse_nan: RefuseNaN = False,
    hf_config: HFConfig = None,
    debug: Debug = False,
) -> None:
    """Write a Megatron distributed checkpoint, stored as the ranks of a layout hold it; it loads into any layout."""
    with reported(debug), _progress() as progress:
        from dapo_megatron.weights.convert import to_megatron

        layout = {"tensor": tp, "pipeline": pp, "virtual_pipeline": vpp, "expert": ep}
        to_megatron(source, target, layout, progress, _dtype(dtype), overwrite, refuse_nan, hf_config)


@app.command()
def megatron_to_hf(
    source: Source,
    target: Target,
    dtype: DType = None,
    overwrite: Overwrite = False,
    refuse_nan: RefuseNaN = False,
    hf_config: HFConfig = None,
    shard_gb: Annotated[float, typer.Option(help="Largest safetensors file, in GB.")] = 5.0,
    debug: Debug = False,
) -> None:
    """Write an HF folder that transformers and vLLM load."""
    with reported(debug), _progress() as progress:
        from dapo_megatron.weights.convert import to_hf

        to_hf(source, target, progress, _dtype(dtype), overwrite, refuse_nan, hf_config, shard_gb * 1e9)


@app.command()
def verify(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint of either kind.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    logits: Annotated[
        str | None, typer.Option(metavar="TEXT_OR_FILE", help="Compare forward passes on this text too.")
    ] = None,
    hf_config: HFConfig = None,
    debug: Debug = False,
) -> None:
    """Compare two checkpoints tensor by tensor; exit code 1 if they differ."""
    different = 0
    with reported(debug):
        from dapo_megatron.weights.convert import open_checkpoint
        from dapo_megatron.weights.verify import LOGITS_TOLERANCE, differences, logits_difference

        left, right = (open_checkpoint(path, hf_config) for path in (a, b))
        for line in differences(left, right):
            different += 1
            typer.echo(line)
        typer.echo(f"{different} tensors differ" if different else f"all {len(left.names())} tensors are equal")
        if logits is not None:
            largest, sentence = logits_difference(left, right, _text(logits))
            different += largest > LOGITS_TOLERANCE
            typer.echo(f"logits: {sentence}")
    raise typer.Exit(EXIT_DIFFERENT if different else 0)


def _text(text_or_file: str) -> str:
    try:
        return Path(text_or_file).read_text()
    except OSError:  # no such file, or a text too long for a name
        return text_or_file


def _dtype(name: str | None) -> torch.dtype | None:
    from dapo_megatron.weights.convert import DTYPES

    if name is not None and name not in DTYPES:
        raise ValueError(f"--dtype {name!r} is not supported: allowed are {', '.join(DTYPES)}")
    return DTYPES[name] if name else None


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Bytes, bytes/s and the time left: a bar on a terminal, else a line every few seconds."""
    from rich.filesize import decimal
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    start = last_line = time.monotonic()
    with Progress(*columns, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("", total=None)

        def advance(written: int, total: int) -> None:
            nonlocal last_line
            bar.update(task, advance=written, total=total)
            done, now = bar.tasks[task].completed, time.monotonic()
            if bar.disable and (now - last_line > _SECONDS_BETWEEN_LINES or done == total):
                last_line = now
                speed = done / max(now - start, 1e-9)
                typer.echo(f"{decimal(int(done))} of {decimal(total)}, {decimal(int(speed))}/s")

        yield advance
