from __future__ import annotations

import pytest
import torch

from dapo_megatron.megatron import cpu_runtime

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is installed where CUDA is available")


def test_a_literal_cuda_device_means_the_cpu() -> None:
    tensors = [
        torch.zeros(2, device="cuda"),
        torch.tensor([1], device=torch.cuda.current_device()),
        torch.empty(1).new_empty(3, device="cuda:0"),
        torch.ones(2).to("cuda"),
        torch.ones(2).to(device=torch.device("cuda")),
        torch.ones(2, pin_memory=True).cuda(),
    ]
    assert all(tensor.device.type == "cpu" for tensor in tensors)
    assert torch.zeros(2, dtype=torch.float64, device="cpu").dtype == torch.float64


def test_a_device_context_still_rules_the_factories() -> None:
    """transformers builds models inside one: ignored, it would leave buffers uninitialised."""
    with torch.device("meta"):
        assert torch.empty(2).is_meta and torch.zeros(2).is_meta


def test_a_second_install_changes_nothing() -> None:
    before = torch.empty
    cpu_runtime.install()
    assert torch.empty is before


def test_an_install_after_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core  # noqa: F401

    monkeypatch.setattr(cpu_runtime, "_installed", False)
    with pytest.raises(RuntimeError, match="before megatron.core is imported"):
        cpu_runtime.install()


def test_the_model_parallel_rng_leaves_the_default_one_alone() -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    from tests.tiny_models import initialize_one_rank

    initialize_one_rank()
    model_parallel_cuda_manual_seed(7)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with get_cuda_rng_tracker().fork():
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with get_cuda_rng_tracker().fork():
        second = torch.rand(3)
    assert not torch.equal(first, second) and not torch.equal(first, expected)
    model_parallel_cuda_manual_seed(7)
    with get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(3), first)


def test_torch_dynamo_still_works() -> None:
    compiled = torch.compile(lambda x: x.sin() + torch.zeros(3), backend="eager")
    assert torch.equal(compiled(torch.ones(3)), torch.ones(3).sin())
