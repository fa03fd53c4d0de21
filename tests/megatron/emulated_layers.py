"""Emulating layers on their own, as a rank of any tensor-parallel size runs them."""

from __future__ import annotations

import numpy as np
import torch

from dapo_megatron.config.schema import FP8Config, ParallelConfig

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
TOKENS, INPUTS, OUTPUTS = 64, 512, 256
"""Halves of the sizes are whole blocks of every recipe."""

Outcome = tuple[list[np.ndarray], tuple[int | None, ...]]
"""y, dx, dw of two micro-batches; the dimensions in which they are this rank's part."""


def run(rank: int, world_size: int, port: int) -> dict[str, Outcome]:
    """Every recipe, column and row, with and without sequence parallelism."""
    import dapo_megatron.megatron  # noqa: F401
    from dapo_megatron.megatron.actor import initialize_parallel

    initialize_parallel(ParallelConfig(tensor=world_size), rank, world_size, f"tcp://127.0.0.1:{port}")
    return {
        f"{recipe} {kind} {sequence_parallel}": _run_layer(recipe, kind, sequence_parallel, rank, world_size)
        for recipe in RECIPES
        for kind in ("column", "row")
        for sequence_parallel in (False, True)
    }


def _run_layer(recipe: str, kind: str, sequence_parallel: bool, rank: int, ranks: int) -> Outcome:
    from megatron.core.transformer import TransformerConfig

    from dapo_megatron.megatron.fp8_emulation import emulating_layers

    column, row = emulating_layers(FP8Config(recipe=recipe, emulate=True))
    settings = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=ranks,
        sequence_parallel=sequence_parallel and ranks > 1,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    options = {"config": settings, "init_method": torch.nn.init.zeros_, "bias": True, "skip_bias_add": False}
    tokens = 0 if sequence_parallel else None
    dims: tuple[int | None, int | None, int]
    if kind == "column":
        layer = column(INPUTS, OUTPUTS, gather_output=False, **options)
        dims = (2, tokens, 0)
    else:
        layer = row(INPUTS, OUTPUTS, input_is_parallel=True, **options)
        dims = (tokens, 2, 1)
    output_dim, input_dim, weight_dim = dims

    def part(whole: torch.Tensor, dim: int | None) -> torch.Tensor:
        return whole if dim is None else whole.chunk(ranks, dim)[rank].clone()

    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        layer.weight.copy_(part(torch.randn(OUTPUTS, INPUTS, generator=random), weight_dim))
        layer.bias.copy_(part(torch.randn(OUTPUTS, generator=random), 0 if kind == "column" else None))
    found = []
    for size in (1.0, 3.0):
        x = part(size * torch.randn(TOKENS, 1, INPUTS, generator=random), input_dim).requires_grad_()
        layer.weight.grad = None
        y, _ = layer(x)
        y.backward(part(torch.randn(TOKENS, 1, OUTPUTS, generator=random), output_dim))
        found += [y.detach().numpy(), x.grad.numpy(), layer.weight.grad.numpy()]
    return found, dims
