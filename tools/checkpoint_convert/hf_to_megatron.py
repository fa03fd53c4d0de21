"""HF folder -> Megatron distributed checkpoint; the same as `dapo-megatron convert hf-to-megatron`."""

import sys
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dapo_megatron.cli_convert import hf_to_megatron  # noqa: E402

if __name__ == "__main__":
    typer.run(hf_to_megatron)
