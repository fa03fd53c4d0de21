from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dapo_megatron.algorithm.loss import policy_loss
from dapo_megatron.megatron.packed import pack
from dapo_megatron.weights.load import named_local_parameters, unwrap
from tests.tiny_models import hf_log_probs, random_samples, save, tiny_config, tiny_model

CASES = [(family, tied) for family in ("qwen2", "llama") for tied in (False, True)]


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_packed_logits_equal_hf_on_separate_sequences(
    family: str, tied: bool, tmp_path: Path, make_actor: Callable
) -> None:
    hf = tiny_model(family, tied)
    model = unwrap(make_actor(tiny_config(), save(hf, tmp_path / "hf")).chunks[0])
    samples = random_samples(7)
    batch = pack(samples, torch.device("cpu"))
    with torch.no_grad():
        logits = model.hidden_states(batch)[:, 0] @ model.output_weight().T
        expected = torch.cat([hf(torch.from_numpy(sample.token_ids)[None]).logits[0] for sample in samples])
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_every_gradient_equals_hf(family: str, tied: bool, tmp_path: Path, make_actor: Callable) -> None:
    """One update in micro-batches against HF, sequence by sequence, with entropy bonus and temperature."""
    hf = tiny_model(family, tied)
    config = tiny_config(distributed=False, clip_grad=0.0)
    config.rollout.sampling.temperature = 0.7
    config.algorithm.entropy_coefficient = 0.01
    actor = make_actor(config, save(hf, tmp_path / "hf"))
    samples = random_samples(6)
    result = actor.update([samples[:4], samples[4:]], step=1)

    loss = torch.zeros(())
    for sample in samples:
        log_probs, entropy = hf_log_probs(hf, sample, temperature=0.7)
        response = torch.ones(sample.response_tokens)
        loss = (
            loss
            + policy_loss(
                log_probs,
                torch.from_numpy(sample.old_log_probs),
                response * sample.advantage,
                response.bool() & sample.trained,
                response * sample.loss_weight,
                config.algorithm,
                correction_weights=torch.from_numpy(sample.correction_weights),
                entropy=entropy,
            ).loss
        )
    loss.backward()
    assert result["loss"] == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.stack([p.grad.norm() for p in hf.parameters()]).norm().item()
    assert result["grad_norm"] == pytest.approx(norm, rel=1e-5)

    hf_parameters = dict(hf.named_parameters())
    gradients = {name: parameter.main_grad for name, parameter in named_local_parameters(actor.chunks)}
    seen = set()
    for mapping in actor.family.tensors(actor.dimensions):
        if mapping.exported:
            parts = mapping.split.unfuse(gradients[mapping.megatron], actor.dimensions)
            for name, gradient in zip(mapping.hf, parts, strict=True):
                expected = hf_parameters[name].grad
                assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-9, name
                seen.add(name)
    assert seen == set(hf_parameters)


def test_same_log_probs_for_bfloat16_within_its_rounding(tmp_path: Path, make_actor: Callable) -> None:
    hf = tiny_model("llama", tied=True)
    config = tiny_config()
    config.precision.params_dtype = "bfloat16"
    actor = make_actor(config, save(hf, tmp_path / "hf"))
    samples = random_samples(5)
    (log_probs,) = actor.log_probs([samples])
    with torch.no_grad():
        expected = np.concatenate([hf_log_probs(hf, sample)[0].numpy() for sample in samples])
    difference = np.abs(np.concatenate(log_probs) - expected)
    assert difference.mean() < 2e-2 and difference.max() < 0.15
    before = [parameter.detach().clone() for parameter in actor.chunks[0].parameters()]
    assert actor.update([samples], step=1)["skipped"] == 0
    after = list(actor.chunks[0].parameters())
    assert all(p.dtype == torch.bfloat16 for p in after)
    assert any(not torch.equal(p, q) for p, q in zip(before, after, strict=True))
