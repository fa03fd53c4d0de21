"""The step and the loop over fakes: who is asked for what in which order, and what a run leaves behind."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dapo_megatron.config.schema import Config, OldLogProbs
from dapo_megatron.data.types import Prompt, Sample
from dapo_megatron.models.flops import training_flops
from dapo_megatron.sampling.group_sampler import Scorer
from dapo_megatron.trainer.evaluate import EvaluationSet, pass_at_k
from dapo_megatron.trainer.progress import Progress
from dapo_megatron.trainer.run import train
from dapo_megatron.trainer.step import PolicyMismatch
from dapo_megatron.trainer.tracking import RunDirectory
from tests.trainer.fakes import DIMENSIONS, FakeEngine, FakeTraining, ParityScorer, SilentScorer, small_config

PROMPTS = [Prompt(str(i), (i, 7), f"{i}?", str(i)) for i in range(11)]


def run(
    config: Config, folder: Path, scorer: Scorer | None = None, engine: type[FakeEngine] = FakeEngine
) -> tuple[RunDirectory, FakeTraining, list[str]]:
    calls: list[str] = []
    rollouts = engine(calls)
    training = FakeTraining(calls, rollouts)
    directory = RunDirectory.create(folder / "run", "config: of the test\n")
    problems = SimpleNamespace(
        train=SimpleNamespace(prompts=PROMPTS), evaluation=[EvaluationSet("held", PROMPTS[:5], 2)]
    )
    with Progress(config.trainer.steps, live=False) as progress:
        asyncio.run(
            train(config, DIMENSIONS, problems, directory, training, [rollouts], scorer or ParityScorer(), progress)
        )
    return directory, training, calls


def test_phases_run_in_the_order_of_the_design(tmp_path: Path) -> None:
    config = small_config()
    config.trainer.steps = 1
    _, _, calls = run(config, tmp_path)
    phases = [call for call in calls if call != "abort_all"]
    to_actors = ["release", "reload params", "log_probs"]
    updates = ["reload grads", "reload optimizer", "update", "update"]
    to_engines = ["offload grads", "offload optimizer", "wake_weights", "sync", "offload params", "wake_kv_cache"]
    assert phases == to_actors + updates + to_engines + ["export"]


def test_updates_hold_the_batch_in_stream_order_with_whole_denominators(tmp_path: Path) -> None:
    _, training, _ = run(small_config(), tmp_path)
    assert len(training.updates) == 3 * 2
    for samples in training.updates:
        assert len(samples) == 8
        trained = sum(s.response_tokens for s in samples)
        assert sum(s.loss_weight * s.response_tokens for s in samples) == pytest.approx(1.0)
        assert all(s.loss_weight == pytest.approx(1 / trained) for s in samples)
        assert all(s.old_log_probs is not None and len(s.old_log_probs) == s.response_tokens for s in samples)


def test_plans_follow_the_layout_and_the_cap(tmp_path: Path) -> None:
    config = small_config()
    config.parallel.pipeline = config.parallel.virtual_pipeline = 2
    config.parallel.context = 2
    config.parallel.max_tokens_per_micro_batch = 24
    _, training, _ = run(config, tmp_path)
    for plan in training.plans:
        assert {len(share) % 2 for share in plan} == {0}
        for members in (members for share in plan for members in share):
            assert sum(-(-sample.total_tokens // 4) * 4 for sample in members) <= 24


def test_update_flops_are_those_of_the_model_and_mfu_needs_a_known_peak(tmp_path: Path) -> None:
    config = small_config()
    config.trainer.steps = 1
    directory, training, _ = run(config, tmp_path / "unknown")
    line = directory.read_metrics()[-1]
    flops = sum(training_flops(DIMENSIONS, [s.total_tokens for s in samples]) for samples in training.updates)
    assert line["throughput/update_flops_per_s"] * line["timing_s/update"] == pytest.approx(flops)
    assert "throughput/mfu" not in line
    config.trainer.peak_flops_per_device = 1e9
    config.parallel.data = 2
    line = run(config, tmp_path / "known")[0].read_metrics()[-1]
    assert line["throughput/mfu"] == pytest.approx(line["throughput/update_flops_per_s"] / 2e9)


def test_overlong_filtering_masks_truncated_samples(tmp_path: Path) -> None:
    config = small_config()
    config.algorithm.overlong.filter = True
    _, training, _ = run(config, tmp_path)
    samples = [s for update in training.updates for s in update]
    assert {s.trained for s in samples} == {True, False}
    assert all(s.trained == (s.response_tokens < 8) for s in samples)
    assert all((s.loss_weight > 0) == s.trained for s in samples)


def test_one_metrics_line_a_step_with_evaluations_in_it(tmp_path: Path) -> None:
    config = small_config()
    config.evaluation.every_steps = 2
    directory, _, _ = run(config, tmp_path)
    lines = directory.read_metrics()
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert ["val/held/mean@2" in line for line in lines] == [True, False, True, True]
    assert [line.get("update") for line in lines[1:]] == [2, 4, 6]
    line = lines[1]
    assert line["policy/entropy"] == pytest.approx(2.0) and line["policy/ratio"] == pytest.approx(1.0)
    assert line["mismatch/logprob_diff_max"] == 0.0
    assert line["reward/accuracy_trained"] != line["reward/accuracy"] or line["sampling/prompts"] == 4
    assert line["timing_s/step"] >= line["timing_s/generate"] > 0


def test_samples_and_checkpoint_are_left_behind(tmp_path: Path) -> None:
    directory, _, _ = run(small_config(), tmp_path)
    assert directory.sample_steps() == [1, 2, 3] and directory.sample_steps("held") == [0, 3]
    records = directory.read_samples("step_0000002")
    assert {record["policy_version"] for record in records} == {2}
    kept = [record for record in records if record["outcome"] == "accepted"]
    assert kept and all("advantage" in record and "reward" in record for record in kept)
    step, folder = directory.last_checkpoint()
    assert step == 3 and (folder / "hf" / "config.json").is_file()


def test_rollout_log_probs_as_old_skip_the_actor(tmp_path: Path) -> None:
    config = small_config()
    config.algorithm.old_log_probs = OldLogProbs.rollout
    _, training, calls = run(config, tmp_path)
    assert "log_probs" not in calls
    sample = training.updates[0][0]
    assert sample.old_log_probs is not None
    assert sample.old_log_probs.tolist() == sample.rollout_log_probs.tolist()


class ForeignEngine(FakeEngine):
    """Samples from another policy."""

    def _sample(self, index: int, seed: int) -> Sample:
        sample = super()._sample(index, seed)
        return replace(sample, log_probs=[value - 0.75 for value in sample.log_probs])


def test_engines_that_sample_from_another_policy_stop_the_run_before_its_updates(tmp_path: Path) -> None:
    config = small_config()
    with pytest.raises(PolicyMismatch, match="step 1: .* differ by 0.75 on average.*weights.verify=checksums"):
        run(config, tmp_path / "bounded", engine=ForeignEngine)
    config.weights.max_log_prob_difference = 0.8
    _, training, _ = run(config, tmp_path / "wide", engine=ForeignEngine)
    config.weights.max_log_prob_difference = None
    run(config, tmp_path / "unbounded", engine=ForeignEngine)
    assert training.updates


def test_kl_term_asks_for_reference_log_probs(tmp_path: Path) -> None:
    config = small_config()
    config.algorithm.kl.coefficient = 0.1
    _, training, calls = run(config, tmp_path)
    assert calls.count("reference_log_probs") == 3
    assert all(s.reference_log_probs is not None for update in training.updates for s in update)


def test_no_answer_anywhere_is_a_warning_not_a_silent_zero(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run(small_config(), tmp_path, SilentScorer())
    assert "has an answer that the scorer can find" in caplog.text


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one() -> None:
    from itertools import combinations

    for n, right, k in [(4, 0, 2), (4, 1, 2), (5, 2, 3), (4, 4, 4), (6, 1, 1)]:
        subsets = list(combinations([True] * right + [False] * (n - right), k))
        assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
