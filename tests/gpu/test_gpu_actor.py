"""The actor on a GPU: against float32 on the CPU, and how fast it is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dapo_megatron.models.flops import training_flops
from tests.gpu.random_policy import TENTH_OF_A_BILLION, RandomPolicy, actor_alone, configuration, samples

PROJECT_ROOT = Path(__file__).parents[2]
HOPPER_BF16_FLOPS_PER_S = 989e12
"""Dense, of an H100 SXM or H200, from their data sheets."""

BOUNDS = {
    "float32": {"mean": 1e-5, "largest": 1e-4, "norm": 1e-4, "cosine": 0.9999},
    "bfloat16": {"mean": 0.02, "largest": 0.3, "norm": 0.02, "cosine": 0.99},
}
"""Log-probs: mean and largest difference; gradient norm: relative; gradients: least cosine of a tensor."""


def observe(dtype: str) -> dict[str, np.ndarray]:
    """Log-probs of a batch, and the gradient norm and every gradient of an update on it."""
    from dapo_megatron.weights.load import named_local_parameters

    config = configuration(dtype)
    config.optimizer.distributed = False
    config.cluster.cpu_threads_per_actor = os.cpu_count() or 1
    actor = actor_alone(config, RandomPolicy(**TENTH_OF_A_BILLION))
    batch = samples(12, 96, TENTH_OF_A_BILLION["vocab_size"])
    log_probs = actor.log_probs([batch])[0]
    for sample, values in zip(batch, log_probs, strict=True):
        sample.old_log_probs = np.array(values)
    found: dict[str, Any] = {"log_probs": np.concatenate(log_probs), "linear layers": actor.kernels.linear}
    found["grad_norm"] = actor.update([batch[:5], batch[5:]], step=1)["grad_norm"]
    gradients = {name: p.main_grad.float().cpu().numpy().copy() for name, p in named_local_parameters(actor.chunks)}
    return found | gradients


def save_observed(path: str) -> None:
    """float32, in a process that sees no GPU."""
    assert not torch.cuda.is_available()
    np.savez(path, **observe("float32"))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    path = tmp_path_factory.mktemp("cpu") / "observed.npz"
    code = f"from tests.gpu.test_gpu_actor import save_observed; save_observed({str(path)!r})"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(PROJECT_ROOT)}
    call = [sys.executable, "-W", "ignore", "-c", code]
    subprocess.run(call, check=True, env=environment, cwd=PROJECT_ROOT, timeout=200)
    return dict(np.load(path))


def compare(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], dtype: str) -> None:
    bounds = BOUNDS[dtype]
    difference = np.abs(found["log_probs"] - expected["log_probs"])
    norm = abs(found["grad_norm"] / expected["grad_norm"] - 1)
    cosines = {}
    for name in expected.keys() - {"log_probs", "grad_norm", "linear layers"}:
        one, other = found[name].ravel(), expected[name].ravel()
        cosines[name] = float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))
    worst = min(cosines, key=lambda name: cosines[name])
    print(
        f"\n{dtype}, linear layers of {found['linear layers']}, to float32 on the CPU: log-probs "
        f"{difference.mean():.2e} on average, {difference.max():.2e} at most; gradient norm {norm:.2e}; "
        f"cosine {cosines[worst]:.6f} ({worst})"
    )
    assert difference.mean() < bounds["mean"] and difference.max() < bounds["largest"]
    assert norm < bounds["norm"]
    assert cosines[worst] > bounds["cosine"], worst


def test_bfloat16_is_near_float32_on_the_cpu(layers: str, on_the_cpu: dict[str, np.ndarray]) -> None:
    found = observe("bfloat16")
    assert found["linear layers"] == layers
    compare(found, on_the_cpu, "bfloat16")


@pytest.mark.parametrize("layers", ["torch"], indirect=True)
def test_float32_equals_the_cpu(
    layers: str, on_the_cpu: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Transformer Engine multiplies float32 matrices in TF32 whatever torch is told.
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    compare(observe("float32"), on_the_cpu, "float32")


def test_update_speed(layers: str) -> None:
    """Prints the model FLOP/s of an update of 0.9 billion parameters, of which nothing more than a number is asked."""
    policy = RandomPolicy(layers=16, hidden_size=2048, heads=16, kv_heads=8, vocab_size=32768)
    actor = actor_alone(configuration("bfloat16"), policy)
    micro_batches = [samples(8, 2048, 32768, seed) for seed in range(4)]
    lengths = [sample.total_tokens for batch in micro_batches for sample in batch]
    times_s = []
    for step in (1, 2, 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = actor.update(micro_batches, step=step)
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - began)
        assert result["skipped"] == 0
    flops_per_s = training_flops(policy.dimensions, lengths) / min(times_s)
    device = torch.cuda.get_device_name()
    share = f", MFU {flops_per_s / HOPPER_BF16_FLOPS_PER_S:.1%}" if "H100" in device or "H200" in device else ""
    print(f"\n{device}: {sum(lengths)} tokens in {min(times_s):.3f} s, {flops_per_s / 1e12:.0f} TFLOP/s{share}")
    print(f"kernels: {actor.kernels}")
    assert flops_per_s > 0
