from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dapo_megatron.algorithm.loss import loss_metrics
from dapo_megatron.data.types import TrainingSample
from dapo_megatron.weights.load import named_local_parameters
from tests.tiny_models import hf_log_probs, random_samples, save, tiny_config, tiny_model


def parameters(actor: object) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in named_local_parameters(actor.chunks)}


def gradients(actor: object) -> dict[str, torch.Tensor]:
    return {name: p.main_grad.clone() for name, p in named_local_parameters(actor.chunks)}


def unchanged(before: dict[str, torch.Tensor], actor: object) -> bool:
    return all(torch.equal(before[name], p) for name, p in named_local_parameters(actor.chunks))


def test_log_probs_equal_hf_in_the_order_given(tmp_path: Path, make_actor: Callable) -> None:
    hf = tiny_model("llama", tied=True)
    config = tiny_config()
    config.rollout.sampling.temperature = 0.6
    actor = make_actor(config, save(hf, tmp_path / "hf"))
    samples = random_samples(7)
    micro_batches = [samples[:4], [], samples[4:5], samples[5:]]
    results = actor.log_probs(micro_batches)
    assert [len(r) for r in results] == [4, 0, 1, 2]
    for sample, log_probs in zip(samples, (x for r in results for x in r), strict=True):
        expected = hf_log_probs(hf, sample, 0.6)[0].detach().numpy()
        assert log_probs.dtype == np.float32 and log_probs.shape == (sample.response_tokens,)
        np.testing.assert_allclose(log_probs, expected, atol=2e-5)


def test_gradient_and_sums_do_not_depend_on_micro_batches_or_order(qwen2_folder: str, make_actor: Callable) -> None:
    samples = random_samples(8)
    config = tiny_config(clip_grad=0.0)
    config.algorithm.entropy_coefficient = 0.01
    splits = [[samples], [[s] for s in samples[::-1]], [samples[5:], [], samples[2:5], samples[:2]]]
    results = []
    for split in splits:
        actor = make_actor(config, qwen2_folder)
        results.append((actor.update(split, step=1), gradients(actor)))
    (sums, grads), *others = results
    for other_sums, other_grads in others:
        assert other_sums == pytest.approx(sums, rel=1e-5)
        for name, gradient in grads.items():
            assert (gradient - other_grads[name]).abs().max() <= 1e-5 * gradient.abs().max(), name


def test_update_is_adamw_with_clipping_and_without_decay_of_norms_and_biases(
    qwen2_folder: str, make_actor: Callable
) -> None:
    config = tiny_config(weight_decay=0.3, eps=1e-3, clip_grad=0.01, distributed=True)
    actor = make_actor(config, qwen2_folder)
    expected = {name: torch.nn.Parameter(p) for name, p in parameters(actor).items()}
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in expected.values() if p.ndim > 1], "weight_decay": 0.3},
            {"params": [p for p in expected.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.999),
        eps=1e-3,
    )
    for seed in range(3):
        result = actor.update([random_samples(4, seed)], step=1)
        assert result["grad_norm"] > 0.01 and result["skipped"] == 0 and result["lr"] == 1e-2
        for name, parameter in named_local_parameters(actor.chunks):
            expected[name].grad = parameter.main_grad.clone()  # already clipped
        norm = torch.stack([p.grad.norm() for p in expected.values()]).norm().item()
        assert norm == pytest.approx(0.01, rel=1e-3)
        reference.step()
    for name, parameter in named_local_parameters(actor.chunks):
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_learning_rate_warms_up_over_steps(qwen2_folder: str, make_actor: Callable) -> None:
    actor = make_actor(tiny_config(warmup_steps=4), qwen2_folder)
    rates = [actor.update([random_samples(1)], step=step)["lr"] for step in (1, 1, 2, 4, 9)]
    assert rates == pytest.approx([0.0025, 0.0025, 0.005, 0.01, 0.01])


def test_a_non_finite_gradient_changes_nothing_and_a_streak_names_the_parameter(
    qwen2_folder: str, make_actor: Callable
) -> None:
    actor = make_actor(tiny_config(max_skipped_updates=3), qwen2_folder)
    good = random_samples(3)
    bad = [dataclasses.replace(good[0], advantage=float("nan")), *good[1:]]
    before = parameters(actor)
    for _ in range(2):
        result = actor.update([bad], step=1)
        assert result["skipped"] == 1 and not np.isfinite(result["grad_norm"])
    assert unchanged(before, actor)
    assert actor.update([good], step=1)["skipped"] == 0  # ends the streak
    assert not unchanged(before, actor)
    before = parameters(actor)
    actor.update([bad], step=1)
    actor.update([bad], step=1)
    with pytest.raises(RuntimeError, match="3 updates in a row .* embedding.word_embeddings.weight"):
        actor.update([bad], step=1)
    assert unchanged(before, actor)


def test_an_update_without_trained_token_is_skipped(qwen2_folder: str, make_actor: Callable) -> None:
    actor = make_actor(tiny_config(), qwen2_folder)
    actor.update([random_samples(3)], step=1)  # Adam has momentum from now on
    before = parameters(actor)
    result = actor.update([[dataclasses.replace(s, trained=False) for s in random_samples(3)], []], step=1)
    assert result["skipped"] == 1 and result["tokens"] == 0
    assert unchanged(before, actor)


def test_untrained_tokens_change_nothing_even_if_not_finite(qwen2_folder: str, make_actor: Callable) -> None:
    samples = random_samples(5)
    poisoned = list(samples)
    nan = np.full(samples[2].response_tokens, np.nan, np.float32)
    poisoned[2] = dataclasses.replace(samples[2], old_log_probs=nan, correction_weights=nan, advantage=float("nan"))
    assert not samples[2].trained
    results = []
    for given in (samples, poisoned):
        actor = make_actor(tiny_config(), qwen2_folder)
        results.append((actor.update([given], step=1), parameters(actor)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])


def test_same_inputs_give_the_same_bits(qwen2_folder: str, make_actor: Callable) -> None:
    runs = []
    for _ in range(2):
        actor = make_actor(tiny_config(), qwen2_folder)
        sums = [actor.update([random_samples(4, seed), random_samples(3, seed + 9)], step=1) for seed in range(3)]
        runs.append((sums, parameters(actor), actor.log_probs([random_samples(4)])))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])
    assert all(np.array_equal(a, b) for a, b in zip(runs[0][2][0], runs[1][2][0], strict=True))


def test_first_update_has_ratio_one_and_clips_nothing(qwen2_folder: str, make_actor: Callable) -> None:
    actor = make_actor(tiny_config(), qwen2_folder)
    samples = random_samples(6)
    for sample, log_probs in zip(samples, actor.log_probs([samples])[0], strict=True):
        sample.old_log_probs = log_probs
    metrics = loss_metrics(actor.update([samples[:3], samples[3:]], step=1))
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-6)
    assert metrics["policy/kl_old"] == pytest.approx(0, abs=1e-6)
    assert metrics["policy/clip_fraction_low"] == metrics["policy/clip_fraction_high"] == 0


def test_rewarded_samples_become_likelier(qwen2_folder: str, make_actor: Callable) -> None:
    actor = make_actor(tiny_config(weight_decay=0.0), qwen2_folder)
    rng = np.random.default_rng(0)
    liked, disliked = (
        TrainingSample(rng.integers(0, 37, 12), prompt_tokens=4, advantage=a, loss_weight=1 / 16) for a in (1.0, -1.0)
    )
    history = []
    for _ in range(6):
        ((log_probs_liked, log_probs_disliked),) = actor.log_probs([[liked, disliked]])
        history.append((log_probs_liked.sum(), log_probs_disliked.sum()))
        liked.old_log_probs, disliked.old_log_probs = log_probs_liked, log_probs_disliked
        actor.update([[liked], [disliked]], step=1)
    assert history[-1][0] > history[0][0] + 3 and history[-1][1] < history[0][1]


def test_reference_is_the_initial_policy(qwen2_folder: str, make_actor: Callable) -> None:
    config = tiny_config()
    config.algorithm.kl.coefficient = 0.1
    actor = make_actor(config, qwen2_folder)
    samples = random_samples(3)
    initial = actor.log_probs([samples])[0]
    for sample, log_probs in zip(samples, initial, strict=True):
        sample.reference_log_probs = log_probs
    sums = actor.update([samples, []], step=1)
    assert sums["kl_reference"] == pytest.approx(0, abs=1e-6)
    trained = parameters(actor)
    for log_probs, expected in zip(actor.log_probs([samples], reference=True)[0], initial, strict=True):
        assert np.array_equal(log_probs, expected)
    assert unchanged(trained, actor)
    assert not np.allclose(actor.log_probs([samples])[0][0], initial[0])
    assert actor.update([samples], step=1)["kl_reference"] > 0


def test_reference_without_kl_term_is_refused(qwen2_folder: str, make_actor: Callable) -> None:
    with pytest.raises(ValueError, match=r"kl\.coefficient is 0"):
        make_actor(tiny_config(), qwen2_folder).log_probs([random_samples(1)], reference=True)


@pytest.mark.parametrize(("family", "tied"), [(f, t) for f in ("qwen2", "llama") for t in (False, True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_of_an_untrained_policy_returns_the_same_bytes(
    family: str, tied: bool, dtype: str, tmp_path: Path, make_actor: Callable
) -> None:
    config = tiny_config()
    config.precision.params_dtype = config.precision.rollout_dtype = dtype
    folder = save(tiny_model(family, tied).to(getattr(torch, dtype)), tmp_path / "hf")
    actor = make_actor(config, folder)
    actor.export_hf(tmp_path / "exported")
    original = load_file(Path(folder) / "model.safetensors")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert exported[name].dtype == tensor.dtype and torch.equal(exported[name], tensor), name
    source = dict(actor.weight_source())
    assert source.keys() == original.keys() and all(torch.equal(source[name], original[name]) for name in source)
    configs = [json.loads((Path(f) / "config.json").read_text()) for f in (folder, tmp_path / "exported")]
    assert configs[0] == configs[1]


def test_weight_source_follows_updates_and_casts(qwen2_folder: str, make_actor: Callable) -> None:
    config = tiny_config()
    config.precision.rollout_dtype = "bfloat16"
    actor = make_actor(config, qwen2_folder)
    source = actor.weight_source()
    before = {name: tensor.clone() for name, tensor in source}
    actor.update([random_samples(3)], step=1)
    after = dict(source)
    assert all(tensor.dtype == torch.bfloat16 for tensor in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_a_world_size_that_does_not_fit_is_refused(qwen2_folder: str, make_actor: Callable) -> None:
    config = tiny_config()
    config.parallel.data = 2
    with pytest.raises(ValueError, match="data 2 x tensor 1 .* = 2 ranks, but there are 1"):
        make_actor(config, qwen2_folder)


def test_an_unknown_dtype_is_refused(qwen2_folder: str, make_actor: Callable) -> None:
    config = tiny_config()
    config.precision.params_dtype = "float8"
    with pytest.raises(ValueError, match="params_dtype='float8': allowed are float32, bfloat16"):
        make_actor(config, qwen2_folder)
