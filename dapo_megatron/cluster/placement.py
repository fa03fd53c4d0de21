"""Where the actors live: one Ray cluster, each rank and each engine in a process of its own.

On CUDA every device is a bundle of one placement group. Rank i has bundle i; engine i has as many as
`rollout.tensor` says, from its own first one on: the ranks' (colocated), or those behind them (disaggregated).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dapo_megatron.cluster.actors import RayEngine, RayTrainingGroup, TrainingRank
from dapo_megatron.config.layout import world_size
from dapo_megatron.config.schema import Config, FP8Config, Placement
from dapo_megatron.rollout.engine import RolloutEngine, engine_environment

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
CONCURRENT_CALLS = 100_000
"""Groups that may wait in one engine at once; Ray's own limit is 1,000."""

DEVICE_SHARE = 0.5
"""Of a device that a rank and an engine share, in Ray's books."""


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
    """Start the engine actors alone (they load their models in the background); needs a Ray session."""
    devices = _devices(config, config.rollout.engines * config.rollout.tensor)
    return _engines(config, hf_folder, devices, first_bundle=0, share=1)


def place_all(config: Config, hf_folder: str) -> Placed:
    """Start ranks and engines; needs a Ray session."""
    size, for_engines = world_size(config.parallel), config.rollout.engines * config.rollout.tensor
    colocated = config.cluster.placement is Placement.colocated
    devices = _devices(config, max(size, for_engines) if colocated else size + for_engines)
    share = DEVICE_SHARE if colocated else 1
    ranks = [
        ray.remote(TrainingRank)
        .options(**_on_devices(devices, rank, share), runtime_env={"env_vars": _training_environment(config)})
        .remote(config, hf_folder, rank, size)
        for rank in range(size)
    ]
    engines = _engines(config, hf_folder, devices, 0 if colocated else size, share)
    return Placed(RayTrainingGroup(ranks, config), engines)


def _engines(
    config: Config, hf_folder: str, devices: PlacementGroup | None, first_bundle: int, share: float
) -> list[RayEngine]:
    environment = engine_environment(device_kind(config), config.rollout.cpu_threads)
    size = config.rollout.tensor
    engines = []
    for index in range(config.rollout.engines):
        start = first_bundle + index * size
        options, of_workers = engine_options(devices, range(start, start + size), share)
        runtime_env = {"env_vars": environment | of_workers}
        actor = ray.remote(RolloutEngine).options(**options, max_concurrency=CONCURRENT_CALLS, runtime_env=runtime_env)
        engines.append(RayEngine(actor.remote(config, hf_folder), index, config))
    return engines


def engine_options(
    devices: PlacementGroup | None, bundles: Sequence[int], share: float
) -> tuple[dict[str, Any], dict[str, str]]:
    """Ray's options for an engine's actor, and the environment by which vLLM places the workers of a larger engine.

    Such an engine's actor has no device: vLLM starts workers as actors of their own, in bundles of the same group.
    """
    if devices is None or len(bundles) == 1:
        return _on_devices(devices, bundles[0], share), {}
    environment = {
        "VLLM_RAY_PER_WORKER_GPUS": str(share),
        "VLLM_RAY_BUNDLE_INDICES": ",".join(str(bundle) for bundle in bundles),
    }
    return _on_devices(devices, bundles[0], 0), environment


def _on_devices(devices: PlacementGroup | None, bundle: int, share: float) -> dict[str, Any]:
    if devices is None:
        return {"num_cpus": 1, "num_gpus": 0}
    strategy = PlacementGroupSchedulingStrategy(
        devices, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=True
    )
    return {"num_cpus": 1, "num_gpus": share, "scheduling_strategy": strategy}


def _devices(config: Config, count: int) -> PlacementGroup | None:
    """A bundle for each CUDA device, neighbours on one host where possible; None on CPU hosts."""
    if device_kind(config) == "cpu":
        return None
    group = placement_group([{"GPU": 1.0, "CPU": 2.0}] * count, strategy="PACK")
    ray.get(group.ready(), timeout=config.cluster.start_deadline_s)
    return group


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
        # Training's sizes change with every micro-batch. vLLM's sleep mode cannot have this: it is set for ranks alone.
        environment["PYTORCH_CUDA_ALLOC_CONF"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    else:
        environment |= {
            "OMP_NUM_THREADS": str(config.cluster.cpu_threads_per_actor),
            "OMP_WAIT_POLICY": "PASSIVE",  # idle threads would spin on the cores that the engine needs
            "TORCH_COMPILE_DISABLE": "1",
        }
    return environment
