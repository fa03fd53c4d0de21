"""Where the actors live: one Ray cluster, ranks and engines on the same devices (colocated), each in a process of
its own. On CUDA, rank i and engine i share device i through a placement-group bundle and take turns."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dapo_megatron.cluster.actors import RayEngine, RayTrainingGroup, TrainingRank
from dapo_megatron.config.layout import world_size
from dapo_megatron.config.schema import Config, FP8Config
from dapo_megatron.rollout.engine import RolloutEngine, engine_environment

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
CONCURRENT_CALLS = 100_000
"""Groups that may wait in one engine at once; Ray's own limit is 1,000."""

DEVICE_SHARE = 0.5
"""A rank and an engine share a device."""


@dataclass(frozen=True)
class Placed:
    """The running actors."""

    training: RayTrainingGroup
    engines: list[RayEngine]


def device_kind(config: Config) -> str:
    """`cpu` or `cuda`."""
    if config.cluster.device != "auto":
        return config.cluster.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def ray_session(config: Config) -> Iterator[None]:
    """A Ray session that ends with the block, and all its processes with it.

    Without `cluster.address` a local one is started that listens on loopback only.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray runs its workers at niceness 15, where any other process of the host goes first.
    os.environ.setdefault("RAY_worker_niceness", "0")
    options: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False}
    if config.cluster.address is None:
        options |= {"include_dashboard": False, "_node_ip_address": LOOPBACK}
        # Ray's unit of CPU is bookkeeping: ranks and engines take turns on the same cores.
        options["num_cpus"] = world_size(config.parallel) + config.rollout.engines
    else:
        options["address"] = config.cluster.address
    ray.init(**options)
    try:
        yield
    finally:
        ray.shutdown()


def place_engines(config: Config, hf_folder: str) -> list[RayEngine]:
    """Start the engine actors (they load their models in the background); needs a Ray session."""
    return _engines(config, hf_folder, [_resources(config)] * config.rollout.engines)


def place_all(config: Config, hf_folder: str) -> Placed:
    """Start ranks and engines on shared devices; needs a Ray session."""
    size = world_size(config.parallel)
    options = [_resources(config)] * max(size, config.rollout.engines)
    if device_kind(config) == "cuda":
        group = placement_group([{"GPU": 1.0, "CPU": 2.0}] * len(options), strategy="PACK")
        ray.get(group.ready(), timeout=config.cluster.start_deadline_s)
        options = [
            shared | {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)}
            for i, shared in enumerate(options)
        ]
    ranks = [
        ray.remote(TrainingRank)
        .options(**options[rank], runtime_env={"env_vars": _training_environment(config)})
        .remote(config, hf_folder, rank, size)
        for rank in range(size)
    ]
    return Placed(RayTrainingGroup(ranks, config), _engines(config, hf_folder, options[: config.rollout.engines]))


def _engines(config: Config, hf_folder: str, options: list[dict[str, Any]]) -> list[RayEngine]:
    environment = engine_environment(device_kind(config), config.rollout.cpu_threads)
    return [
        RayEngine(
            ray.remote(RolloutEngine)
            .options(**each, max_concurrency=CONCURRENT_CALLS, runtime_env={"env_vars": environment})
            .remote(config, hf_folder),
            index,
            config,
        )
        for index, each in enumerate(options)
    ]


def _resources(config: Config) -> dict[str, Any]:
    return {"num_cpus": 1, "num_gpus": DEVICE_SHARE if device_kind(config) == "cuda" else 0}


def fp8_environment(fp8: FP8Config, capability: tuple[int, int] | None) -> dict[str, str]:
    """What Transformer Engine reads when it is imported, so that it must be there before.

    Blockwise scales are float32, as in DeepSeek-V3's checkpoints and in engines that read them. From compute capability
    10 on (Blackwell) the recipe runs as mxfp8, whose scales are powers of two.
    """
    if fp8.recipe != "blockwise" or fp8.emulate:
        return {}
    on_blackwell = capability is not None and capability >= (10, 0)
    powers_of_two = on_blackwell or fp8.power_of_two_scales
    return {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0" if powers_of_two else "1"}


def _training_environment(config: Config) -> dict[str, str]:
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if device_kind(config) == "cuda":
        import torch

        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        environment |= fp8_environment(config.precision.fp8, capability)
    else:
        environment |= {
            "OMP_NUM_THREADS": str(config.cluster.cpu_threads_per_actor),
            "OMP_WAIT_POLICY": "PASSIVE",  # idle threads would spin on the cores that the engine needs
            "TORCH_COMPILE_DISABLE": "1",
        }
    return environment
