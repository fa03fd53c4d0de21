"""Core attention through torch's scaled_dot_product_attention, for packed sequences (thd) without Transformer Engine.

The packed tokens of a micro-batch are copied into a few rectangular blocks of sequences of similar length, one SDPA
call each. Padding stands on the right, so that under the causal mask no real token ever sees it.

With context parallelism a sequence of 2 x CP chunks is dealt out zig-zag: rank r holds chunks r and 2 x CP - 1 - r, so
that all ranks have the same work under the causal mask. Keys and values are gathered; queries stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
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


@dataclass(frozen=True)
class ContextPart:
    """This rank's part of packed sequences under context parallelism.

    Attributes:
        blocks: of the local parts; block i holds the same sequences as block i of the whole sequences, unpadded.
        order: int64 [T], the packed place of each token when the ranks' parts lie one behind the other.
    """

    blocks: Blocks
    order: Tensor


@dataclass
class BlockedSeqParams(PackedSeqParams):
    """Megatron's description of packed sequences, with the block plan that all layers of a micro-batch share.

    Attributes:
        blocks: of the whole sequences.
        context: with context parallelism, this rank's part of them.
    """

    blocks: Blocks | None = field(default=None)
    context: ContextPart | None = field(default=None)


def zigzag(lengths: Sequence[int], rank: int, ranks: int) -> np.ndarray:
    """Packed places of the tokens that a context-parallel rank holds, in the order in which it holds them.

    Args:
        lengths: tokens of each packed sequence, multiples of 2 x ranks.
    """
    places = []
    start = 0
    for length in lengths:
        chunks = np.arange(start, start + length).reshape(2 * ranks, -1)
        places += [chunks[rank], chunks[2 * ranks - 1 - rank]]
        start += length
    return np.concatenate(places)


def plan_context(lengths: Sequence[int], ranks: int, device: torch.device | None = None) -> tuple[Blocks, ContextPart]:
    """The blocks of whole sequences and of one rank's part, with only sequences of equal length in a block."""
    order = np.concatenate([zigzag(lengths, rank, ranks) for rank in range(ranks)])
    local = plan_blocks([length // ranks for length in lengths], device, padding_bound=1.0)
    return plan_blocks(lengths, device, padding_bound=1.0), ContextPart(local, torch.from_numpy(order).to(device))


def plan_blocks(
    lengths: Sequence[int], device: torch.device | None = None, padding_bound: float = PADDING_BOUND
) -> Blocks:
    """Sequences sorted by length, cut into blocks such that a block holds at most padding_bound times its tokens."""
    blocks: list[list[int]] = []
    tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens += lengths[i]
        if blocks and (len(blocks[-1]) + 1) * lengths[blocks[-1][0]] <= padding_bound * tokens:
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


class _GatherContext(torch.autograd.Function):
    """[T / CP, ...] of each rank -> [T, ...] in packed order. The gradient of a part is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(order)
        ctx.group = group
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        gathered = torch.cat(parts)
        return torch.empty_like(gathered).index_copy_(0, order, gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        gathered = gradient.index_select(0, order)
        dist.all_reduce(gathered, group=ctx.group)
        return gathered.chunk(ctx.group.size())[ctx.group.rank()], None, None


class SDPACoreAttention(MegatronModule):
    """Causal attention of packed or dense sequences, with grouped keys and values.

    Args:
        config: heads, groups, kv_channels, dropout.
        attn_mask_type: must be causal.
        pg_collection: its `cp` shares packed sequences.

    Raises:
        ValueError: a mask that is not causal.
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
        self.context_group = pg_collection.cp if config.context_parallel_size > 1 else None
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
            assert self.context_group is None, "context parallelism needs packed sequences"
            dense = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return dense.permute(2, 0, 1, 3).flatten(2)
        if self.context_group is not None:
            assert isinstance(packed_seq_params, BlockedSeqParams), packed_seq_params
            return self._attend_in_context(query, key, value, packed_seq_params)
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

    def _attend_in_context(self, query: Tensor, key: Tensor, value: Tensor, sequences: BlockedSeqParams) -> Tensor:
        """This rank's queries against the gathered keys and values: its two chunks of each sequence, one after one."""
        group, context, whole = self.context_group, sequences.context, sequences.blocks
        assert group is not None and context is not None and whole is not None
        key, value = (
            _Pad.apply(_GatherContext.apply(x, context.order, group), whole.slots, whole.total_slots)
            for x in (key, value)
        )
        query = _Pad.apply(query, context.blocks.slots, context.blocks.total_slots)
        outputs = []
        local_offset = offset = 0
        for (count, local_length), (_, length) in zip(context.blocks.shapes, whole.shapes, strict=True):
            q = query[local_offset : local_offset + count * local_length].unflatten(0, (count, local_length))
            k, v = (x[offset : offset + count * length].unflatten(0, (count, length)) for x in (key, value))
            chunk = local_length // 2
            ends = [(group.rank() + 1) * chunk, (2 * group.size() - group.rank()) * chunk]
            parts = [
                self._attend(part.transpose(1, 2), k[:, :end].transpose(1, 2), v[:, :end].transpose(1, 2))
                for part, end in zip(q.split(chunk, 1), ends, strict=True)
            ]
            outputs.append(torch.cat(parts, 2).transpose(1, 2).flatten(0, 1))
            local_offset += count * local_length
            offset += count * length
        return _Unpad.apply(torch.cat(outputs), context.blocks.slots).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[b, heads, s, d], [b, groups, t, d] twice, t >= s -> [b, heads, s, d]; the last query sees all keys."""
        queries, keys = q.shape[2], k.shape[2]
        earlier = keys - queries
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(earlier) if earlier else None
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None and queries > 1,
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
