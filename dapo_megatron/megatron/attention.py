"""Core attention through torch's scaled_dot_product_attention, for packed sequences (thd) without Transformer Engine.

The packed tokens of a micro-batch are copied into a few rectangular blocks of sequences of similar length, one SDPA
call each. Padding stands on the right, so that under the causal mask no real token ever sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

PADDING_BOUND = 1.1
"""A block may hold this many times its real tokens."""


@dataclass(frozen=True)
class Blocks:
    """Where packed tokens go in the padded blocks.

    Attributes:
        shapes: (sequences, padded length) of each block; blocks lie one behind the other.
        slots: int64 [T], the place of each packed token in the concatenated blocks.
    """

    shapes: tuple[tuple[int, int], ...]
    slots: Tensor

    @property
    def total_slots(self) -> int:
        """Tokens of all blocks, padding included."""
        return sum(sequences * length for sequences, length in self.shapes)


@dataclass
class BlockedSeqParams(PackedSeqParams):
    """Megatron's description of packed sequences, with the block plan that all layers of a micro-batch share."""

    blocks: Blocks | None = field(default=None)


def plan_blocks(lengths: Sequence[int], device: torch.device | None = None) -> Blocks:
    """Sequences sorted by length, cut into blocks such that a block holds at most PADDING_BOUND times its tokens."""
    blocks: list[list[int]] = []
    tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens += lengths[i]
        if blocks and (len(blocks[-1]) + 1) * lengths[blocks[-1][0]] <= PADDING_BOUND * tokens:
            blocks[-1].append(i)
        else:
            blocks.append([i])
            tokens = lengths[i]
    shapes = tuple((len(block), lengths[block[0]]) for block in blocks)
    starts = np.zeros(len(lengths), np.int64)
    starts[np.concatenate(blocks)] = np.cumsum([0] + [length for count, length in shapes for _ in range(count)])[:-1]
    # Token t of sequence s goes to starts[s] + (t - first packed token of s).
    ends = np.cumsum(lengths)
    slots = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    return Blocks(shapes, torch.from_numpy(slots).to(device))


class _Pad(torch.autograd.Function):
    """[T, ...] -> [slots, ...], zeros at padding. Slots are distinct, so that both directions are plain copies."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, slots: Tensor, total_slots: int) -> Tensor:
        ctx.save_for_backward(slots)
        return packed.new_zeros(total_slots, *packed.shape[1:]).index_copy_(0, slots, packed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (slots,) = ctx.saved_tensors
        return gradient.index_select(0, slots), None, None


class _Unpad(torch.autograd.Function):
    """The inverse of _Pad."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.total_slots = padded.shape[0]
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (slots,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.total_slots, *gradient.shape[1:]).index_copy_(0, slots, gradient), None


class SDPACoreAttention(MegatronModule):
    """Causal attention of packed or dense sequences, with grouped keys and values.

    Args:
        config: heads, groups, kv_channels, dropout.
        attn_mask_type: must be causal.

    Raises:
        ValueError: context parallelism, or a mask that is not causal.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(f"SDPACoreAttention is causal, got {attn_mask_type}")
        if config.context_parallel_size > 1:
            raise ValueError(f"SDPACoreAttention has no context parallelism, got {config.context_parallel_size}")
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """Attention of [T, heads, d] packed (-> [T, heads * d]) or [s, b, heads, d] dense (-> [s, b, heads * d])."""
        if packed_seq_params is None:
            dense = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return dense.permute(2, 0, 1, 3).flatten(2)
        blocks = self._blocks(packed_seq_params)
        padded = [_Pad.apply(x, blocks.slots, blocks.total_slots) for x in (query, key, value)]
        outputs = []
        offset = 0
        for sequences, length in blocks.shapes:
            rows = slice(offset, offset + sequences * length)
            q, k, v = (x[rows].unflatten(0, (sequences, length)).transpose(1, 2) for x in padded)
            outputs.append(self._attend(q, k, v).transpose(1, 2).flatten(0, 1))
            offset += sequences * length
        return _Unpad.apply(torch.cat(outputs) if len(outputs) > 1 else outputs[0], blocks.slots).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[b, heads, s, d], [b, groups, s, d] twice -> [b, heads, s, d]."""
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=q.shape[2] > 1,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=q.shape[1] != k.shape[1],
        )

    @staticmethod
    def _blocks(packed_seq_params: PackedSeqParams) -> Blocks:
        if isinstance(packed_seq_params, BlockedSeqParams) and packed_seq_params.blocks is not None:
            return packed_seq_params.blocks
        cu_seqlens = packed_seq_params.cu_seqlens_q
        return plan_blocks(cu_seqlens.diff().tolist(), cu_seqlens.device)
