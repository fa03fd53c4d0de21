"""The packing plan on a long-tailed batch; prints JSON.

8,192 samples in stream order, lengths lognormal (median 3,000, sigma 0.9, at most 20,480), in updates of 512 over 32
data-parallel ranks with at most 24,576 tokens a micro-batch; work is that of Qwen2.5-32B. Of every update:

  padding_fraction        padding of sequences and micro-batches (alignment) / tokens computed
  unfilled_fraction       room left under the cap, padding included / micro-batches x cap
  least_unfilled_fraction the same for `lower_bound`: what no plan with equal counts on all ranks can avoid
  heaviest_over_mean      work of the heaviest rank / mean over ranks, attention included
  micro_batches           of a rank
  lower_bound             ceil(tokens / (ranks x cap))
  planning_ms             wall time of `plan_micro_batches`

    python benchmarks/packing.py [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from dapo_megatron.config.schema import Packing
from dapo_megatron.data.packing import Alignment, plan_micro_batches
from dapo_megatron.models.flops import sequence_cost
from dapo_megatron.models.registry import family_of

SAMPLES, UPDATE_SAMPLES, RANKS, MAX_TOKENS = 8192, 512, 32, 24576
MEDIAN_TOKENS, SIGMA, LONGEST_TOKENS = 3000, 0.9, 20480
QWEN2_5_32B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
}
COST = sequence_cost(family_of(QWEN2_5_32B).dimensions(QWEN2_5_32B))
TARGETS = {"padding_fraction": 0.01, "heaviest_over_mean": 1.02, "micro_batches_over_lower_bound": 1, "planning_ms": 50}
PLANS: dict[str, tuple[Packing, Alignment]] = {
    "balanced": (Packing.balanced, Alignment()),
    "balanced, TP8 + SP": (Packing.balanced, Alignment(1, 8)),
    "balanced, TP8 + SP + CP2": (Packing.balanced, Alignment(4, 16)),
    "balanced, TP8 + SP + CP2, fp8 delayed or tensorwise": (Packing.balanced, Alignment(4, 32)),
    "balanced, TP8 + SP + CP2, fp8 mxfp8": (Packing.balanced, Alignment(4, 64)),
    "balanced, TP8 + SP + CP2, fp8 blockwise": (Packing.balanced, Alignment(4, 256)),
    "first_fit_decreasing": (Packing.first_fit_decreasing, Alignment()),
}


def measure(lengths: list[int], packing: Packing, alignment: Alignment) -> dict[str, float]:
    """Plan one update and measure the plan."""
    began = time.perf_counter()
    plan = plan_micro_batches(lengths, RANKS, MAX_TOKENS, alignment=alignment, cost=COST, packing=packing)
    planning_ms = 1000 * (time.perf_counter() - began)

    def padded(members: list[int]) -> int:
        tokens = sum(_round_up(lengths[i], alignment.sequence) for i in members)
        return _round_up(tokens, alignment.micro_batch)

    work = [sum(COST(lengths[i]) for members in share for i in members) for share in plan]
    real = sum(lengths)
    computed = sum(padded(members) for share in plan for members in share)
    count = len(plan[0])
    lower_bound = -(-real // (RANKS * MAX_TOKENS))
    return {
        "padding_fraction": 1 - real / computed,
        "unfilled_fraction": 1 - real / (RANKS * count * MAX_TOKENS),
        "least_unfilled_fraction": 1 - real / (RANKS * lower_bound * MAX_TOKENS),
        "heaviest_over_mean": max(work) * RANKS / sum(work),
        "micro_batches": count,
        "lower_bound": lower_bound,
        "micro_batches_over_lower_bound": count - lower_bound,
        "planning_ms": planning_ms,
    }


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 5) for key, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN_TOKENS), SIGMA, SAMPLES)
    lengths = np.clip(drawn.round(), 1, LONGEST_TOKENS).astype(int).tolist()
    updates = [lengths[first : first + UPDATE_SAMPLES] for first in range(0, SAMPLES, UPDATE_SAMPLES)]

    plans: dict[str, Any] = {}
    for name, options in PLANS.items():
        measured = [measure(update, *options) for update in updates]
        worst = {key: max(row[key] for row in measured) for key in measured[0]}
        plans[name] = {
            "reached": all(worst[key] <= target for key, target in TARGETS.items()),
            "worst": _rounded(worst),
            "mean": _rounded({key: float(np.mean([row[key] for row in measured])) for key in worst}),
            "updates": [_rounded(row) for row in measured],
        }
    print(json.dumps({"seed": seed, "targets": TARGETS, "plans": plans}, indent=1))


if __name__ == "__main__":
    main()
