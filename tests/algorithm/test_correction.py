"""Rollout correction against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.algorithm.correction import correction_weights, mismatch_metrics
from dapo_megatron.config.schema import CorrectionConfig, CorrectionKind, CorrectionLevel

log_probs = st.floats(-15, 0)
sample_strategy = st.lists(st.tuples(log_probs, log_probs), max_size=6)
settings_strategy = st.builds(
    CorrectionConfig,
    kind=st.sampled_from(CorrectionKind),
    level=st.sampled_from(CorrectionLevel),
    cap=st.floats(0.5, 4),
    low=st.floats(0.1, 0.9),
    high=st.floats(1.1, 5),
)
Pairs = list[tuple[float, float]]


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def plain_rho(sample: Pairs, level: str) -> list[float]:
    """One rho a token, or one for the whole sample."""
    differences = [old - rollout for old, rollout in sample]
    if level == "sequence":
        differences = [sum(differences)]
    if level == "sequence_geometric":
        differences = [sum(differences) / len(differences)]
    return [math.exp(min(max(difference, -20), 20)) for difference in differences]


@given(sample_strategy, settings_strategy)
def test_weights(sample: Pairs, settings: CorrectionConfig) -> None:
    weights = correction_weights(tensor([old for old, _ in sample]), tensor([roll for _, roll in sample]), settings)
    if settings.kind == "none":
        assert weights is None
        return
    expected = []
    for rho in plain_rho(sample, settings.level) if sample else []:
        if settings.kind == "tis":
            expected.append(min(rho, settings.cap))
        else:
            expected.append(rho if settings.low <= rho <= settings.high else 0.0)
    if settings.level != "token":
        expected = expected * len(sample)
    assert weights is not None and not weights.requires_grad
    assert weights.tolist() == pytest.approx(expected, rel=1e-9)


@given(st.lists(sample_strategy, max_size=5), settings_strategy)
def test_metrics(samples: list[Pairs], settings: CorrectionConfig) -> None:
    metrics = mismatch_metrics(
        [np.array([old for old, _ in sample]) for sample in samples],
        [np.array([roll for _, roll in sample]) for sample in samples],
        settings,
    )
    pairs = [pair for sample in samples for pair in sample]
    if not pairs:
        assert metrics == {}
        return
    rhos = [rho for sample in samples if sample for rho in plain_rho(sample, settings.level)]
    if settings.kind == "tis":
        outside = [rho > settings.cap for rho in rhos]
    else:
        outside = [not settings.low <= rho <= settings.high for rho in rhos]
    x = [old - roll for old, roll in pairs]
    assert metrics == pytest.approx(
        {
            "mismatch/logprob_diff_mean": sum(abs(value) for value in x) / len(x),
            "mismatch/logprob_diff_max": max(abs(value) for value in x),
            "mismatch/k1": -sum(x) / len(x),
            "mismatch/k3": sum(min(math.exp(value) - value - 1, 10) for value in x) / len(x),
            "mismatch/ess": sum(rhos) ** 2 / (len(rhos) * sum(rho**2 for rho in rhos)),
            "mismatch/outside_fraction": sum(outside) / len(outside),
        },
        rel=1e-9,
        abs=1e-12,
    )


def test_agreeing_engines_have_no_mismatch() -> None:
    values = [np.array([-0.5, -2.0], np.float32), np.array([-1.0], np.float32)]
    assert mismatch_metrics(values, values, CorrectionConfig()) == {
        "mismatch/logprob_diff_mean": 0.0,
        "mismatch/logprob_diff_max": 0.0,
        "mismatch/k1": 0.0,
        "mismatch/k3": 0.0,
        "mismatch/ess": 1.0,
        "mismatch/outside_fraction": 0.0,
    }
