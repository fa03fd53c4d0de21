"""Real megatron-core on a machine without CUDA.

Megatron-Core addresses its device literally: `device="cuda"`, `torch.cuda.current_device()`, CUDA streams and
RNG states. `install()` gives each of these its meaning on the CPU and touches nothing where CUDA is available.
It must run before the first import of `megatron.core`, because core binds some of these names when it is imported.
Every patch turns an error into the same computation on the CPU; none changes a result.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")

_FACTORIES = (
    "empty empty_like zeros zeros_like ones ones_like full full_like tensor as_tensor arange rand randn randint eye"
).split()
_NEW_METHODS = "new_empty new_zeros new_ones new_full new_tensor".split()
_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}

_installed = False


def install() -> None:
    """Make megatron-core run on the CPU; does nothing where CUDA is available or when called again.

    Raises:
        RuntimeError: megatron.core was imported before.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("cpu_runtime.install() must run before megatron.core is imported")
    _installed = True
    # Core warns at import that Transformer Engine and Apex are missing: without CUDA nobody can have them.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    # Core's collectives go by names that newer torch versions call deprecated.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.", category=FutureWarning)
    _redirect_tensor_creation()
    _redirect_cuda_namespace()
    _disable_jit()
    _track_cpu_rng()
    _satisfy_optimizer_type_checks()
    _route_experts_on_cpu()


def _is_cuda(device: object) -> bool:
    return (isinstance(device, torch.device) and device.type == "cuda") or (
        isinstance(device, str) and device.split(":")[0] == "cuda"
    )


def _on_cpu(function: Callable) -> Callable:
    """The same function with a CUDA `device` argument replaced and `pin_memory` dropped."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return wrapper


def _redirect_tensor_creation() -> None:
    """Core writes device="cuda" into factories; a TorchFunctionMode would not reach its other threads."""
    # A device context tells factories by identity, from a set that it fills at first use: it must know the originals.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in _NEW_METHODS:
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))

    original_to = torch.Tensor.to

    @functools.wraps(original_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original_to(self, *args, **kwargs)

    def keep(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    def keep_pinned(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    torch.Tensor.to = to  # type: ignore[assignment]
    torch.Tensor.cuda = keep  # type: ignore[method-assign]
    torch.Tensor.pin_memory = keep_pinned  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


class _Stream:
    """A stream whose work is done when it is submitted."""

    device = CPU
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _redirect_cuda_namespace() -> None:
    """Devices, streams, memory statistics, nvtx and RNG of torch.cuda, as core calls them."""
    cuda: Any = torch.cuda

    def constant(value: Any) -> Callable:
        # A new function object for every name: torch._dynamo refuses to load if two names share one.
        return lambda *args, **kwargs: value

    cuda.current_device = constant(CPU)
    for name in "set_device set_stream synchronize empty_cache reset_peak_memory_stats ipc_collect".split():
        setattr(cuda, name, constant(None))
    for name in "memory_allocated max_memory_allocated memory_reserved max_memory_reserved".split():
        setattr(cuda, name, constant(0))
    cuda.get_device_capability = constant((0, 0))
    stream = _Stream()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream, cuda.default_stream = constant(stream), constant(stream)
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    cuda.nvtx.range = lambda *args, **kwargs: contextlib.nullcontext()
    for name in "range_push range_pop mark".split():
        setattr(cuda.nvtx, name, constant(None))
    # The default CUDA generator becomes the default CPU generator.
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = cuda.random.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed)) and None


def _disable_jit() -> None:
    """Core decorates small functions with torch.compile, which costs a C++ compilation each on the CPU."""
    module = types.ModuleType("megatron.core.jit")
    module.noop_decorator = module.jit_fuser = lambda function: function  # type: ignore[attr-defined]
    module.enable_jit_fuser = module.disable_jit_fuser = lambda: None  # type: ignore[attr-defined]
    sys.modules["megatron.core.jit"] = module


def _track_cpu_rng() -> None:
    """Tensor-parallel ranks must share the default RNG and fork from it; core keeps CUDA states only."""
    from megatron.core.tensor_parallel import random as core_random

    core_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    core_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)

    class CPURNGStatesTracker(core_random.CudaRNGStatesTracker):
        @contextlib.contextmanager
        def fork(self, name: str = core_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            # Core warns at each fork that the CPU state changed; here that is what a fork does.
            logger = logging.getLogger(core_random.__name__)
            level = logger.level
            with super().fork(name):
                yield
                logger.setLevel(logging.ERROR)
            logger.setLevel(level)

    core_random.CudaRNGStatesTracker = CPURNGStatesTracker
    if not hasattr(core_random, "FP8GlobalStateManager"):
        # CheckpointWithoutOutput takes its FP8 branch even with fp8=False, and needs names of Transformer Engine.
        core_random.FP8GlobalStateManager = types.SimpleNamespace(
            is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None
        )
        core_random.activation_recompute_forward = lambda *args, **kwargs: contextlib.nullcontext()
        core_random.fp8_autocast = lambda *args, **kwargs: contextlib.nullcontext()


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and self.dtype in _CUDA_TYPE_NAMES:
            return _CUDA_TYPE_NAMES[self.dtype]
        return original(self, *args, **kwargs)

    torch.Tensor.type = type_name  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


def _with_cuda_type_names(function: Callable) -> Callable:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _cuda_type_names():
            return function(*args, **kwargs)

    return wrapper


def _satisfy_optimizer_type_checks() -> None:
    """The optimizers and gradient clipping compare `tensor.type()` with "torch.cuda.FloatTensor"."""
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    distributed = distrib_optimizer.DistributedOptimizer
    distributed.__init__ = _with_cuda_type_names(distributed.__init__)
    mixed_precision = optimizer.Float16OptimizerWithFloat16Params
    mixed_precision.__init__ = _with_cuda_type_names(mixed_precision.__init__)
    clip_grads.clip_grad_by_total_norm_fp32 = _with_cuda_type_names(clip_grads.clip_grad_by_total_norm_fp32)
    optimizer.clip_grad_by_total_norm_fp32 = clip_grads.clip_grad_by_total_norm_fp32


def _route_experts_on_cpu() -> None:
    """Split sizes become numpy arrays on their way from the device, and the router knows that there is no TE GEMM."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    original = moe_utils.maybe_move_tensor_to_cpu

    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return original(tensor, as_numpy, record_stream)

    moe_utils.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
