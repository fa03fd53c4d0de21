"""What the engine samples: against an HF forward pass, for any batch, and how it ends."""

from __future__ import annotations

import math
import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from dapo_megatron.config.schema import SamplingConfig
from dapo_megatron.rollout.engine import GenerationAborted, RolloutEngine
from tests.rollout.conftest import (
    CHARACTERS,
    EOS_IDS,
    MAX_PROMPT_TOKENS,
    MAX_RESPONSE_TOKENS,
    STOP,
    VOCAB,
    Policy,
    engine_config,
    make_folder,
    prompt_of,
)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_log_probs_equal_an_hf_forward_pass(policy: Policy, temperature: float) -> None:
    for length in (1, 11, 150):
        for sample in policy.generate(prompt_of(length), [1, 2, 3], temperature):
            assert policy.log_prob_error(prompt_of(length), sample, temperature or 1.0) <= 1e-5


def test_greedy_takes_the_most_likely_token(policy: Policy) -> None:
    (sample,) = policy.generate(prompt_of(20), [0], temperature=0.0)
    assert sample.token_ids == policy.log_probs(prompt_of(20), sample).argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_samples_follow_the_distribution(untied: Policy, temperature: float) -> None:
    """The mean of log p + entropy over sampled tokens is zero, up to 4 standard errors."""
    total = variance = 0.0
    for sample in untied.generate(prompt_of(9), range(100), temperature):
        rows = untied.log_probs(prompt_of(9), sample, temperature).double()
        means = (rows.exp() * rows).sum(-1)
        variance += ((rows.exp() * rows.square()).sum(-1) - means.square()).sum().item()
        total += sum(sample.log_probs) - means.sum().item()
    assert abs(total) <= 4 * math.sqrt(variance)


def test_seeds_decide_whatever_the_batch(untied: Policy) -> None:
    """Alone, in shuffled batches, and when the KV cache is too small for all, so that samples are preempted."""
    requests = [(prompt_of(122, start), seed) for start in range(4) for seed in range(8)]
    alone = [untied.generate(prompt, [seed])[0] for prompt, seed in requests]
    assert len({tuple(sample.token_ids) for sample in alone}) > len(requests) / 2
    order = list(range(len(requests)))
    random.Random(0).shuffle(order)
    futures = {i: untied.process.submit("generate", requests[i][0], [requests[i][1]], SamplingConfig()) for i in order}
    for i in order:
        (sample,) = futures[i].result(60)
        assert sample.token_ids == alone[i].token_ids
        assert sample.log_probs == pytest.approx(alone[i].log_probs, abs=1e-5)
    grouped = untied.generate(prompt_of(122, 3), range(7, -1, -1))
    assert [sample.token_ids for sample in grouped] == [sample.token_ids for sample in alone[:23:-1]]
    assert [sample.index for sample in grouped] == list(range(8))


def test_every_eos_id_ends_a_response_and_belongs_to_it(untied: Policy) -> None:
    samples = untied.generate(prompt_of(5), range(120))
    ends = set()
    for sample in samples:
        assert len(sample.log_probs) == len(sample.token_ids) <= MAX_RESPONSE_TOKENS
        assert not EOS_IDS & set(sample.token_ids[:-1])
        if sample.finish_reason == "stop":
            ends.add(sample.token_ids[-1])
        else:
            assert sample.finish_reason == "length"
            assert len(sample.token_ids) == MAX_RESPONSE_TOKENS
            assert sample.token_ids[-1] not in EOS_IDS
    assert ends == EOS_IDS
    assert any(sample.finish_reason == "length" for sample in samples)


def test_text_is_the_response_without_special_tokens(untied: Policy) -> None:
    names = {i: token for token, i in VOCAB.items() if token in CHARACTERS}
    for sample in untied.generate(prompt_of(5), range(20)):
        assert sample.text == "".join(names.get(token, "") for token in sample.token_ids)


def test_a_stop_string_ends_a_response_and_belongs_to_it(policies: dict[str, Policy]) -> None:
    samples = policies["llama"].generate(prompt_of(5), range(60))
    stopped = [sample for sample in samples if VOCAB[STOP] in sample.token_ids]
    assert stopped
    for sample in stopped:
        assert sample.token_ids.index(VOCAB[STOP]) == len(sample.token_ids) - 1 == len(sample.log_probs) - 1
        assert sample.finish_reason == "stop"
        assert sample.text.endswith(STOP)


def test_truncated_sampling_keeps_to_the_nucleus(untied: Policy) -> None:
    for sample in untied.generate(prompt_of(5), range(8), top_p=0.5):
        ordered, tokens = untied.log_probs(prompt_of(5), sample).exp().sort(descending=True)
        for row, token in enumerate(sample.token_ids):
            rank = tokens[row].tolist().index(token)
            assert ordered[row, :rank].sum() <= 0.5 + 1e-5


@pytest.mark.parametrize(
    ("prompt", "seeds", "message"),
    [
        ([], [1], "a prompt of 0 tokens"),
        (prompt_of(MAX_PROMPT_TOKENS + 1), [1], "data.max_prompt_tokens"),
        (prompt_of(4), [-1], "seed -1"),
    ],
)
def test_bad_requests_are_refused(untied: Policy, prompt: list[int], seeds: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        untied.generate(prompt, seeds)
    assert len(untied.generate(prompt_of(MAX_PROMPT_TOKENS), [1])) == 1


def test_abort_all_ends_what_is_pending(untied: Policy) -> None:
    expected = untied.generate(prompt_of(100), [5])
    pending = [
        untied.process.submit("generate", prompt_of(100, start), range(64), SamplingConfig()) for start in range(8)
    ]
    untied.process.call("abort_all")
    errors = [future.exception(60) for future in pending]
    assert all(error is None or isinstance(error, GenerationAborted) for error in errors)
    assert isinstance(errors[-1], GenerationAborted)
    assert untied.generate(prompt_of(100), [5]) == expected


def test_a_released_engine_refuses_and_comes_back(untied: Policy) -> None:
    expected = untied.generate(prompt_of(200), [5])
    kv_cache_bytes = engine_config().rollout.kv_cache_bytes or 0
    assert untied.process.call("release") >= 0.5 * kv_cache_bytes
    with pytest.raises(RuntimeError, match="released"):
        untied.generate(prompt_of(200), [5])
    untied.process.call("wake_weights")
    with pytest.raises(RuntimeError, match="without a KV cache"):
        untied.generate(prompt_of(200), [5])
    untied.process.call("wake_kv_cache")
    assert untied.generate(prompt_of(200), [5]) == expected


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    """A window too long, a head size that the CPU lacks, a head_dim that vLLM's Qwen2 ignores, no KV cache size."""
    good, _ = make_folder(tmp_path / "good", "qwen2")
    narrow, _ = make_folder(tmp_path / "narrow", "qwen2", hidden_size=64, head_dim=16)
    ignored, _ = make_folder(tmp_path / "ignored", "qwen2", hidden_size=96)
    too_long, unsized = engine_config(), engine_config()
    too_long.rollout.max_response_tokens = 600
    unsized.rollout.kv_cache_bytes = None
    cases = [
        (unsized, good, "rollout.kv_cache_bytes"),
        (too_long, good, "880 tokens: the model's window is 512"),
        (engine_config(), narrow, "head_dim 16"),
        (engine_config(), ignored, "config.json has head_dim 32; vLLM's model of this architecture uses 24"),
    ]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        for config, folder, message in cases:
            with pytest.raises(ValueError, match=message):
                process.submit(RolloutEngine, config, folder).result()
