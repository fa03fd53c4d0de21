"""Two data-parallel ranks give what one rank gives: sums, gradient norm, gradients, weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo_megatron.config.schema import Config
from dapo_megatron.data.types import TrainingSample
from tests.distributed.ranks import run_ranks
from tests.tiny_models import one_rank_actor, random_samples, save, tiny_config, tiny_model

SAMPLES = 7
# One rank has an empty micro-batch, and sample 2 is not trained.
SHARES = [[[0, 3, 6], [1]], [[2, 4, 5], []]]


def make_config(ranks: int, distributed: bool, overlap: bool) -> Config:
    # With a large eps the update is nearly linear in the gradient, so that weights compare as gradients do.
    config = tiny_config(distributed=distributed, eps=1.0, clip_grad=0.02)
    config.parallel.data = ranks
    config.parallel.overlap_grad_reduce = overlap
    config.parallel.overlap_param_gather = overlap and distributed
    config.algorithm.kl.coefficient = 0.05
    return config


VARIANTS = {"plain": (False, False), "distributed": (True, False), "overlapped": (True, True)}


def train(actor: Any, micro_batches: list[list[TrainingSample]], poisoned: bool, export: str) -> dict:
    """Two updates on a rank's share, then one that is skipped; everything that ranks must agree on."""
    from dapo_megatron.weights.load import named_local_parameters

    for micro_batch, log_probs in zip(micro_batches, actor.log_probs(micro_batches), strict=True):
        for sample, values in zip(micro_batch, log_probs, strict=True):
            sample.reference_log_probs = values - np.float32(0.1)
    results = [actor.update(micro_batches, step=1)]
    gradients = {name: p.main_grad.clone().numpy() for name, p in named_local_parameters(actor.chunks)}
    results.append(actor.update(micro_batches, step=1))
    weights = {name: p.detach().clone().numpy() for name, p in named_local_parameters(actor.chunks)}
    reference = actor.log_probs(micro_batches, reference=True)
    actor.export_hf(Path(export))
    if poisoned:
        micro_batches = [[dataclasses.replace(s, advantage=float("nan")) for s in batch] for batch in micro_batches]
    return {
        "results": results,
        "gradients": gradients,
        "weights": weights,
        "reference": [values for micro_batch in reference for values in micro_batch],
        "skipped": actor.update(micro_batches, step=1)["skipped"],
    }


def train_variants(rank: int, world_size: int, port: int, folder: str, exports: str) -> dict[str, dict]:
    """What each rank of two runs: every variant, one after the other, rank 1 poisoned at the end."""
    from dapo_megatron.megatron.actor import MegatronActor

    results = {}
    for name, (distributed, overlap) in VARIANTS.items():
        config = make_config(world_size, distributed, overlap)
        place = {"rank": rank, "world_size": world_size, "master_address": "127.0.0.1", "master_port": port}
        samples = random_samples(SAMPLES)
        micro_batches = [[samples[i] for i in indices] for indices in SHARES[rank]]
        actor = MegatronActor(config, folder, **place)
        results[name] = train(actor, micro_batches, rank == 1, f"{exports}/{name}")
    return results


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, list[dict], Path]:
    path = tmp_path_factory.mktemp("data_parallel")
    folder = save(tiny_model("qwen2", tied=True), path / "hf")
    actor = one_rank_actor(make_config(1, distributed=False, overlap=False), folder)
    one = train(actor, [random_samples(SAMPLES)], False, str(path / "one"))
    return one, run_ranks(train_variants, 2, path, folder, str(path)), path


def relative_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert a.keys() == b.keys()
    return max(np.abs(a[name] - b[name]).max() / np.abs(b[name]).max() for name in a)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_equal_one(variant: str, outcome: tuple[dict, list[dict], Path]) -> None:
    one, both, path = outcome
    ranks = [results[variant] for results in both]
    assert ranks[0]["results"] == ranks[1]["results"]
    for got, want in zip(ranks[0]["results"], one["results"], strict=True):
        assert got == pytest.approx(want, rel=1e-5)
    for rank in ranks:
        if variant == "plain":  # with the distributed optimizer a rank holds the sum of its own shard only
            assert relative_difference(rank["gradients"], one["gradients"]) < 1e-5
        assert relative_difference(rank["weights"], one["weights"]) < 1e-6
        assert rank["skipped"] == 1
    assert all(np.array_equal(ranks[0]["weights"][name], ranks[1]["weights"][name]) for name in ranks[0]["weights"])
    assert (path / variant / "model.safetensors").is_file()
    order = [i for share in SHARES for micro_batch in share for i in micro_batch]
    for i, values in zip(order, ranks[0]["reference"] + ranks[1]["reference"], strict=True):
        np.testing.assert_allclose(values, one["reference"][i], atol=1e-5)
