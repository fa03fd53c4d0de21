"""FP8 numerics without FP8 hardware: linear layers that round their operands and multiply in float32.

Every product has both operands rounded with the recipe's scales, along the dimension that it sums over:
forward y = Q(x) Q(w)^T, input gradient dx = Q(dy) Q(w), weight gradient dw = Q(dy)^T Q(x). So the result is what FP8
tensor cores give but for the order of their float32 sums. Biases and sums stay in the model's dtype.

Scales are Transformer Engine's (`compute_scale_from_amax`: largest FP8 value / largest magnitude, 1 for zeros), with
three differences. A value that is not finite makes everything that shares its scale NaN instead of saturating, so that
the update is skipped. Scales of whole tensors are taken over all tensor-parallel ranks, so that one rank gets the same
(blocks are a rank's own: TP changes nothing where it cuts between blocks). The history of `delayed` is shared by
these ranks and by no others.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from dapo_megatron.config.schema import FP8Config

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

BLOCK = 128
MX_BLOCK = 32


@dataclass(frozen=True)
class Scaling:
    """How a recipe rounds one kind of operand.

    Attributes:
        fp8: the FP8 dtype.
        block: extent of what shares a scale along the two dimensions [other, summed]; None for the whole tensor.
        power_of_two: scales are powers of two (mxfp8: E8M0).
    """

    fp8: torch.dtype
    block: tuple[int, int] | None
    power_of_two: bool = False


def scaling(fp8: FP8Config, operand: str) -> Scaling:
    """Of `input`, `weight` or `gradient`."""
    dtype = E5M2 if operand == "gradient" and fp8.format == "hybrid" else E4M3
    if fp8.recipe == "blockwise":
        return Scaling(dtype, (BLOCK, BLOCK) if operand == "weight" else (1, BLOCK), fp8.power_of_two_scales)
    if fp8.recipe == "mxfp8":
        return Scaling(dtype, (1, MX_BLOCK), power_of_two=True)
    return Scaling(dtype, None)


def quantise(x: Tensor, how: Scaling, amax: Tensor | None = None) -> Tensor:
    """Round to FP8 and back.

    Args:
        x: [m, k]; k is the dimension that the product sums over.
        amax: largest magnitude to scale by, for a whole tensor; of `x` itself if None.

    Returns:
        float32 [m, k].
    """
    if how.block is None:
        return _round(x, x.abs().amax() if amax is None else amax, how)
    rows, columns = how.block
    m, k = x.shape
    padded = torch.nn.functional.pad(x, (0, -k % columns, 0, -m % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    rounded = _round(blocks, blocks.abs().amax((1, 3), keepdim=True), how)
    return rounded.flatten(2, 3).flatten(0, 1)[:m, :k]


def _round(x: Tensor, amax: Tensor, how: Scaling) -> Tensor:
    largest, amax = torch.finfo(how.fp8).max, amax.float()
    # A number over a tensor would be rounded twice: torch takes the reciprocal first.
    scale = torch.where(amax > 0, amax.new_tensor(largest) / amax, 1.0).clamp(max=torch.finfo(torch.float32).max)
    if how.power_of_two:
        # The exponent alone: rounded down, so that nothing overflows.
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    # A magnitude from history may be exceeded: such values saturate.
    return (x.float() * scale).clamp(-largest, largest).to(how.fp8).float() / scale


class Quantiser:
    """Rounds the operands of one layer; holds the history of `delayed`.

    The history moves on once a micro-batch of training and never without gradients, so that log-probs and recomputed
    activations see the scales of the pass they belong to. An empty history stands for the tensor itself.
    """

    def __init__(self, fp8: FP8Config, group: dist.ProcessGroup | None) -> None:
        self._fp8 = fp8
        self._group = group if group is not None and group.size() > 1 else None
        self._scaling = {operand: scaling(fp8, operand) for operand in ("input", "weight", "gradient")}
        self._history: dict[str, deque[float]] = {
            operand: deque(maxlen=fp8.amax_history_len) for operand in self._scaling
        }

    def amax(self, x: Tensor, operand: str, *, training: bool) -> Tensor | None:
        """What to scale a tensor by, in all of its products; None if its blocks have their own.

        Args:
            training: whether the history moves on.
        """
        if self._scaling[operand].block is not None:
            return None
        amax = x.abs().amax().float() if x.numel() else torch.zeros((), device=x.device)
        if self._group is not None:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self._group)
        return self._delayed(amax, operand, training) if self._fp8.recipe == "delayed" else amax

    def _delayed(self, amax: Tensor, operand: str, training: bool) -> Tensor:
        history, now = self._history[operand], float(amax)
        past = list(history) or [now]
        if training and math.isfinite(now):
            history.append(now)
        chosen = past[-1] if self._fp8.amax_compute_algo == "most_recent" else max(past)
        return amax.new_tensor(chosen * 2.0**self._fp8.margin)

    def __call__(self, x: Tensor, operand: str, amax: Tensor | None) -> Tensor:
        """Round [m, k] for a product that sums over k."""
        return quantise(x, self._scaling[operand], amax)


class _QuantisedProduct(torch.autograd.Function):
    """x [..., k], w [n, k] -> x w^T [..., n], with every operand rounded.

    What is rounded along both of its dimensions is rounded twice from the same values, never from rounded ones.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, quantiser: Quantiser, training: bool) -> Tensor:
        flat = x.flatten(0, -2)
        input_amax = quantiser.amax(flat, "input", training=training)
        weight_amax = quantiser.amax(weight, "weight", training=training)
        ctx.save_for_backward(x, weight, input_amax, weight_amax)
        ctx.quantiser = quantiser
        product = quantiser(flat, "input", input_amax) @ quantiser(weight, "weight", weight_amax).T
        return product.to(x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        x, weight, input_amax, weight_amax = ctx.saved_tensors
        quantiser, dy = ctx.quantiser, gradient.flatten(0, -2)
        amax = quantiser.amax(dy, "gradient", training=True)
        dx = quantiser(dy, "gradient", amax) @ quantiser(weight.T, "weight", weight_amax).T
        dw = quantiser(dy.T, "gradient", amax) @ quantiser(x.flatten(0, -2).T, "input", input_amax).T
        return dx.to(x.dtype).unflatten(0, x.shape[:-1]), dw.to(weight.dtype), None, None


class _Emulated:
    """Takes the place of core's product in a parallel linear layer; everything around it stays core's."""

    fp8: FP8Config
    tp_group: Any
    _quantiser: Quantiser | None = None

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        **_: Any,
    ) -> Tensor:
        if self._quantiser is None:
            self._quantiser = Quantiser(self.fp8, self.tp_group)
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=self.tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=self.tp_group)
        product = _QuantisedProduct.apply(input, weight, self._quantiser, torch.is_grad_enabled())
        return product if bias is None else product + bias


def emulating_layers(fp8: FP8Config) -> tuple[type[ColumnParallelLinear], type[RowParallelLinear]]:
    """Core's parallel linear layers with the products of a recipe; everything else, bias and collectives, is core's."""
    return (
        type("EmulatedColumnParallelLinear", (_Emulated, ColumnParallelLinear), {"fp8": fp8}),
        type("EmulatedRowParallelLinear", (_Emulated, RowParallelLinear), {"fp8": fp8}),
    )


def emulate_fp8(block: TransformerBlockSubmodules, fp8: FP8Config, first_layer: int, layers: int) -> None:
    """Put emulating layers into the local layer specs of a model chunk, but for the model's first and last layers.

    Args:
        block: the specs, one a layer.
        first_layer: number of the chunk's first layer in the model, from 0.
        layers: layers of the whole model.
    """
    column, row = emulating_layers(fp8)
    for number, layer in enumerate(block.layer_specs, start=first_layer):
        if not fp8.first_layers_bf16 <= number < layers - fp8.last_layers_bf16:
            continue
        attention = layer.submodules.self_attention.submodules
        attention.linear_qkv, attention.linear_proj = column, row
        products = linear_submodules(layer.submodules.mlp)
        products.linear_fc1, products.linear_fc2 = column, row


def linear_submodules(mlp: Any) -> Any:
    """Where the spec of an MLP, or of a layer's experts, names its linear layers.

    Core 0.16 writes a part as a ModuleSpec, 0.19 as a functools.partial.
    """
    submodules = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
    experts = getattr(submodules, "experts", None)
    return submodules if experts is None else linear_submodules(experts)
