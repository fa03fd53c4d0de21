from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from dapo_megatron.megatron.attention import PADDING_BOUND, SDPACoreAttention, plan_blocks

HEADS, GROUPS, DIM = 6, 2, 4
lengths_strategy = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@settings(deadline=None)
@given(lengths_strategy)
def test_plan_gives_every_token_a_slot_of_its_own_in_order(lengths: list[int]) -> None:
    blocks = plan_blocks(lengths)
    slots = blocks.slots.tolist()
    assert len(slots) == sum(lengths) == len(set(slots))
    assert all(0 <= slot < blocks.total_slots for slot in slots)
    rows = [
        range(offset + row * length, offset + (row + 1) * length)
        for offset, (count, length) in zip(
            np.cumsum([0] + [count * length for count, length in blocks.shapes]), blocks.shapes, strict=False
        )
        for row in range(count)
    ]
    first = 0
    for length in lengths:
        # A sequence fills one row from its left end.
        start = slots[first]
        row = next(row for row in rows if start in row)
        assert start == row.start and length <= len(row)
        assert slots[first : first + length] == list(range(start, start + length))
        first += length
    assert blocks.total_slots <= PADDING_BOUND * sum(lengths)


@settings(deadline=None, max_examples=25)
@given(lengths_strategy, st.integers(0, 100))
def test_packed_attention_equals_each_sequence_alone(lengths: list[int], seed: int) -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=24, num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=DIM
    )
    attention = SDPACoreAttention(config, 1, AttnMaskType.causal, "self", attention_dropout=0.0)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(sum(lengths), heads, DIM, generator=generator, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    )
    upstream = torch.randn(sum(lengths), HEADS * DIM, generator=generator)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    output = attention(q, k, v, packed_seq_params=packed)

    expected = []
    for q_one, k_one, v_one in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        k_all, v_all = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k_one, v_one))
        scores = torch.einsum("ihd,jhd->hij", q_one, k_all) / DIM**0.5
        future = torch.ones(len(q_one), len(q_one), dtype=torch.bool).triu(1)
        p = scores.masked_fill(future, float("-inf")).softmax(-1)
        expected.append(torch.einsum("hij,jhd->ihd", p, v_all).flatten(1))
    torch.testing.assert_close(output, torch.cat(expected), rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(output, (q, k, v), upstream)
    want = torch.autograd.grad(torch.cat(expected), (q, k, v), upstream)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_dense_attention_is_causal() -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=24, num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=DIM
    )
    attention = SDPACoreAttention(config, 1, AttnMaskType.causal, "self", attention_dropout=0.0)
    q, k, v = (torch.randn(5, 2, heads, DIM) for heads in (HEADS, GROUPS, GROUPS))
    output = attention(q, k, v)
    expected = F.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(output, expected.permute(2, 0, 1, 3).reshape(5, 2, -1))
