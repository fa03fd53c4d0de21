"""What stays light, and what is shipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
HEAVY = ("torch", "megatron", "vllm", "ray", "transformers", "datasets", "numpy", "hydra", "matplotlib")


def loaded_by(code: str, *arguments: str) -> set[str]:
    """Those of HEAVY that are loaded after `code` ran in a fresh process."""
    report = f"print('LOADED', *(name for name in {HEAVY!r} if name in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\n{report}", *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=PROJECT,
    )
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("LOADED")]
    return set(line.split()[1:])


def test_the_package_imports_nothing_heavy() -> None:
    assert loaded_by("import dapo_megatron") == set()


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["evaluate", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = "from dapo_megatron.cli import main\ntry:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    assert loaded_by(code, *arguments) == set()


def test_a_dry_run_needs_no_engine() -> None:
    code = "from dapo_megatron.cli import main\ntry:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    loaded = loaded_by(code, "train", "--config-name", "quickstart", "--dry-run")
    assert not loaded & {"torch", "megatron", "vllm", "ray", "transformers", "datasets"}


def test_the_configuration_files_are_in_the_wheel(tmp_path: Path) -> None:
    """Builds the package's files as the wheel does, and looks for conf/ in it."""
    subprocess.run(
        [sys.executable, "-c", "from setuptools import setup; setup()", "-q", "build_py", "--build-lib", str(tmp_path)],
        check=True,
        capture_output=True,
        cwd=PROJECT,
    )
    shipped = {file.relative_to(tmp_path / "dapo_megatron") for file in tmp_path.glob("dapo_megatron/conf/**/*.yaml")}
    assert shipped == {file.relative_to(PROJECT) for file in (PROJECT / "conf").rglob("*.yaml")}
    assert not (tmp_path / "tests").exists()
