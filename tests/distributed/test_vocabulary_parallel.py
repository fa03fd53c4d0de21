"""The output weight shared by rows among ranks: log-probs, losses and gradients of one rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.distributed.ranks import run_ranks

ROWS_A_RANK, HIDDEN, TOKENS = 5, 6, 4
VOCABULARIES = (10, 8, 5, 3)
"""Real tokens of ten rows: the second rank has five, three or no columns; with 3 the first has padding, too."""


def compute(vocab_size: int, ranks: int, rank: int, group: object, reduce_hidden_grad: bool) -> dict[str, np.ndarray]:
    from dapo_megatron.megatron.logprob import response_log_probs, response_loss

    generator = torch.Generator().manual_seed(vocab_size)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, requires_grad=True)
    whole = torch.randn(2 * ROWS_A_RANK, HIDDEN, generator=generator)
    targets = torch.randint(0, vocab_size, (TOKENS,), generator=generator)
    upstream = torch.randn(TOKENS, generator=generator)
    weight = whole.chunk(ranks)[rank].clone().requires_grad_()
    tokens = (hidden, torch.arange(TOKENS), weight, targets, 0.8, vocab_size)
    log_probs, entropy = response_log_probs(*tokens, group, reduce_hidden_grad=reduce_hidden_grad)
    behind = torch.autograd.grad((upstream * log_probs + 0.1 * entropy).sum(), (hidden, weight))
    loss, _, _ = response_loss(
        *tokens,
        lambda log_probs, entropy, rows: (upstream[rows] * log_probs + 0.1 * entropy).sum(),
        group,
        reduce_hidden_grad=reduce_hidden_grad,
    )
    inside = torch.autograd.grad(loss, (hidden, weight))
    found = {"log_probs": log_probs, "entropy": entropy, "loss": loss}
    found |= {"hidden": behind[0], "weight": behind[1], "hidden inside": inside[0], "weight inside": inside[1]}
    return {name: tensor.detach().numpy() for name, tensor in found.items()}


def on_ranks(rank: int, world_size: int, port: int) -> list[list[dict[str, np.ndarray]]]:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    return [
        [compute(vocab_size, world_size, rank, dist.group.WORLD, reduce) for reduce in (True, False)]
        for vocab_size in VOCABULARIES
    ]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[dict[str, np.ndarray]]]]:
    return run_ranks(on_ranks, 2, tmp_path_factory.mktemp("logprob"))


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_two_ranks_equal_one(vocab_size: int, ranks: list[list[list[dict[str, np.ndarray]]]]) -> None:
    one = compute(vocab_size, 1, 0, None, True)
    case = VOCABULARIES.index(vocab_size)
    summed, parts = ([rank[case][i] for rank in ranks] for i in (0, 1))
    for name in ("log_probs", "entropy", "loss", "hidden", "hidden inside"):
        for rank in summed:
            np.testing.assert_allclose(rank[name], one[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for name in ("weight", "weight inside"):
        whole = np.concatenate([rank[name] for rank in summed])
        np.testing.assert_allclose(whole, one[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for name in ("hidden", "hidden inside"):  # left to the caller to sum
        np.testing.assert_allclose(parts[0][name] + parts[1][name], one[name], rtol=1e-5, atol=1e-6, err_msg=name)
