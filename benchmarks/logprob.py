"""Log-probs, entropy and gradients of the output layer: memory and time against materialised logits and against verl.

    python benchmarks/logprob.py                                       # half an hour on two cores, 15 GB
    python benchmarks/logprob.py --tokens 512 --vocab 32000            # seconds
    pip install --target VERL --no-deps verl==0.9.1
    python benchmarks/logprob.py --verl VERL

Forward and backward of the policy loss through the output layer, without and with a gradient through the entropy:

- materialised: F.linear, log_softmax, gather, entropy, autograd. In bfloat16 its logits are rounded to bfloat16.
- fused: `response_loss`; recompute: `response_log_probs` and the same loss behind it.
- verl: its FusedLinearForPPO, with its own defaults. In bfloat16 its logits are rounded to bfloat16, too.

Peak memory is measured in a process for each, beyond what its inputs take. Times are medians over rounds in which
every method runs once; a ratio is the median of the ratios within a round, so that a busy machine weighs on both sides.
Prints JSON.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dapo_megatron.algorithm.loss import policy_loss
from dapo_megatron.config.schema import AlgorithmConfig
from dapo_megatron.megatron.logprob import response_log_probs, response_loss

LogProbs = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Problem:
    """One output layer with a batch, all of whose tokens are trained."""

    def __init__(self, options: argparse.Namespace, dtype: str, entropy_coefficient: float) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.hidden = normal(options.tokens, options.hidden).to(device, getattr(torch, dtype)).requires_grad_()
        weight = normal(options.vocab, options.hidden).mul_(2 / options.hidden**0.5)
        self.weight = weight.to(device, getattr(torch, dtype)).requires_grad_()
        self.targets = torch.randint(0, options.vocab, (options.tokens,), generator=generator).to(device)
        self.positions = torch.arange(options.tokens, device=device)
        self.advantages = normal(options.tokens).to(device)
        self.old_log_probs = torch.full_like(self.advantages, -10.0)
        self.settings = AlgorithmConfig(entropy_coefficient=entropy_coefficient)

    def loss(self, log_probs: Tensor, entropy: Tensor, rows: slice = slice(None)) -> Tensor:
        advantages = self.advantages[rows]
        return policy_loss(
            log_probs,
            self.old_log_probs[rows],
            advantages,
            torch.ones_like(advantages, dtype=torch.bool),
            torch.full_like(advantages, 1 / len(self.advantages)),
            self.settings,
            entropy=entropy,
        ).loss

    def materialised(self) -> tuple[Tensor, Tensor]:
        log_p = torch.nn.functional.linear(self.hidden, self.weight).float().log_softmax(-1)
        log_probs = log_p.gather(1, self.targets[:, None])[:, 0]
        with torch.set_grad_enabled(self.settings.entropy_coefficient != 0):
            entropy = -(log_p.exp() * log_p).sum(-1)
        return self.loss(log_probs, entropy), log_probs

    def fused(self) -> tuple[Tensor, Tensor]:
        loss, log_probs, _ = response_loss(
            self.hidden, self.positions, self.weight, self.targets, 1.0, len(self.weight), self.loss
        )
        return loss, log_probs

    def recompute(self) -> tuple[Tensor, Tensor]:
        log_probs, entropy = response_log_probs(
            self.hidden, self.positions, self.weight, self.targets, 1.0, len(self.weight)
        )
        return self.loss(log_probs, entropy), log_probs

    def verl(self, function: LogProbs) -> tuple[Tensor, Tensor]:
        log_probs, entropy = function(self.hidden, self.weight, self.targets)
        return self.loss(log_probs, entropy), log_probs

    def run(self, method: Callable) -> Tensor:
        """Forward and backward; the log-probs."""
        self.hidden.grad = self.weight.grad = None
        loss, log_probs = method()
        loss.backward()
        return log_probs.detach()

    def log_prob_error(self, log_probs: Tensor) -> float:
        """Largest difference to float64."""
        logits = self.hidden.detach().double() @ self.weight.detach().double().T
        exact = logits.log_softmax(-1).gather(1, self.targets[:, None])[:, 0]
        return (log_probs - exact).abs().max().item()


def methods_of(problem: Problem, verl: LogProbs | None) -> dict[str, Callable]:
    methods = {"materialised": problem.materialised, "fused": problem.fused, "recompute": problem.recompute}
    return methods if verl is None else methods | {"verl": functools.partial(problem.verl, verl)}


def load_verl(folder: Path) -> LogProbs:
    """FusedLinearForPPO from its file, which needs torch alone; the package needs much more to import.

    Raises:
        OSError, ImportError, AttributeError: it is not there or has changed.
    """
    path = folder / "verl/utils/experimental/torch_functional.py"
    spec = importlib.util.spec_from_file_location("verl_torch_functional", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FusedLinearForPPO()


def peak_bytes(problem: Problem, method: Callable) -> int:
    """Most memory at any moment of a run beyond what was taken before it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        problem.run(method)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _process_bytes("VmRSS")
    problem.run(method)
    return _process_bytes("VmHWM") - before


def _process_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def peak_bytes_of(name: str, options: argparse.Namespace, dtype: str, coefficient: float) -> int:
    """peak_bytes in a process of its own."""
    call = [sys.executable, __file__, *sys.argv[1:], "--dtypes", dtype, "--entropy-coefficients", str(coefficient)]
    return int(subprocess.run([*call, "--peak-of", name], check=True, capture_output=True, text=True).stdout)


def times_s(problem: Problem, methods: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, method in methods.items():
            gc.collect()
            start = time.perf_counter()
            problem.run(method)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return times


def compare(options: argparse.Namespace, dtype: str, coefficient: float, verl: LogProbs | None) -> dict:
    few = argparse.Namespace(**vars(options) | {"tokens": 32})
    problem = Problem(few, dtype, coefficient)
    # This warms up, too.
    errors = {name: problem.log_prob_error(problem.run(method)) for name, method in methods_of(problem, verl).items()}
    problem = Problem(options, dtype, coefficient)
    times = times_s(problem, methods_of(problem, verl), options.rounds)
    del problem
    gc.collect()
    peaks = {name: peak_bytes_of(name, options, dtype, coefficient) for name in times}

    def against(name: str, other: str) -> dict[str, float]:
        ratios = [a / b for a, b in zip(times[name], times[other], strict=True)]
        return {"peak_memory": round(peaks[name] / peaks[other], 3), "time": round(statistics.median(ratios), 3)}

    return {
        "dtype": dtype,
        "entropy_coefficient": coefficient,
        "peak_extra_bytes": peaks,
        "time_s": {name: round(statistics.median(values), 3) for name, values in times.items()},
        "log_prob_error": {name: float(f"{error:.1e}") for name, error in errors.items()},
        "ratios_to_materialised": {name: against(name, "materialised") for name in times if name != "materialised"},
        **({} if verl is None else {"fused_to_verl": against("fused", "verl")}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=152_064)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--entropy-coefficients", nargs="+", type=float, default=[0.0, 0.001])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--verl", type=Path, help="folder into which verl is installed")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    verl, verl_status = None, "not given"
    if options.verl is not None:
        try:
            verl, verl_status = load_verl(options.verl), "FusedLinearForPPO"
        except (OSError, ImportError, AttributeError) as error:
            verl_status = f"not importable: {error}"

    if options.peak_of:
        problem = Problem(options, options.dtypes[0], options.entropy_coefficients[0])
        print(peak_bytes(problem, methods_of(problem, verl)[options.peak_of]))
        return
    result = {
        "tokens": options.tokens,
        "hidden": options.hidden,
        "vocab": options.vocab,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {options.threads} threads",
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
        "verl": verl_status,
        "target": {"peak_memory": 0.15, "time": 1.1},
        "runs": [compare(options, d, c, verl) for d in options.dtypes for c in options.entropy_coefficients],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
