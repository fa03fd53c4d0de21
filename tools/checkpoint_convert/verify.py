"""Compares two checkpoints of either kind; the same as `dapo-megatron convert verify`."""

import sys
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dapo_megatron.cli_convert import verify  # noqa: E402

if __name__ == "__main__":
    typer.run(verify)
