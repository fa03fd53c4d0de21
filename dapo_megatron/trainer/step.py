"""One step, phase by phase: generate (with scoring) -> old log-probs -> updates -> weight sync -> metrics."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from dapo_megatron.algorithm.correction import mismatch_metrics
from dapo_megatron.algorithm.loss import loss_metrics
from dapo_megatron.config.schema import Config, OldLogProbs
from dapo_megatron.data.batch import (
    ScoredGroup,
    build_updates,
    score_groups,
    set_old_log_probs,
)
from dapo_megatron.data.packing import alignment_of, plan_micro_batches
from dapo_megatron.data.types import TrainingSample
from dapo_megatron.models.family import Dimensions
from dapo_megatron.models.flops import sequence_cost, training_flops
from dapo_megatron.sampling.group_sampler import GroupSampler, SampledStep
from dapo_megatron.trainer.hybrid_engine import HybridEngine
from dapo_megatron.trainer.records import sample_record
from dapo_megatron.trainer.roles import RolloutEngine, TrainingGroup

logger = logging.getLogger(__name__)


class PolicyMismatch(RuntimeError):
    """The engines do not sample from the policy that is trained."""


@dataclass(frozen=True)
class StepResult:
    """What a finished step leaves behind: its metrics line and its rollouts (judged groups, kept or not)."""

    metrics: dict[str, float]
    records: list[dict[str, Any]]


class PhaseClock:
    """Wall time of each phase of a step, announced as it begins."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._began = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; a repeated name adds up."""
        self._announce(name)
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """`timing_s/...`, the whole step included."""
        total = time.perf_counter() - self._began
        return {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()} | {"timing_s/step": total}


class StepRunner:
    """Runs steps; holds the policy version (the number of updates so far)."""

    def __init__(
        self,
        config: Config,
        dimensions: Dimensions,
        sampler: GroupSampler,
        training: TrainingGroup,
        engines: Sequence[RolloutEngine],
        announce: Callable[[str], None],
    ) -> None:
        self.policy_version = 0
        self._config = config
        self._dimensions = dimensions
        self._sampler = sampler
        self._data_parallel_size = training.data_parallel_size
        self._hybrid = HybridEngine(config, training, engines)
        self._announce = announce

    async def run(self, step: int) -> StepResult:
        """Run step `step` (1-based)."""
        clock = PhaseClock(self._announce)
        with clock.phase("generate"):
            sampled = await self._sampler.next_step()
        _warn_without_answer(sampled)
        scored = score_groups(sampled.batch, self._config)
        updates = build_updates(scored, self._config)
        with clock.phase("release"):
            await self._hybrid.release()
        samples = [sample for update in updates for sample in update]
        with clock.phase("old_log_probs"):
            await self._set_old_log_probs(samples)
        mismatch = self._mismatch_metrics(samples)
        self._check_mismatch(mismatch, step)
        with clock.phase("update"):
            update_results = await self._update(updates, step)
        with clock.phase("sync"):
            await self._hybrid.wake_weights()
            await self._hybrid.sync(self.policy_version)
            await self._hybrid.wake_kv_cache()

        metrics: dict[str, float] = {"step": step, "update": self.policy_version}
        metrics |= _reward_metrics(sampled, scored) | _length_metrics(sampled)
        metrics |= _policy_metrics(update_results)
        metrics |= mismatch
        metrics |= sampled.metrics()
        metrics |= clock.metrics()
        metrics |= self._hybrid.metrics()
        metrics |= _throughput_metrics(samples, metrics)
        metrics |= self._update_flops_metrics(updates, clock)
        return StepResult(metrics, _records(step, sampled, scored))

    async def _set_old_log_probs(self, samples: list[TrainingSample]) -> None:
        if self._config.algorithm.old_log_probs is OldLogProbs.rollout:
            set_old_log_probs(samples, [sample.rollout_log_probs for sample in samples], self._config)
        else:
            set_old_log_probs(samples, await self._log_probs(samples, reference=False), self._config)
        if self._config.algorithm.kl.coefficient > 0:
            for sample, log_probs in zip(samples, await self._log_probs(samples, reference=True), strict=True):
                sample.reference_log_probs = log_probs

    async def _log_probs(self, samples: list[TrainingSample], *, reference: bool) -> list[np.ndarray]:
        """Log-probs in the order of `samples`, computed in the actors' packing."""
        plan = self._plan(samples)
        shares = [[[samples[i] for i in members] for members in rank] for rank in plan]
        found = await self._hybrid.log_probs(shares, reference=reference)
        result: dict[int, np.ndarray] = {}
        for rank, rank_found in zip(plan, found, strict=True):
            for members, values in zip(rank, rank_found, strict=True):
                result.update(zip(members, values, strict=True))
        return [result[i] for i in range(len(samples))]

    async def _update(self, updates: list[list[TrainingSample]], step: int) -> list[dict[str, float]]:
        results = []
        for _ in range(self._config.trainer.epochs):
            for samples in updates:
                if not _has_trained_token(samples):
                    logger.warning("step %d: an update without a trained token is skipped", step)
                    results.append({"skipped": 1.0})
                    continue
                shares = [[[samples[i] for i in members] for members in rank] for rank in self._plan(samples)]
                results.append(await self._hybrid.update(shares, step=step))
                self.policy_version += 1
        return results

    def _plan(self, samples: list[TrainingSample]) -> list[list[list[int]]]:
        parallel = self._config.parallel
        return plan_micro_batches(
            [sample.total_tokens for sample in samples],
            self._data_parallel_size,
            parallel.max_tokens_per_micro_batch,
            alignment=alignment_of(self._config),
            cost=sequence_cost(self._dimensions),
            count_multiple=parallel.pipeline if parallel.virtual_pipeline else 1,
            packing=parallel.packing,
        )

    def _update_flops_metrics(self, updates: list[list[TrainingSample]], clock: PhaseClock) -> dict[str, float]:
        """What the model's own arithmetic made of the update phase: all devices together, and of their peak."""
        lengths = [sample.total_tokens for update in updates if _has_trained_token(update) for sample in update]
        flops = self._config.trainer.epochs * training_flops(self._dimensions, lengths)
        metrics = {"throughput/update_flops_per_s": flops / clock.seconds["update"]}
        peak = self._config.trainer.peak_flops_per_device
        if peak is not None:
            parallel = self._config.parallel
            devices = parallel.data * parallel.tensor * parallel.pipeline * parallel.context
            metrics["throughput/mfu"] = metrics["throughput/update_flops_per_s"] / (devices * peak)
        return metrics

    def _mismatch_metrics(self, samples: list[TrainingSample]) -> dict[str, float]:
        if self._config.algorithm.old_log_probs is OldLogProbs.rollout:
            return {}
        trained = [sample for sample in samples if sample.trained]
        old = [sample.old_log_probs for sample in trained if sample.old_log_probs is not None]
        return mismatch_metrics(
            old,
            [sample.rollout_log_probs for sample in trained],
            self._config.algorithm.correction,
        )

    def _check_mismatch(self, mismatch: dict[str, float], step: int) -> None:
        """Before the step's updates, so that samples of another policy train nothing."""
        bound = self._config.weights.max_log_prob_difference
        found = mismatch.get("mismatch/logprob_diff_mean", 0.0)
        if bound is not None and not found <= bound:
            raise PolicyMismatch(
                f"step {step}: the log-probs of engines and training ranks differ by {found:.3g} on average, more than "
                f"weights.max_log_prob_difference={bound:g}: the engines sample from another policy. Look at "
                "mismatch/* in metrics.jsonl (since which step?); weights.verify=checksums (a sync that loses or "
                "changes a tensor); precision.rollout_dtype and rollout.quantization against precision.params_dtype; "
                "and `dapo-megatron convert verify` of the last checkpoint against model.path"
            )


def _has_trained_token(samples: list[TrainingSample]) -> bool:
    return any(sample.loss_weight for sample in samples)


def _reward_metrics(sampled: SampledStep, scored: list[ScoredGroup]) -> dict[str, float]:
    before = [accuracy for group, _ in sampled.judged for accuracy in group.accuracies]
    trained = [accuracy for item in scored for accuracy in item.group.accuracies]
    rewards = [reward for item in scored for reward in item.rewards]
    return {
        "reward/mean": float(np.mean(rewards)),
        "reward/accuracy": float(np.mean(before)),
        "reward/accuracy_trained": float(np.mean(trained)),
    }


def _length_metrics(sampled: SampledStep) -> dict[str, float]:
    samples = [sample for group, _ in sampled.judged for sample in group.samples]
    lengths = [len(sample.token_ids) for sample in samples]
    return {
        "response_length/mean": float(np.mean(lengths)),
        "response_length/max": float(max(lengths)),
        "response_length/clipped_fraction": float(np.mean([s.finish_reason == "length" for s in samples])),
    }


def _policy_metrics(results: list[dict[str, float]]) -> dict[str, float]:
    """Token-weighted over all updates of the step; the loss and the gradient norm are means over updates."""
    done = [result for result in results if "grad_norm" in result]
    metrics = {"policy/skipped_updates": sum(result["skipped"] for result in results)}
    if not done:
        return metrics
    sums: Counter[str] = Counter()
    for result in done:
        sums.update({key: value for key, value in result.items() if key not in ("grad_norm", "lr", "skipped")})
    metrics |= loss_metrics(sums)
    metrics["policy/loss"] = sums["loss"] / len(done)
    metrics["policy/grad_norm"] = float(np.mean([result["grad_norm"] for result in done]))
    metrics["policy/lr"] = done[-1]["lr"]
    return metrics


def _throughput_metrics(samples: list[TrainingSample], metrics: dict[str, float]) -> dict[str, float]:
    trained = sum(sample.response_tokens for sample in samples if sample.trained)
    return {
        "throughput/tokens_per_s": metrics["sampling/generated_tokens"] / metrics["timing_s/step"],
        "throughput/trained_tokens_per_s": trained / metrics["timing_s/step"],
    }


def _records(step: int, sampled: SampledStep, scored: list[ScoredGroup]) -> list[dict[str, Any]]:
    shaped = {item.group.position: item for item in scored}
    records = []
    for group, outcome in sampled.judged:
        item = shaped.get(group.position)
        for i, sample in enumerate(group.samples):
            record = sample_record(step, group, sample) | {"outcome": outcome.value}
            if item is not None:
                record |= {"reward": item.rewards[i], "advantage": item.advantages[i]}
            records.append(record)
    return records


def _warn_without_answer(sampled: SampledStep) -> None:
    verdicts = [sample.verdict for group, _ in sampled.judged for sample in group.samples if sample.verdict]
    if verdicts and all(verdict.kind == "no answer" for verdict in verdicts):
        logger.warning(
            "none of the %d samples of this step has an answer that the scorer can find (DAPO's rule wants a last line "
            "`Answer: ...`): check the prompt template, the base policy and rollout.max_response_tokens",
            len(verdicts),
        )
