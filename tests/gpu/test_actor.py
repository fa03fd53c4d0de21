"""The actor on a GPU: against float32 on the CPU, its phases, and how fast it is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dapo_megatron.models.flops import training_flops
from tests.gpu.random_policy import RandomPolicy, configuration, samples

ROOT = Path(__file__).parents[2]
POLICY = {"layers": 4, "hidden_size": 512, "heads": 8, "kv_heads": 4, "vocab_size": 8192}
H100_BF16_FLOPS_PER_S = 989e12


def observe(actor: object, count: int = 12) -> dict[str, np.ndarray]:
    """Log-probs, and the gradient norm and gradients of an update on them."""
    from dapo_megatron.weights.load import named_local_parameters

    batch = samples(count, 96, POLICY["vocab_size"])
    log_probs = actor.log_probs([batch])[0]  # type: ignore[attr-defined]
    for sample, values in zip(batch, log_probs, strict=True):
        sample.old_log_probs = np.array(values)
    norm = actor.update([batch[: count // 2], batch[count // 2 :]], step=1)["grad_norm"]  # type: ignore[attr-defined]
    found = {"log_probs": np.concatenate(log_probs), "grad_norm": np.float64(norm)}
    for name, parameter in named_local_parameters(actor.chunks):  # type: ignore[attr-defined]
        found[name] = parameter.main_grad.float().cpu().numpy().copy()
    return found


def on_the_cpu(path: str) -> None:
    """float32, in a process that sees no GPU."""
    from dapo_megatron.megatron.actor import MegatronActor

    config = configuration("float32")
    config.optimizer.distributed = False
    place = {"rank": 0, "world_size": 1, "master_address": "127.0.0.1", "master_port": 29518}
    np.savez(path, **observe(MegatronActor(config, RandomPolicy(**POLICY), **place)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    path = tmp_path_factory.mktemp("cpu") / "cpu.npz"
    code = f"from tests.gpu.test_actor import on_the_cpu; on_the_cpu({str(path)!r})"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=environment, cwd=ROOT)
    return dict(np.load(path))


@pytest.mark.parametrize(
    ("dtype", "mean_difference", "norm_difference", "least_cosine"),
    [("float32", 1e-4, 1e-3, 0.9999), ("bfloat16", 0.03, 0.03, 0.98)],
)
def test_equals_float32_on_the_cpu(
    dtype: str,
    mean_difference: float,
    norm_difference: float,
    least_cosine: float,
    cpu: dict[str, np.ndarray],
    make_actor: Callable,
) -> None:
    config = configuration(dtype)
    config.optimizer.distributed = False
    gpu = observe(make_actor(config, RandomPolicy(**POLICY)))
    difference = np.abs(gpu["log_probs"] - cpu["log_probs"])
    print(f"\n{dtype}: log-probs differ by {difference.mean():.2e} on average, {difference.max():.2e} at most")
    assert difference.mean() < mean_difference
    assert gpu["grad_norm"] == pytest.approx(cpu["grad_norm"], rel=norm_difference)
    for name in cpu.keys() - {"log_probs", "grad_norm"}:
        a, b = gpu[name].ravel(), cpu[name].ravel()
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > least_cosine, name


def test_phases_leave_the_device_and_come_back(make_actor: Callable) -> None:
    phases = ["params", "grads", "optimizer"]
    results = []
    for offloaded in (False, True):
        actor = make_actor(configuration("bfloat16"), RandomPolicy(**POLICY))
        batch = samples(6, 64, POLICY["vocab_size"])
        updates = []
        for step in (1, 2, 3):
            updates.append(actor.update([batch], step=step)["grad_norm"])
            if not offloaded:
                continue
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            freed = actor.offload(phases)
            print(f"\nfreed {freed}, allocated {before} -> {torch.cuda.memory_allocated()}")
            assert min(freed.values()) > 0
            # The allocator rounds every block up to 512 bytes.
            assert torch.cuda.memory_allocated() <= before - sum(freed.values())
            with pytest.raises(RuntimeError, match="offloaded are"):
                actor.update([batch], step=step)
            assert actor.reload(phases) == freed
        results.append(updates)
    assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_update_speed(make_actor: Callable) -> None:
    """Prints the model FLOP/s of an update of about 1B parameters; nothing is asserted of them."""
    policy = RandomPolicy(layers=16, hidden_size=2048, heads=16, kv_heads=8, vocab_size=32768)
    config = configuration("bfloat16")
    actor = make_actor(config, policy)
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
    share = f", MFU {flops_per_s / H100_BF16_FLOPS_PER_S:.1%}" if "H100" in device or "H200" in device else ""
    print(f"\n{device}: {sum(lengths)} tokens in {min(times_s):.3f} s, {flops_per_s / 1e12:.0f} TFLOP/s{share}")
    print(f"kernels: {actor.kernels}")
