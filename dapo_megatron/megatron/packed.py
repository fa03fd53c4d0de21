"""The samples of a micro-batch as packed tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dapo_megatron.data.types import TrainingSample
from dapo_megatron.megatron.attention import BlockedSeqParams, plan_blocks


@dataclass(frozen=True)
class PackedBatch:
    """Whole sequences one behind the other. T: all tokens; R: response tokens of all samples.

    Attributes:
        tokens: int64 [1, T].
        position_ids: int64 [1, T], from 0 in every sequence.
        sequences: Megatron's description of the packing (thd).
        response_positions: int64 [R], where the hidden state stands that predicts each response token.
        targets: int64 [R], the response tokens.
        response_lengths: response tokens of each sample.
        mask: bool [R], true where the token is trained.
        advantages: float32 [R].
        loss_weights: float32 [R].
        old_log_probs: float32 [R]; zeros for samples that have none.
        reference_log_probs: float32 [R], or None if no sample has any.
        correction_weights: float32 [R], or None if no sample has any.
    """

    tokens: Tensor
    position_ids: Tensor
    sequences: BlockedSeqParams
    response_positions: Tensor
    targets: Tensor
    response_lengths: list[int]
    mask: Tensor
    advantages: Tensor
    loss_weights: Tensor
    old_log_probs: Tensor
    reference_log_probs: Tensor | None
    correction_weights: Tensor | None


def pack(samples: Sequence[TrainingSample], device: torch.device) -> PackedBatch:
    """Pack a micro-batch. An empty one becomes a single untrained dummy sample, so that its rank keeps step with the
    others' collectives; its `response_lengths` is empty.

    Raises:
        ValueError: a sample without prompt (nothing predicts its first token), or per-token values of a wrong length.
    """
    lengths = [sample.response_tokens for sample in samples]
    if not samples:
        dummy = TrainingSample(np.zeros(2, np.int64), prompt_tokens=1, trained=False)
        dummy.reference_log_probs = np.zeros(1, np.float32)
        samples = [dummy]
    counts = np.array([sample.total_tokens for sample in samples])
    responses = np.array([sample.response_tokens for sample in samples])
    prompts = counts - responses
    if prompts.min() < 1:
        raise ValueError(f"sample {int(prompts.argmin())} of the micro-batch has no prompt token")
    ends = counts.cumsum()
    starts = ends - counts

    tokens = np.concatenate([sample.token_ids for sample in samples])
    positions = np.arange(ends[-1])
    predicted = np.concatenate([positions[s + p : e] for s, p, e in zip(starts, prompts, ends, strict=True)])

    def to_device(values: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

    def per_sample(values: Sequence[float | bool], dtype: torch.dtype) -> Tensor:
        return to_device(np.repeat(np.array(values), responses), dtype)

    def per_token(name: str, default: float) -> Tensor | None:
        given = [getattr(sample, name) for sample in samples]
        if all(values is None for values in given):
            return None
        for i, (values, length) in enumerate(zip(given, responses, strict=True)):
            if values is not None and len(values) != length:
                raise ValueError(f"sample {i} has {length} response tokens but {len(values)} {name}")
        filled = [
            np.full(length, default) if values is None else values
            for values, length in zip(given, responses, strict=True)
        ]
        return to_device(np.concatenate(filled), torch.float32)

    cu_seqlens = to_device(np.concatenate([[0], ends]), torch.int32)
    longest = int(counts.max())
    blocks = plan_blocks(counts.tolist(), device)
    old_log_probs = per_token("old_log_probs", 0.0)
    return PackedBatch(
        tokens=to_device(tokens, torch.int64)[None],
        position_ids=to_device(positions - np.repeat(starts, counts), torch.int64)[None],
        sequences=BlockedSeqParams("thd", cu_seqlens, cu_seqlens, None, None, longest, longest, blocks=blocks),
        response_positions=to_device(predicted - 1, torch.int64),
        targets=to_device(tokens[predicted], torch.int64),
        response_lengths=lengths,
        mask=per_sample([sample.trained for sample in samples], torch.bool),
        advantages=per_sample([sample.advantage for sample in samples], torch.float32),
        loss_weights=per_sample([sample.loss_weight for sample in samples], torch.float32),
        old_log_probs=torch.zeros(len(predicted), device=device) if old_log_probs is None else old_log_probs,
        reference_log_probs=per_token("reference_log_probs", 0.0),
        correction_weights=per_token("correction_weights", 1.0),
    )
