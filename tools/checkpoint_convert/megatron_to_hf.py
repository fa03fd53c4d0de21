"""Megatron distributed checkpoint -> HF folder; the same as `dapo-megatron convert megatron-to-hf`."""

import sys
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dapo_megatron.cli_convert import megatron_to_hf  # noqa: E402

if __name__ == "__main__":
    typer.run(megatron_to_hf)
