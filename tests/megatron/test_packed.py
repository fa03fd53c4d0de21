from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.data.types import TrainingSample
from dapo_megatron.megatron.packed import pack
from tests.tiny_models import random_samples

CPU = torch.device("cpu")


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 8), st.integers(0, 100))
def test_every_response_token_is_described_once(count: int, seed: int) -> None:
    samples = random_samples(count, seed)
    batch = pack(samples, CPU)
    tokens = batch.tokens[0].tolist()
    assert tokens == [token for sample in samples for token in sample.token_ids]
    assert batch.position_ids[0].tolist() == [i for sample in samples for i in range(sample.total_tokens)]
    assert batch.response_lengths == [sample.response_tokens for sample in samples]

    row = first = 0
    for sample in samples:
        for t in range(sample.response_tokens):
            position = first + sample.prompt_tokens + t
            assert batch.response_positions[row] == position - 1
            assert batch.targets[row] == tokens[position]
            assert batch.mask[row] == sample.trained
            assert batch.advantages[row] == np.float32(sample.advantage)
            assert batch.loss_weights[row] == np.float32(sample.loss_weight)
            assert batch.old_log_probs[row] == sample.old_log_probs[t]
            assert batch.correction_weights[row] == sample.correction_weights[t]
            row += 1
        first += sample.total_tokens
    assert row == len(batch.targets) and first == len(tokens)
    assert batch.sequences.cu_seqlens_q[-1] == first
    assert batch.reference_log_probs is None


def test_an_empty_micro_batch_is_one_untrained_dummy() -> None:
    batch = pack([], CPU)
    assert batch.response_lengths == [] and not batch.mask.any() and len(batch.targets) == 1


def test_a_sample_without_response_takes_no_rows() -> None:
    batch = pack([TrainingSample(np.array([1, 2, 3]), prompt_tokens=3)], CPU)
    assert batch.response_lengths == [0] and len(batch.targets) == 0


def test_a_sample_without_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 1 .* no prompt"):
        pack([*random_samples(1), TrainingSample(np.array([1, 2]), prompt_tokens=0)], CPU)


def test_values_of_a_wrong_length_are_refused() -> None:
    sample = TrainingSample(np.array([1, 2, 3]), prompt_tokens=1, old_log_probs=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="2 response tokens but 3 old_log_probs"):
        pack([sample], CPU)
