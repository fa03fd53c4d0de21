"""The samples of a micro-batch as packed tensors.

Padding is what the alignment demands and no more: trailing tokens of a sequence, which no real token sees under the
causal mask, and one dummy sequence at the end. No padding token predicts a response, so that none is in any sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dapo_megatron.data.packing import Alignment
from dapo_megatron.data.types import TrainingSample
from dapo_megatron.megatron.attention import BlockedSeqParams, plan_blocks, plan_context, zigzag


@dataclass(frozen=True)
class PackedBatch:
    """Whole sequences one behind the other. T: tokens that this rank holds; R: response tokens that they predict.

    Without context parallelism these are all tokens and all response tokens of the samples.

    Attributes:
        tokens: int64 [1, T].
        position_ids: int64 [1, T], from 0 in every sequence.
        padding: bool [1, T], true at padding.
        sequences: Megatron's description of the packing (thd).
        response_positions: int64 [R], where the hidden state stands that predicts each response token.
        targets: int64 [R], the response tokens.
        response_lengths: response tokens of each sample.
        response_places: int64 [R], place of each response token among those of all samples.
        mask: bool [R], true where the token is trained.
        advantages: float32 [R].
        loss_weights: float32 [R].
        old_log_probs: float32 [R]; zeros for samples that have none.
        reference_log_probs: float32 [R], or None if no sample has any.
        correction_weights: float32 [R], or None if no sample has any.
    """

    tokens: Tensor
    position_ids: Tensor
    padding: Tensor
    sequences: BlockedSeqParams
    response_positions: Tensor
    targets: Tensor
    response_lengths: list[int]
    response_places: Tensor
    mask: Tensor
    advantages: Tensor
    loss_weights: Tensor
    old_log_probs: Tensor
    reference_log_probs: Tensor | None
    correction_weights: Tensor | None


@dataclass(frozen=True)
class ContextPlace:
    """Where a rank stands among those that share every sequence (context parallelism)."""

    rank: int = 0
    ranks: int = 1


def pack(
    samples: Sequence[TrainingSample],
    device: torch.device,
    alignment: Alignment | None = None,
    place: ContextPlace | None = None,
) -> PackedBatch:
    """Pack a micro-batch. An empty one becomes a single untrained dummy sample, so that its rank keeps step with the
    others' collectives; its `response_lengths` is empty.

    Args:
        alignment: multiples of the token counts; none by default.
        place: which part of every sequence to hold; the whole by default.

    Raises:
        ValueError: a sample without prompt (nothing predicts its first token), or per-token values of a wrong length.
    """
    alignment, place = alignment or Alignment(), place or ContextPlace()
    response_lengths = [sample.response_tokens for sample in samples]
    if not samples:
        dummy = TrainingSample(np.zeros(2, np.int64), prompt_tokens=1, trained=False)
        dummy.reference_log_probs = np.zeros(1, np.float32)
        samples = [dummy]
    counts = np.array([sample.total_tokens for sample in samples])
    responses = np.array([sample.response_tokens for sample in samples])
    prompts = counts - responses
    if prompts.min() < 1:
        raise ValueError(f"sample {int(prompts.argmin())} of the micro-batch has no prompt token")
    lengths = -(-counts // alignment.sequence) * alignment.sequence
    if dummy_tokens := int(-lengths.sum() % alignment.micro_batch):
        lengths = np.append(lengths, dummy_tokens)
    ends = lengths.cumsum()
    starts = ends - lengths

    tokens = np.zeros(ends[-1], np.int64)
    padding = np.ones(ends[-1], bool)
    for sample, start in zip(samples, starts, strict=False):
        tokens[start : start + sample.total_tokens] = sample.token_ids
        padding[start : start + sample.total_tokens] = False
    positions = np.arange(ends[-1]) - np.repeat(starts, lengths)
    predicted = np.concatenate(
        [np.arange(s + p, s + c) for s, p, c in zip(starts, prompts, counts, strict=False)], dtype=np.int64
    )

    held = zigzag(lengths.tolist(), place.rank, place.ranks) if place.ranks > 1 else np.arange(ends[-1])
    local = np.full(ends[-1], -1)
    local[held] = np.arange(len(held))
    response_positions = local[predicted - 1]
    places = np.flatnonzero(response_positions >= 0)

    def to_device(values: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

    def per_sample(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return to_device(np.repeat(np.array(values), responses)[places], dtype)

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
        return to_device(np.concatenate(filled)[places], torch.float32)

    if place.ranks > 1:
        blocks, context = plan_context(lengths.tolist(), place.ranks, device)
    else:
        blocks, context = plan_blocks(lengths.tolist(), device), None
    cu_seqlens = to_device(np.concatenate([[0], ends]), torch.int32)
    longest = int(lengths.max())
    old_log_probs = per_token("old_log_probs", 0.0)
    return PackedBatch(
        tokens=to_device(tokens[held], torch.int64)[None],
        position_ids=to_device(positions[held], torch.int64)[None],
        padding=to_device(padding[held], torch.bool)[None],
        sequences=BlockedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            # Transformer Engine deals out these; padding is part of the sequences here.
            cu_seqlens_q_padded=cu_seqlens if context else None,
            cu_seqlens_kv_padded=cu_seqlens if context else None,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            blocks=blocks,
            context=context,
        ),
        response_positions=to_device(response_positions[places], torch.int64),
        targets=to_device(tokens[predicted[places]], torch.int64),
        response_lengths=response_lengths,
        response_places=to_device(places, torch.int64),
        mask=per_sample([sample.trained for sample in samples], torch.bool),
        advantages=per_sample([sample.advantage for sample in samples], torch.float32),
        loss_weights=per_sample([sample.loss_weight for sample in samples], torch.float32),
        old_log_probs=torch.zeros(len(places), device=device) if old_log_probs is None else old_log_probs,
        reference_log_probs=per_token("reference_log_probs", 0.0),
        correction_weights=per_token("correction_weights", 1.0),
    )
