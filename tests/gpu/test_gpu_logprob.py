"""The log-prob function on a GPU: its values, and its memory and time against materialised logits."""

from __future__ import annotations

import argparse
import statistics

import pytest
import torch

from benchmarks.logprob import Problem, methods_of, peak_bytes, times_s

SIZES = argparse.Namespace(tokens=4096, hidden=1024, vocab=152_064)


@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.001])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_and_time_against_materialised_logits(dtype: str, entropy_coefficient: float) -> None:
    problem = Problem(SIZES, dtype, entropy_coefficient)
    methods = {name: methods_of(problem, None)[name] for name in ("materialised", "fused")}
    peaks, errors, gradients = {}, {}, {}
    for name, method in methods.items():
        errors[name] = problem.log_prob_error(problem.run(method))  # warms up, too
        gradients[name] = [x.grad.float().flatten() for x in (problem.hidden, problem.weight) if x.grad is not None]
        problem.hidden.grad = problem.weight.grad = None
        peaks[name] = peak_bytes(problem, method)
    times = {name: statistics.median(values) for name, values in times_s(problem, methods, rounds=5).items()}
    print(
        f"\n{dtype}, entropy coefficient {entropy_coefficient}: memory {peaks['fused'] / 1e9:.2f} GB, "
        f"{peaks['fused'] / peaks['materialised']:.1%} of materialised; time {1e3 * times['fused']:.1f} ms, "
        f"{times['fused'] / times['materialised']:.2f}x; log-prob errors {errors['fused']:.1e}, "
        f"materialised {errors['materialised']:.1e}"
    )
    assert errors["fused"] < 1e-4
    for one, other in zip(*gradients.values(), strict=True):
        assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.999
    assert peaks["fused"] <= 0.15 * peaks["materialised"]
