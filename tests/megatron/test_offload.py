from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_megatron.config.schema import Config
from dapo_megatron.data.types import TrainingSample
from dapo_megatron.megatron.offload import PHASES, OffloadableState
from dapo_megatron.weights.load import named_local_parameters
from tests.distributed.ranks import run_ranks
from tests.tiny_models import random_samples, save, tiny_config, tiny_model

VARIANTS = {
    "plain": {"distributed": False},
    "distributed": {"distributed": True},
    "bfloat16": {"distributed": False, "params_dtype": "bfloat16"},
    "bfloat16 distributed": {"distributed": True, "params_dtype": "bfloat16"},
}


def make_config(*, distributed: bool, params_dtype: str = "float32", data: int = 1) -> Config:
    config = tiny_config(distributed=distributed)
    config.precision.params_dtype = params_dtype
    config.algorithm.kl.coefficient = 0.05
    config.parallel.data = data
    return config


def state_of(actor: Any, host_copies: bool | None = True) -> OffloadableState:
    return OffloadableState(actor.chunks, actor._optimizer, actor._reference, host_copies=host_copies)


def update(actor: Any, samples: list[TrainingSample], step: int) -> dict[str, float]:
    for sample, log_probs in zip(samples, actor.log_probs([samples], reference=True)[0], strict=True):
        sample.reference_log_probs = log_probs
    return actor.update([samples[:4], samples[4:]], step=step)


def train(actor: Any, offloaded: bool) -> list[Any]:
    """Three updates, everything off the device between them; what they reported, and the weights."""
    state = state_of(actor)
    samples = random_samples(6)
    results: list[Any] = []
    for step in range(1, 4):
        results.append(update(actor, samples, step))
        if offloaded:
            freed = state.offload(PHASES)
            assert all(freed.values()) and not any(state.bytes_on_device().values())
            assert state.reload(PHASES) == freed
    return [*results, {name: p.detach().clone() for name, p in named_local_parameters(actor.chunks)}]


def identical(one: list[Any], other: list[Any]) -> bool:
    *results, weights = one
    *other_results, other_weights = other
    return results == other_results and all(torch.equal(weights[name], other_weights[name]) for name in weights)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_goes_on_bit_for_bit(variant: str, tmp_path: Path, make_actor: Callable) -> None:
    folder = save(tiny_model("qwen2", tied=True), tmp_path / "tied")
    runs = [train(make_actor(make_config(**VARIANTS[variant]), folder), offloaded) for offloaded in (False, True)]
    assert identical(*runs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_byte_belongs_to_one_phase(variant: str, qwen2_folder: str, make_actor: Callable) -> None:
    actor = make_actor(make_config(**VARIANTS[variant]), qwen2_folder)
    sizes = [p.numel() for _, p in named_local_parameters(actor.chunks)]
    bfloat16 = "bfloat16" in variant
    expected = {
        "params": 2 if bfloat16 else 4,
        "grads": 4,
        "optimizer": 4 if bfloat16 else 0,  # before the first step: the main parameters
        "reference": 2 if bfloat16 else 4,
    }
    state = state_of(actor)

    def check() -> None:
        for phase, found in state.bytes_on_device().items():
            # Megatron's distributed optimizer aligns each parameter in its buffers.
            padding = 4 * 64 * (len(sizes) + 2) if "distributed" in variant else 0
            assert 0 <= found - expected[phase] * sum(sizes) <= padding, phase

    check()
    update(actor, random_samples(4), 1)
    expected["optimizer"] += 8
    check()


def test_phases_go_and_come_by_name(qwen2_folder: str, make_actor: Callable, caplog: pytest.LogCaptureFixture) -> None:
    actor = make_actor(make_config(distributed=True), qwen2_folder)
    state = state_of(actor)
    before = state.bytes_on_device()
    with caplog.at_level(logging.INFO, "dapo_megatron.megatron.offload"):
        assert state.offload(["grads", "optimizer"]) == {"grads": before["grads"], "optimizer": 0}
    assert f"offload grads: freed {before['grads'] / 1e6:.2f} MB in 0.0" in caplog.text
    assert state.resident == {"params", "reference"}
    assert state.bytes_on_device() == before | {"grads": 0}
    assert state.offload(["grads"]) == {"grads": 0} and state.reload(["params"]) == {"params": 0}
    state.require("params")
    with pytest.raises(RuntimeError, match=r"needs params, grads on the device, and offloaded are: grads; reload"):
        state.require("params", "grads")
    assert state.reload(["grads"]) == {"grads": before["grads"]} and state.resident == set(PHASES) - {"optimizer"}
    assert not any(p.main_grad.any() for _, p in named_local_parameters(actor.chunks))
    with pytest.raises(ValueError, match="no such phase: 'gradients'; there are params, grads, optimizer, reference"):
        state.offload(["gradients"])


def test_what_is_brought_for_a_while_leaves_again(qwen2_folder: str, make_actor: Callable) -> None:
    state = state_of(make_actor(make_config(distributed=True), qwen2_folder))
    state.offload(["reference", "grads"])
    with pytest.raises(KeyError), state.on_device("params", "reference"):
        assert state.resident == {"params", "optimizer", "reference"}
        raise KeyError
    assert state.resident == {"params", "optimizer"}


def test_the_cpu_frees_gradients_only(qwen2_folder: str, make_actor: Callable) -> None:
    actor = make_actor(make_config(distributed=False), qwen2_folder)
    update(actor, random_samples(4), 1)
    state = state_of(actor, host_copies=None)
    freed = state.offload(PHASES)
    assert freed.pop("grads") > 0 and not any(freed.values())
    assert state.resident == {"params", "optimizer", "reference"}


def test_host_memory_is_allocated_once(qwen2_folder: str, make_actor: Callable) -> None:
    actor = make_actor(make_config(distributed=False), qwen2_folder)
    state = state_of(actor)
    addresses = []
    for step in (1, 2, 3):
        update(actor, random_samples(4), step)
        state.offload(PHASES)
        addresses.append([host.data_ptr() for phase in PHASES for host in state._host[phase]])
        state.reload(PHASES)
    assert addresses[0] and addresses[0] == addresses[1] == addresses[2]


def train_ranks(rank: int, world_size: int, port: int, folder: str) -> list[bool]:
    """Whether a rank's training does not notice that its state leaves the device."""
    import dapo_megatron.megatron  # noqa: F401
    from dapo_megatron.megatron.actor import MegatronActor

    place = {"rank": rank, "world_size": world_size, "master_address": "127.0.0.1", "master_port": port}
    found = []
    for variant in ("distributed", "bfloat16 distributed"):
        config = make_config(**VARIANTS[variant], data=world_size)
        config.parallel.overlap_grad_reduce = config.parallel.overlap_param_gather = True
        found.append(
            identical(*[train(MegatronActor(config, folder, **place), offloaded) for offloaded in (False, True)])
        )
    return found


def test_shards_of_two_ranks_go_and_come(tmp_path: Path) -> None:
    # Under the name that other processes can import.
    from tests.megatron.test_offload import train_ranks

    folder = save(tiny_model("qwen2", tied=True), tmp_path / "hf")
    assert run_ranks(train_ranks, 2, tmp_path, folder) == [[True, True]] * 2
