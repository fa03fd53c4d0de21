"""No layout changes the result: one DAPO update in every layout gives the sums, gradient norm, gradients and log-probs
of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from dapo_megatron.config.schema import Config
from dapo_megatron.data.packing import alignment_of, plan_micro_batches
from dapo_megatron.data.types import TrainingSample
from tests.distributed.ranks import run_ranks
from tests.tiny_models import layout_model, one_rank_actor, random_samples, save, tiny_config

SAMPLES = 9
MAX_TOKENS = 64
"""Several micro-batches a rank, ragged."""


@dataclass(frozen=True)
class Layout:
    """Sizes other than 1, a model, and what else is special.

    Attributes:
        distributed: with the distributed optimizer, where a rank holds the sum of its own shard of the gradients only.
        overlap: reductions and gathers run beside computation.
        moe: options of the MoE layers, of the one rank too.
    """

    sizes: dict[str, Any]
    model: str = "qwen2"
    dtype: str = "float32"
    distributed: bool = False
    overlap: bool = False
    samples: tuple[int, ...] = tuple(range(SAMPLES))
    moe: tuple[tuple[str, Any], ...] = ()
    max_tokens: int = MAX_TOKENS

    @property
    def ranks(self) -> int:
        return int(np.prod([self.sizes.get(name, 1) for name in ("data", "tensor", "pipeline", "context")]))


SP = {"sequence_parallel": True}
VPP2 = {"virtual_pipeline": 2}
BALANCED = (("aux_loss_coefficient", 0.1),)
LAYOUTS = {
    "DP2": Layout({"data": 2}),
    "TP2": Layout({"tensor": 2}),
    "TP2+SP": Layout({"tensor": 2} | SP),
    "TP2+SP tied": Layout({"tensor": 2} | SP, "qwen2 tied"),
    "PP2": Layout({"pipeline": 2}),
    "PP2 tied": Layout({"pipeline": 2}, "qwen2 tied"),
    "PP2xVPP2": Layout({"pipeline": 2} | VPP2),
    "PP2 uneven": Layout({"pipeline": 2}, "qwen2 uneven"),
    "PP2xVPP2 uneven": Layout({"pipeline": 2} | VPP2, "qwen2 uneven"),
    "CP2": Layout({"context": 2}),
    "EP2": Layout({"data": 2, "expert": 2}, "qwen3_moe"),
    "CP2 as EP2": Layout({"context": 2, "expert": 2}, "qwen3_moe"),
    "TP2+SP with copies of experts": Layout({"tensor": 2} | SP, "qwen3_moe"),
    "TP2+SP as EP2": Layout({"tensor": 2, "expert": 2} | SP, "qwen3_moe"),
    "TP2+SP q/k norm": Layout({"tensor": 2} | SP, "qwen3"),
    "TP2 q/k norm": Layout({"tensor": 2}, "qwen3"),
    "ETP2": Layout({"tensor": 2, "expert_tensor": 2} | SP, "qwen3_moe"),
    "TP2+SP latent attention": Layout({"tensor": 2} | SP, "deepseek_v3"),
    "CP2 latent attention": Layout({"context": 2}, "deepseek_v3"),
    "PP2xVPP2 latent attention": Layout({"pipeline": 2} | VPP2, "moonlight"),
    "TP2xPP2": Layout({"tensor": 2, "pipeline": 2}),
    "TP2xPP2xVPP2+SP": Layout({"tensor": 2, "pipeline": 2} | SP | VPP2),
    "TP2xCP2": Layout({"tensor": 2, "context": 2}),
    "TP2xCP2+SP": Layout({"tensor": 2, "context": 2} | SP),
    "CP2xPP2": Layout({"context": 2, "pipeline": 2}),
    "CP4": Layout({"context": 4}),
    "DP4 with more ranks than samples": Layout({"data": 4}, samples=(0, 1, 4)),
    "DP2 with a rank without trained token": Layout({"data": 2}, samples=(2, 4)),
    "DP2xTP2": Layout({"data": 2, "tensor": 2}),
    "TP2+SPxEP2": Layout({"tensor": 2, "data": 2, "expert": 2} | SP, "qwen3_moe"),
    "TP2+SPxEP2xPP2 latent attention": Layout({"tensor": 2, "pipeline": 2, "expert": 2} | SP, "moonlight"),
    "EP2xPP2": Layout({"data": 2, "expert": 2, "pipeline": 2}, "qwen3_moe"),
    "DP2xTP2+SP distributed": Layout({"data": 2, "tensor": 2} | SP, distributed=True),
    "DP2xPP2xVPP2 distributed, overlapped": Layout({"data": 2, "pipeline": 2} | VPP2, distributed=True, overlap=True),
    "DP2xCP2 distributed, overlapped": Layout({"data": 2, "context": 2}, distributed=True, overlap=True),
    "EP2xDP4 distributed": Layout({"data": 4, "expert": 2}, "qwen3_moe", distributed=True),
    # The load-balancing loss is one micro-batch's, so that all tokens are in one; padding has no part in it.
    "TP2+SP as EP2, balanced": Layout({"tensor": 2, "expert": 2} | SP, "qwen3_moe", moe=BALANCED, max_tokens=4096),
    "CP2xPP2, balanced": Layout({"context": 2, "pipeline": 2}, "qwen3_moe", moe=BALANCED, max_tokens=4096),
    "TP2+SPxPP2 bf16": Layout({"tensor": 2, "pipeline": 2} | SP, dtype="bfloat16"),
}


def make_config(layout: Layout, *, one_rank: bool) -> Config:
    # With a large eps the update is nearly linear in the gradient, so that steps compare as gradients do.
    config = tiny_config(
        distributed=layout.distributed and not one_rank, eps=1.0, clip_grad=0.02, lr=10.0, weight_decay=0.0
    )
    config.algorithm.entropy_coefficient = 0.01
    config.algorithm.kl.coefficient = 0.05
    config.parallel.max_tokens_per_micro_batch = layout.max_tokens
    for name, value in layout.moe:
        setattr(config.moe, name, value)
    if one_rank:
        return config
    config.precision.params_dtype = layout.dtype
    config.parallel.overlap_grad_reduce = config.parallel.overlap_param_gather = layout.overlap
    for name, size in layout.sizes.items():
        setattr(config.parallel, name, size)
    return config


def samples_of(layout: Layout) -> list[TrainingSample]:
    samples = [random_samples(SAMPLES)[i] for i in layout.samples]
    for sample in samples:
        sample.reference_log_probs = sample.old_log_probs - np.float32(0.1)
    return samples


def one_update(actor: Any, layout: Layout, config: Config) -> dict[str, Any]:
    """Log-probs, the result of an update, and this rank's shards of the gradients and of the optimizer's step."""
    from dapo_megatron.weights.load import named_local_parameters

    before = {name: p.detach().clone() for name, p in named_local_parameters(actor.chunks)}
    samples = samples_of(layout)
    multiple = config.parallel.pipeline if config.parallel.virtual_pipeline else 1
    plan = plan_micro_batches(
        [sample.total_tokens for sample in samples],
        config.parallel.data,
        config.parallel.max_tokens_per_micro_batch,
        alignment=alignment_of(config),
        count_multiple=multiple,
    )[actor.data_parallel_rank]
    share = [[samples[i] for i in members] for members in plan]
    log_probs = actor.log_probs(share)
    result = actor.update(share, step=1)
    return {
        "result": result,
        "log_probs": {
            i: values
            for members, found in zip(plan, log_probs, strict=True)
            for i, values in zip(members, found, strict=False)
        }
        if actor.answers_for_share
        else {},
        "gradients": {name: p.main_grad.float().numpy().copy() for name, p in named_local_parameters(actor.chunks)},
        "steps": {
            name: (p.detach() - before[name]).float().numpy() for name, p in named_local_parameters(actor.chunks)
        },
    }


def run_layouts(rank: int, world_size: int, port: int, folders: dict[str, str], names: list[str]) -> dict[str, Any]:
    """What each rank of one world returns: every layout of that size, one after the other."""
    from dapo_megatron.megatron.actor import MegatronActor, parallel_state

    results = {}
    for name in names:
        layout = LAYOUTS[name]
        config = make_config(layout, one_rank=False)
        place = {"rank": rank, "world_size": world_size, "master_address": "127.0.0.1", "master_port": port}
        actor = MegatronActor(config, folders[layout.model], **place)
        results[name] = one_update(actor, layout, config) | {
            "tensor": parallel_state.get_tensor_model_parallel_rank(),
            "expert_tensor": parallel_state.get_expert_tensor_parallel_rank(),
        }
        parallel_state.destroy_model_parallel()
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("models")
    models = {layout.model for layout in LAYOUTS.values()}
    return {model: save(layout_model(model), path / model.replace(" ", "_")) for model in models}


@pytest.fixture(scope="module")
def outcomes(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for ranks in (2, 4):
        names = [name for name, layout in LAYOUTS.items() if layout.ranks == ranks]
        both = run_ranks(run_layouts, ranks, tmp_path_factory.mktemp("world"), folders, names)
        found |= {name: [results[name] for results in both] for name in names}
    return found


def gather(ranks: list[dict[str, Any]], what: str, actor: Any) -> dict[str, np.ndarray]:
    """Full gradients or steps from the shards of all ranks, by the family's table alone."""
    full = {}
    for mapping in actor.family.tensors(actor.dimensions):
        place = "expert_tensor" if mapping.in_expert else "tensor"
        shards = {
            rank[place]: torch.from_numpy(rank[what][mapping.megatron])
            for rank in ranks
            if mapping.megatron in rank[what]
        }
        if shards:  # a tied output weight is the embedding but on a last stage of its own
            full[mapping.megatron] = mapping.split.unshard([shards[i] for i in sorted(shards)]).numpy()
    return full


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_rank(name: str, folders: dict[str, str], outcomes: dict[str, list[dict[str, Any]]]) -> None:
    layout = LAYOUTS[name]
    config = make_config(layout, one_rank=True)
    actor = one_rank_actor(config, folders[layout.model])
    one = one_update(actor, layout, config)
    ranks = outcomes[name]
    exact = layout.dtype == "float32"
    # bfloat16 keeps 8 bits: activations, weights and gradients are rounded in every layer.
    relative, absolute = (1e-5, 1e-7) if exact else (0.05, 0.02)
    for rank in ranks:
        assert rank["result"] == pytest.approx(one["result"], rel=relative, abs=absolute)
    log_probs = {i: values for rank in ranks for i, values in rank["log_probs"].items()}
    assert log_probs.keys() == one["log_probs"].keys()
    for i, values in log_probs.items():
        np.testing.assert_allclose(values, one["log_probs"][i], atol=1e-5 if exact else 0.1)
    # A step is the difference of two weights, whose last bits are lost.
    for what, bound in {"gradients": relative, "steps": 5e-4}.items():
        if (what == "gradients" and layout.distributed) or (what == "steps" and not exact):
            continue
        gathered = gather(ranks, what, actor)
        assert one[what].keys() <= gathered.keys()
        for tensor, want in one[what].items():
            got = gathered[tensor][: want.shape[0]]
            assert np.abs(want).max() > 1e-5, (what, tensor)
            assert np.abs(got - want).max() <= bound * np.abs(want).max(), (what, tensor)
