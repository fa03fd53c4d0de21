"""Where actors go on CUDA devices, asked of Ray's options without a device."""

from __future__ import annotations

from typing import Any

import pytest
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup

from dapo_megatron.cluster import placement
from dapo_megatron.config.schema import Config, Placement


class Actor:
    """Stands for ray.remote(a class): records the options of its instances."""

    made: list[tuple[str, dict[str, Any]]]

    def __init__(self, kind: type) -> None:
        self._name = kind.__name__

    def options(self, **options: Any) -> Actor:
        self._options = options
        return self

    def remote(self, *_: Any) -> None:
        self.made.append((self._name, self._options))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    monkeypatch.setattr(placement.ray, "remote", Actor)
    monkeypatch.setattr(placement.ray, "get", lambda *_, **__: None)
    monkeypatch.setattr(PlacementGroup, "ready", lambda self: None)
    monkeypatch.setattr(placement, "placement_group", made_group)
    monkeypatch.setattr(Actor, "made", [], raising=False)
    return Actor.made


def made_group(bundles: list[dict[str, float]], strategy: str) -> PlacementGroup:
    assert strategy == "PACK" and all(bundle["GPU"] == 1 for bundle in bundles)
    return PlacementGroup(PlacementGroupID.from_random(), bundles)


def cuda_config(kind: Placement, tensor: int) -> Config:
    """Four ranks; two engines."""
    config = Config()
    config.cluster.device, config.cluster.placement = "cuda", kind
    config.parallel.data, config.rollout.engines, config.rollout.tensor = 4, 2, tensor
    return config


@pytest.mark.parametrize(
    ("kind", "tensor", "devices", "engines"),
    [
        (Placement.colocated, 1, 4, [[0], [1]]),
        (Placement.colocated, 2, 4, [[0, 1], [2, 3]]),
        (Placement.colocated, 3, 6, [[0, 1, 2], [3, 4, 5]]),
        (Placement.disaggregated, 1, 6, [[4], [5]]),
        (Placement.disaggregated, 2, 8, [[4, 5], [6, 7]]),
    ],
)
def test_engines_share_the_ranks_devices_or_have_their_own(
    made: list[tuple[str, dict[str, Any]]], kind: Placement, tensor: int, devices: int, engines: list[list[int]]
) -> None:
    placement.place_all(cuda_config(kind, tensor), "folder")
    share = 0.5 if kind is Placement.colocated else 1
    options = {name: [each for other, each in made if other == name] for name, _ in made}
    for rank, each in enumerate(options["TrainingRank"]):
        strategy = each["scheduling_strategy"]
        assert (strategy.placement_group_bundle_index, each["num_gpus"]) == (rank, share)
        assert len(strategy.placement_group.bundle_cache) == devices
        assert "expandable_segments:True" in each["runtime_env"]["env_vars"]["PYTORCH_CUDA_ALLOC_CONF"]
    for bundles, each in zip(engines, options["RolloutEngine"], strict=True):
        environment = each["runtime_env"]["env_vars"]
        assert each["scheduling_strategy"].placement_group_bundle_index == bundles[0]
        assert "PYTORCH_CUDA_ALLOC_CONF" not in environment
        if tensor == 1:
            assert each["num_gpus"] == share and "VLLM_RAY_BUNDLE_INDICES" not in environment
        else:
            assert each["num_gpus"] == 0
            assert environment["VLLM_RAY_BUNDLE_INDICES"] == ",".join(map(str, bundles))
            assert environment["VLLM_RAY_PER_WORKER_GPUS"] == str(share)


def test_engines_alone_have_whole_devices(made: list[tuple[str, dict[str, Any]]]) -> None:
    placement.place_engines(cuda_config(Placement.colocated, 1), "folder")
    assert [(name, each["num_gpus"]) for name, each in made] == [("RolloutEngine", 1)] * 2
