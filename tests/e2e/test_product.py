"""Real Megatron-Core, real vLLM, real Ray: a few steps through the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dapo_megatron.trainer.tracking import RunDirectory
from tests.conftest import PROJECT_ROOT
from tests.e2e.conftest import Command, environment

TRAIN = ["train", "--config-name", "quickstart"]


@pytest.fixture(scope="module")
def one_engine(command: Command, problems: list[str], tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """One training rank, one engine."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    command([*TRAIN, *problems, "trainer.steps=6", f"trainer.run_dir={folder}"])
    return RunDirectory.open(folder)


def test_the_policy_learns(one_engine: RunDirectory) -> None:
    lines = one_engine.read_metrics()
    assert [line["step"] for line in lines] == list(range(7))
    assert lines[-1]["val/heldout/mean@4"] > lines[0]["val/heldout/mean@4"] + 0.15


def test_engine_and_actor_agree_before_and_after_every_sync(one_engine: RunDirectory) -> None:
    """numerics.md, invariant 5: a stale or half-loaded engine would show here from step 2 on."""
    for line in one_engine.read_metrics()[1:]:
        assert line["mismatch/logprob_diff_max"] <= 1e-5
    samples = [one_engine.read_samples(f"step_{step:07d}")[0] for step in (1, 2, 6)]
    assert [sample["policy_version"] for sample in samples] == [0, 1, 5]


def test_first_update_of_a_step_starts_at_ratio_one(one_engine: RunDirectory) -> None:
    """numerics.md, invariant 4 (each step has one update here)."""
    for line in one_engine.read_metrics()[1:]:
        assert line["policy/ratio"] == pytest.approx(1.0, abs=1e-6)
        assert line["policy/kl_old"] == pytest.approx(0.0, abs=1e-6)
        assert line["policy/clip_fraction_low"] == line["policy/clip_fraction_high"] == 0.0
        assert line["policy/skipped_updates"] == 0


@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.data=2", "rollout.engines=2"],
        ["parallel.tensor=2", "parallel.sequence_parallel=true", "parallel.pipeline=2", "rollout.sleep_level=2"],
        ["parallel.context=2", "rollout.tensor=2", "cluster.placement=disaggregated"],
    ],
    ids=["two ranks, two engines", "TP2+SPxPP2, weights dropped", "CP2, a TP2 engine, disaggregated"],
)
def test_another_layout_trains_the_same(
    layout: list[str], one_engine: RunDirectory, command: Command, problems: list[str], tmp_path: Path
) -> None:
    """The same batch, loss and gradient; every engine follows the sync, tensor for tensor, and leaves no memory."""
    shared_memory = set(os.listdir("/dev/shm"))
    options = ["evaluation.before_training=false", "evaluation.sets={}", "weights.verify=checksums"]
    command([*TRAIN, *problems, *layout, *options, "trainer.steps=2", f"trainer.run_dir={tmp_path / 'two'}"])
    two = RunDirectory.open(tmp_path / "two")
    reference = one_engine.read_samples("step_0000001")
    assert [s["response"] for s in two.read_samples("step_0000001")] == [s["response"] for s in reference]
    first, expected = two.read_metrics()[0], one_engine.read_metrics()[1]
    for name in expected:
        if name.split("/")[0] in ("reward", "response_length", "policy") and not name.startswith("policy/kl"):
            assert first[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
    assert two.read_metrics()[1]["mismatch/logprob_diff_max"] <= 1e-5
    assert set(os.listdir("/dev/shm")) <= shared_memory


def test_evaluate_and_report_read_the_run(one_engine: RunDirectory, command: Command, tmp_path: Path) -> None:
    """The checkpoint, loaded afresh, scores what the run's last evaluation scored."""
    printed = command(["evaluate", "--run", str(one_engine.path), "--json", str(tmp_path / "values.json")]).stdout
    after = one_engine.read_metrics()[-1]["val/heldout/mean@4"]
    assert f"{after:.4f}" in next(line for line in printed.splitlines() if line.startswith("val/heldout/mean@4"))
    command(["report", str(one_engine.path)])
    page = one_engine.report_path.read_text()
    assert "<img" in page and "http" not in page.split("<body")[0].replace("http-equiv", "")


def test_ctrl_c_ends_every_process_and_leaves_the_run_readable(problems: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "interrupted"
    arguments = [*TRAIN, *problems, "trainer.steps=1000", f"trainer.run_dir={folder}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "dapo_megatron.cli", *arguments],
        cwd=PROJECT_ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (folder / "metrics.jsonl").exists() or len(RunDirectory.open(folder).read_metrics()) < 2:
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.2)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not [child.name() for child in alive]
    assert RunDirectory.open(folder).read_metrics()[-1]["step"] >= 1
