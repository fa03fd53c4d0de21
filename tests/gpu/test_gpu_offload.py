"""Phases of the actor's state leave the GPU and come back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu.random_policy import TENTH_OF_A_BILLION, RandomPolicy, actor_alone, configuration, samples

PHASES = ("params", "grads", "optimizer", "reference")


def requested_bytes() -> int:
    """What is allocated, before the allocator rounds it up."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def train(distributed: bool, offloaded: bool) -> list[Tensor]:
    """The weights after three updates, between which all phases leave the GPU or stay."""
    from dapo_megatron.weights.load import named_local_parameters

    config = configuration("bfloat16")
    config.algorithm.kl.coefficient = 0.05
    config.optimizer.distributed = distributed
    actor = actor_alone(config, RandomPolicy(**TENTH_OF_A_BILLION))
    batch = samples(6, 64, TENTH_OF_A_BILLION["vocab_size"])
    for step in (1, 2, 3):
        for sample, log_probs in zip(batch, actor.log_probs([batch], reference=True)[0], strict=True):
            sample.reference_log_probs = log_probs
        assert actor.update([batch[:3], batch[3:]], step=step)["skipped"] == 0
        if offloaded:
            assert actor.reload(PHASES) == dict.fromkeys(PHASES, 0)
            freed = actor.offload(PHASES)
            assert all(freed.values())
            assert actor.reload(PHASES) == freed
    return [parameter.detach().cpu() for _, parameter in named_local_parameters(actor.chunks)]


def distance(ones: list[Tensor], others: list[Tensor]) -> float:
    return float(torch.stack([(a.float() - b.float()).norm() for a, b in zip(ones, others, strict=True)]).norm())


@pytest.mark.parametrize("distributed", [False, True])
def test_memory_falls_by_what_is_reported_and_comes_back(distributed: bool) -> None:
    config = configuration("bfloat16")
    config.algorithm.kl.coefficient = 0.05
    config.optimizer.distributed = distributed
    actor = actor_alone(config, RandomPolicy(**TENTH_OF_A_BILLION))
    batch = samples(6, 64, TENTH_OF_A_BILLION["vocab_size"])
    for sample, log_probs in zip(batch, actor.log_probs([batch], reference=True)[0], strict=True):
        sample.reference_log_probs = log_probs
    actor.update([batch], step=1)
    torch.cuda.synchronize()
    start = requested_bytes()
    for phase in PHASES:
        before, allocated_before = requested_bytes(), torch.cuda.memory_allocated()
        freed = actor.offload([phase])[phase]
        assert freed > 0
        assert before - requested_bytes() == pytest.approx(freed, rel=1e-3), phase
        assert allocated_before - torch.cuda.memory_allocated() >= 0.999 * freed, phase
        print(f"\n{phase}: {freed / 1e6:.1f} MB off the device, {torch.cuda.memory_allocated() / 1e6:.1f} MB left")
    with pytest.raises(RuntimeError, match="offloaded are: params, grads, optimizer"):
        actor.update([batch], step=2)
    for phase in PHASES:
        before = requested_bytes()
        taken = actor.reload([phase])[phase]
        assert requested_bytes() - before == pytest.approx(taken, rel=1e-3), phase
    assert requested_bytes() == pytest.approx(start, rel=1e-3)


@pytest.mark.parametrize("distributed", [False, True])
def test_training_goes_on_as_if_nothing_had_left(distributed: bool) -> None:
    """Bit for bit where two runs without offloading are; else no further off than these are from each other."""
    plain, again, offloaded = (train(distributed, offloaded) for offloaded in (False, False, True))
    noise, found = distance(plain, again), distance(plain, offloaded)
    print(f"\nweights differ by {found:.3e} with and without offloading, by {noise:.3e} between two runs without")
    assert found <= 3 * noise
