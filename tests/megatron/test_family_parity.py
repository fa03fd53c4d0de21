"""Every family against transformers: packed on one rank, sequence by sequence there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.megatron.packed import pack
from dapo_megatron.weights.load import unwrap
from tests.tiny_models import FAMILIES, random_samples, save, tiny_config, tiny_model

SAMPLES = random_samples(7)

TIED = "llama31 mistral mixtral qwen2 qwen3 qwen3_moe".split()


def hf_logits(model: Any) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(torch.from_numpy(sample.token_ids)[None]).logits[0] for sample in SAMPLES])


@pytest.mark.parametrize(("family", "tied"), [*((name, False) for name in FAMILIES), *((name, True) for name in TIED)])
def test_packed_logits_equal_hf_on_separate_sequences(
    family: str, tied: bool, tmp_path: Path, make_actor: Callable
) -> None:
    """The tied Qwen3 mixture of experts does not normalise its router."""
    hf = tiny_model(family, tied)
    model = unwrap(make_actor(tiny_config(), save(hf, tmp_path / "hf")).chunks[0])
    with torch.no_grad():
        logits = model.hidden_states(pack(SAMPLES, torch.device("cpu")))[:, 0] @ model.output_weight().T
    expected = hf_logits(hf)
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


PLAIN_ROPE = {"rope_type": "default"}


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama31", {"rope_parameters": {**PLAIN_ROPE, "rope_theta": 9e6}}),
        ("deepseek_v3", {"rope_parameters": {**PLAIN_ROPE, "rope_theta": 10000.0}}),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
        ("deepseek_v3", {"routed_scaling_factor": 1.0}),
        ("qwen3_moe", {"norm_topk_prob": False}),
    ],
)
def test_what_sets_a_family_apart_shows_in_these_models(family: str, change: dict[str, Any]) -> None:
    """So that a model built without it could not pass above."""
    hf = tiny_model(family)
    other = copy.deepcopy(hf.config)
    for name, value in change.items():
        setattr(other, name, value)
    without = type(hf)(other).eval()
    without.load_state_dict(hf.state_dict())
    assert (hf_logits(hf) - hf_logits(without)).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["deepseek_v3", "moonlight"])
def test_the_router_bias_shows_in_these_models(family: str) -> None:
    hf = tiny_model(family)
    before = hf_logits(hf)
    for name, buffer in hf.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
    assert (hf_logits(hf) - before).abs().max() > 1e-3
