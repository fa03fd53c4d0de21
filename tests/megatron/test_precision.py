"""What each FP8 recipe means to Megatron, on a Transformer Engine that is replaced at the import boundary, and when it
is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.cluster.placement import fp8_environment
from dapo_megatron.config.compose import load_config
from dapo_megatron.config.schema import Config, FP8Config
from dapo_megatron.config.validate import validate
from dapo_megatron.config.validate_model import validate_model
from dapo_megatron.data.packing import Alignment, alignment_of
from dapo_megatron.megatron.precision import Device, check_fp8, data_parallel_settings

ROOT = Path(__file__).parents[2]
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
H100, B200, RTX_5090, L4, A100 = (9, 0), (10, 0), (12, 0), (8, 9), (8, 0)

BUILD = """
import dataclasses, json, sys
from tests.megatron import transformer_engine_stub
transformer_engine_stub.install("2.9.0")
import dapo_megatron.megatron, torch
from dapo_megatron.config.compose import load_config
from dapo_megatron.megatron import model
from dapo_megatron.megatron.fp8_emulation import linear_submodules
from dapo_megatron.models.registry import family_of
from tests.tiny_models import initialize_one_rank
initialize_one_rank()
sizes = dict(hidden_act="silu", hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
             num_hidden_layers=4, vocab_size=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
found = {}
for recipe in sys.argv[2:]:
    config = load_config("quickstart", [f"precision={recipe}"], [sys.argv[1]])
    for architecture in ("Qwen2ForCausalLM", "Qwen3MoeForCausalLM"):
        hf_config = sizes | {"architectures": [architecture]}
        family = family_of(hf_config)
        transformer = model.transformer_config(family, family.dimensions(hf_config), config, torch.bfloat16, True)
        layer = model.layer_spec(transformer, config.precision.fp8, True).layer_specs[0].submodules
        attention, products = layer.self_attention.submodules, linear_submodules(layer.mlp)
        modules = [attention.linear_qkv, attention.core_attention, attention.linear_proj,
                   products.linear_fc1, products.linear_fc2]
        fields = {name: value for name, value in vars(transformer).items() if "fp8" in name or "bf16" in name}
        found[f"{recipe} {architecture}"] = {"modules": [m.__name__ for m in modules], "fields": fields}
print(json.dumps(found, default=str))
"""


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    recipes = ["bf16", *(f"fp8_{recipe}" for recipe in RECIPES)]
    command = [sys.executable, "-W", "ignore", "-c", BUILD, str(ROOT / "conf"), *recipes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("bf16", {"fp8": None, "fp8_param": False, "bf16": True, "first_last_layers_bf16": False}),
        (
            "fp8_delayed",
            {
                "fp8": "hybrid",
                "fp8_recipe": "delayed",
                "fp8_amax_history_len": 1024,
                "fp8_amax_compute_algo": "max",
                "fp8_margin": 0,
                "first_last_layers_bf16": False,
            },
        ),
        (
            "fp8_tensorwise",
            {
                "fp8": "hybrid",
                "fp8_recipe": "tensorwise",
                "first_last_layers_bf16": True,
                "num_layers_at_start_in_bf16": 1,
                "num_layers_at_end_in_bf16": 1,
            },
        ),
        ("fp8_blockwise", {"fp8": "e4m3", "fp8_recipe": "blockwise", "first_last_layers_bf16": False}),
        ("fp8_mxfp8", {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param": False, "fp8_wgrad": True}),
    ],
)
def test_transformer_config_and_layer_spec(recipe: str, expected: dict[str, Any], built: dict[str, Any]) -> None:
    dense, experts = built[f"{recipe} Qwen2ForCausalLM"], built[f"{recipe} Qwen3MoeForCausalLM"]
    for found in (dense, experts):
        assert {name: found["fields"][name] for name in expected} == expected
    attention = ["TELayerNormColumnParallelLinear", "TEDotProductAttention", "TERowParallelLinear"]
    assert dense["modules"] == [*attention, "TELayerNormColumnParallelLinear", "TERowParallelLinear"]
    grouped = ["TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"]
    assert experts["modules"] == [*attention, *grouped]


@pytest.mark.parametrize("recipe", RECIPES)
def test_shipped_recipes_are_valid_on_cuda_and_refused_on_a_cpu(recipe: str) -> None:
    on_cuda = ["cluster.device=cuda", f"precision=fp8_{recipe}"]
    config = load_config("quickstart", on_cuda, [ROOT / "conf"])
    validate(config)
    assert (config.precision.params_dtype, config.precision.fp8.recipe) == ("bfloat16", recipe)
    with pytest.raises(ValueError, match=r"needs a GPU and Transformer Engine.*emulate=true"):
        validate(load_config("quickstart", [f"precision=fp8_{recipe}"], [ROOT / "conf"]))
    emulated = [f"precision.fp8.recipe={recipe}", "precision.fp8.emulate=true"]
    validate(load_config("quickstart", emulated, [ROOT / "conf"]))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["emulate=true"], "emulate=true without a precision.fp8.recipe"),
        (["first_layers_bf16=1"], "first_layers_bf16=1 without a precision.fp8.recipe"),
        (["recipe=int8"], "'int8' is not one of: null, delayed, tensorwise, blockwise, mxfp8"),
        (["recipe=delayed", "last_layers_bf16=2", "emulate=true"], "keeps one history for all layers"),
        (["recipe=mxfp8", "params=true", "emulate=true"], "stores Transformer Engine's tensors"),
        (["recipe=mxfp8"], "goes with precision.params_dtype=bfloat16, given is float32"),
        (["recipe=mxfp8", "power_of_two_scales=true"], "power_of_two_scales=true goes with recipe=blockwise"),
        (["recipe=mxfp8", "params=true"], "parallel.overlap_param_gather=false"),
        (["recipe=blockwise", "params=true"], "params=true needs optimizer.distributed=true"),
        (["recipe=delayed"], "recipe=delayed cannot recompute layernorm"),
    ],
)
def test_combinations_that_are_refused(overrides: list[str], reason: str) -> None:
    given = [
        *(f"precision.fp8.{override}" for override in overrides),
        *("parallel.overlap_param_gather=true", "optimizer.distributed=false"),
        *("parallel.recompute.granularity=selective", "parallel.recompute.modules=[mlp,layernorm]"),
    ]
    with pytest.raises(ValueError) as error:
        validate(load_config("quickstart", given, [ROOT / "conf"]))
    assert reason in str(error.value)


QWEN2_5_0_5B = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": 24,
}


@pytest.mark.parametrize(
    ("recipe", "tensor", "refusal"),
    [
        (None, 2, None),
        ("tensorwise", 2, None),
        ("mxfp8", 2, None),
        ("blockwise", 1, None),
        ("blockwise", 2, "multiples of 128, and here are: queries 448, queries, keys and values 576"),
    ],
)
def test_sizes_on_a_rank(recipe: str | None, tensor: int, refusal: str | None) -> None:
    config = Config()
    config.precision.fp8.recipe, config.parallel.tensor = recipe, tensor
    if refusal is None:
        validate_model(config, QWEN2_5_0_5B)
        return
    with pytest.raises(ValueError) as error:
        validate_model(config, QWEN2_5_0_5B)
    assert refusal in str(error.value)
    config.precision.fp8.emulate = True
    validate_model(config, QWEN2_5_0_5B)


@pytest.mark.parametrize(
    ("recipe", "device", "reason"),
    [
        ("delayed", Device(None, None, None), "needs a GPU, and there is none"),
        ("delayed", Device(H100, (12, 8), None), "needs Transformer Engine, which is not installed: pip install"),
        ("tensorwise", Device(H100, (12, 8), (2, 1)), "needs Transformer Engine 2.2, installed is 2.1"),
        (
            "delayed",
            Device(A100, (12, 8), (2, 9)),
            "needs compute capability 8.9, this GPU has 8.0; recipes for it: none",
        ),
        ("delayed", Device(L4, (12, 0), (2, 9)), "needs CUDA 12.1, torch was built with 12.0"),
        ("blockwise", Device(H100, (12, 8), (2, 9)), "needs CUDA 12.9, torch was built with 12.8"),
        ("mxfp8", Device(H100, (12, 9), (2, 9)), "recipes for it: delayed, tensorwise, blockwise"),
        (
            "mxfp8",
            Device(RTX_5090, (12, 9), (2, 9)),
            "needs compute capability 10.0 and below 12.0, this GPU has 12.0; recipes for it: delayed",
        ),
    ],
)
def test_devices_that_are_refused(recipe: str, device: Device, reason: str) -> None:
    with pytest.raises(ValueError) as error:
        check_fp8(FP8Config(recipe=recipe), device)
    assert reason in str(error.value) and "emulate=true" in str(error.value)
    check_fp8(FP8Config(recipe=recipe, emulate=True), device)


@pytest.mark.parametrize(
    ("recipe", "device"),
    [
        (None, Device(None, None, None)),
        ("delayed", Device(L4, (12, 1), (1, 14))),
        ("tensorwise", Device(H100, (12, 4), (2, 2))),
        ("blockwise", Device(H100, (12, 9), (2, 3))),
        ("blockwise", Device(B200, (12, 9), (2, 9))),
        ("mxfp8", Device(B200, (12, 8), (2, 9))),
    ],
)
def test_devices_that_work(recipe: str | None, device: Device) -> None:
    check_fp8(FP8Config(recipe=recipe), device)


def test_fp8_parameters_are_gathered_as_such() -> None:
    assert data_parallel_settings(FP8Config(recipe="blockwise")) == {}
    assert data_parallel_settings(FP8Config(recipe="blockwise", params=True)) == {
        "fp8_param_gather": True,
        "reuse_grad_buf_for_mxfp8_param_ag": False,
    }
    assert data_parallel_settings(FP8Config(recipe="mxfp8", params=True))["reuse_grad_buf_for_mxfp8_param_ag"]


def test_environment() -> None:
    scales = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
    assert fp8_environment(FP8Config(recipe="blockwise"), H100) == {scales: "1"}
    assert fp8_environment(FP8Config(recipe="blockwise"), B200) == {scales: "0"}
    for recipe in (None, "delayed", "tensorwise", "mxfp8"):
        assert fp8_environment(FP8Config(recipe=recipe), H100) == {}


@pytest.mark.parametrize(("recipe", "tokens"), [("delayed", 16), ("tensorwise", 16), ("mxfp8", 32), ("blockwise", 128)])
def test_alignment_is_demanded_after_the_context_parallel_split(recipe: str, tokens: int) -> None:
    config = Config()
    config.precision.fp8.recipe = recipe
    assert alignment_of(config) == Alignment(1, tokens)
    config.parallel.context = 2
    assert alignment_of(config) == Alignment(4, 2 * tokens)
