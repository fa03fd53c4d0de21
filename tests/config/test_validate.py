"""What is refused before anything heavy starts, and that the message says what is allowed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.config.compose import load_config
from dapo_megatron.config.schema import (
    Config,
    CorrectionKind,
    EvaluationSetConfig,
    KLEstimator,
    OldLogProbs,
)
from dapo_megatron.config.validate import validate
from dapo_megatron.config.validate_model import validate_files, validate_model

CONF = Path(__file__).parents[2] / "conf"


def quickstart(*overrides: str) -> Config:
    return load_config("quickstart", overrides, [CONF])


def problem(*overrides: str) -> str:
    with pytest.raises(ValueError) as error:
        validate(quickstart(*overrides))
    return str(error.value)


@pytest.mark.parametrize("name", ["quickstart", "smollm2_gsm8k"])
@pytest.mark.parametrize("algorithm", ["dapo", "dapo_verl", "grpo", "dr_grpo"])
def test_shipped_configs_are_valid(name: str, algorithm: str) -> None:
    validate(load_config(name, [f"algorithm={algorithm}", "algorithm.overlong.buffer_tokens=10"], [CONF]))
    validate(load_config(name, ["parallel=data2"], [CONF]))


def test_the_32b_recipe_fits_its_model(shared: Path) -> None:
    config = load_config("recipe/dapo_qwen2_5_32b", [], [CONF])
    validate(config)
    hf_config = json.loads((shared / "model_configs.json").read_text())["Qwen2.5-32B"]["hf_config"]
    validate_model(config, hf_config)
    config.rollout.tensor = 6
    with pytest.raises(ValueError, match="rollout.tensor=6 does not divide .* 40 attention heads: .* is 5"):
        validate_model(config, hf_config)


def test_a_model_with_a_sliding_window_trains_inside_it() -> None:
    config = load_config("quickstart", [], [CONF])
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    validate_model(config, {"sliding_window": longest})
    validate_model(config, {"sliding_window": longest - 5, "use_sliding_window": False})
    validate_model(config, {"sliding_window": None})
    with pytest.raises(ValueError, match=f"sliding window of {longest - 5}.*lower one of them by at least 5"):
        validate_model(config, {"sliding_window": longest - 5})


def test_quantised_engines_are_for_what_they_can_run() -> None:
    config = load_config("quickstart", ["rollout.quantization=fp8_per_channel", "precision=bf16"], [CONF])
    validate(config)
    experts = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 9}
    experts |= {"intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    with pytest.raises(ValueError, match="fp8_per_channel on the CPU is for dense models, and this one has 4 experts"):
        validate_model(config, experts | {"architectures": ["Qwen3MoeForCausalLM"]})
    for overrides, message in [
        (["precision=fp32"], "goes with precision.rollout_dtype=bfloat16, given is float32"),
        (["rollout.quantization=fp8_block"], "fp8_block needs a CUDA device"),
        (["weights.deadline_s=2000"], "cluster.phase_deadline_s=3600 would end a sync .* at least twice"),
    ]:
        chosen = ["rollout.quantization=fp8_per_channel", "precision=bf16", *overrides]
        with pytest.raises(ValueError, match=message):
            validate(load_config("quickstart", chosen, [CONF]))


def test_vllms_own_transports_go_where_they_can() -> None:
    cuda = ["cluster.device=cuda", "parallel=data2"]
    validate(load_config("quickstart", [*cuda, "weights.transport=ipc", "rollout.engines=2"], [CONF]))
    validate(load_config("quickstart", [*cuda, "weights.transport=ipc", "rollout.tensor=2"], [CONF]))
    validate(load_config("quickstart", [*cuda, "weights.transport=nccl", "cluster.placement=disaggregated"], [CONF]))
    refused = {
        "weights.transport=ipc needs an engine's process on every training rank's device: 2 ranks": [],
        "weights.transport=ipc needs cluster.placement=colocated": ["cluster.placement=disaggregated"],
        "weights.transport=nccl needs cluster.placement=disaggregated": ["weights.transport=nccl"],
        "weights.transport=ipc needs CUDA devices, and cluster.device=cpu": ["cluster.device=cpu"],
        "weights.verify=checksums compares bytes on the host": ["rollout.engines=2", "weights.verify=checksums"],
    }
    for message, overrides in refused.items():
        with pytest.raises(ValueError, match=message):
            validate(load_config("quickstart", [*cuda, "weights.transport=ipc", *overrides], [CONF]))


def test_the_32b_recipe_is_the_papers() -> None:
    config = load_config("recipe/dapo_qwen2_5_32b", [], [CONF])
    n = config.rollout.samples_per_prompt
    assert (config.trainer.train_batch_size, n, config.trainer.update_batch_size) == (512, 16, 512)
    assert config.trainer.train_batch_size * n // config.trainer.update_batch_size == 16
    assert (config.optimizer.lr, config.optimizer.warmup_steps) == (1e-6, 20)
    assert (config.algorithm.clip.low, config.algorithm.clip.high) == (0.2, 0.28)
    assert (config.algorithm.overlong.max_response_tokens, config.algorithm.overlong.buffer_tokens) == (20480, 4096)


def test_all_problems_are_named_at_once() -> None:
    message = problem("optimizer.lr=0", "rollout.engines=0", "reward.scorer=abc")
    for text in ("3 problems", "optimizer.lr=0.0", "rollout.engines=0", "reward.scorer='abc'"):
        assert text in message


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.update_batch_size=60"], ["=60", "rollout.samples_per_prompt=8", "nearest valid size is 64"]),
        (["trainer.update_batch_size=96"], ["=32 x", "=8 = 256 samples", "=96", "nearest valid size is"]),
        (["trainer.update_batch_size=1024"], ["256 samples", "nearest valid size is 256"]),
        (["parallel.data=65"], ["parallel.data=65", "at most 64"]),
        (["algorithm.filtering.max_prompts_per_step=31"], ["=31", "train_batch_size=32", "at least 32"]),
    ],
)
def test_batch_arithmetic(overrides: list[str], expected: list[str]) -> None:
    message = problem(*overrides)
    for text in expected:
        assert text in message


@given(groups=st.integers(1, 40), n=st.integers(2, 12), update=st.integers(1, 500))
def test_an_update_is_valid_iff_whole_groups_make_whole_updates(groups: int, n: int, update: int) -> None:
    config = Config()
    config.model.path = config.data.train.path = "x"
    config.trainer.train_batch_size, config.trainer.update_batch_size = groups, update
    config.rollout.samples_per_prompt = n
    possible = {n * k for k in range(1, groups + 1) if (groups * n) % (n * k) == 0}
    if update in possible:
        validate(config)
        return
    with pytest.raises(ValueError, match="nearest valid size is") as error:
        validate(config)
    nearest = int(str(error.value).rpartition("nearest valid size is ")[2].split()[0])
    assert nearest in possible
    assert abs(nearest - update) == min(abs(size - update) for size in possible)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.clip.low=0"], "algorithm.clip.low=0.0 must be above 0"),
        (["algorithm.clip.high=-1"], "algorithm.clip.high=-1.0 must be above 0"),
        (["algorithm.clip.dual=1"], "algorithm.clip.dual=1.0 must be above 1"),
        (["optimizer.lr=nan"], "optimizer.lr=nan must be above 0"),
        (["optimizer.betas=[0.9]"], "optimizer.betas=[0.9] must be two numbers"),
        (["optimizer.betas=[0.9,1.0]"], "optimizer.betas=[0.9, 1.0] must be two numbers"),
        (["trainer.steps=0"], "trainer.steps=0 must be at least 1"),
        (["precision.params_dtype=fp8"], "precision.params_dtype='fp8' is not one of: float32, bfloat16"),
        (["cluster.device=tpu"], "cluster.device='tpu' is not one of: auto, cpu, cuda"),
        (["weights.transport=ipc"], "weights.transport="),
        (["rollout.kv_cache_bytes=null"], "rollout.kv_cache_bytes=null works with CUDA only"),
        (["rollout.sampling.temperature=0"], "rollout.sampling.temperature=0.0 must be above 0"),
        (["evaluation.sampling.temperature=-1"], "evaluation.sampling.temperature=-1.0 must be at least 0"),
        (["rollout.sampling.top_p=0"], "rollout.sampling.top_p=0.0 must be above 0"),
        (["rollout.sampling.top_p=0.9"], "rollout.sampling.allow_biased_ratios=true"),
        (["rollout.sampling.top_k=50"], "rollout.sampling.allow_biased_ratios=true"),
        (["rollout.sampling.top_k=0"], "rollout.sampling.top_k=0 must be -1"),
        (["algorithm.overlong.buffer_tokens=81"], "must lie between 1 and the maximum response length 80"),
        (["algorithm.overlong.buffer_tokens=0"], "must lie between 1 and the maximum response length 80"),
        (["algorithm.overlong.max_response_tokens=0"], "needs a maximum length"),
        (["algorithm.overlong.max_response_tokens=200"], "never applies: it starts above 176"),
        (["algorithm.filtering.pass_rate_low=0.1"], "set together or not at all"),
        (["algorithm.filtering={pass_rate_low:0.8,pass_rate_high:0.2}"], "does not hold"),
        (["rollout.samples_per_prompt=1"], "rejects every group"),
        (["algorithm.correction={kind:mis,low:1.5}"], "does not hold"),
        (["rollout.sleep_level=3"], "rollout.sleep_level=3 is not one of: 1, 2"),
        (["weights.verify=hashes"], "weights.verify='hashes' is not one of: manifest, first, checksums"),
        (["weights.max_log_prob_difference=0"], "weights.max_log_prob_difference=0.0 must be above 0"),
        (["parallel.virtual_pipeline=2"], "interleaves pipeline stages, and parallel.pipeline=1"),
        (["parallel.virtual_pipeline=1", "parallel.pipeline=2"], "must be at least 2, or null"),
        (["parallel.sequence_parallel=true"], "among tensor-parallel ranks, and parallel.tensor=1"),
        (["parallel.expert=4", "parallel.data=2"], "does not divide the 2 ranks of a pipeline stage"),
        (["parallel.recompute.granularity=some"], "is not one of: none, selective, full"),
        (["parallel.recompute.modules=[attention]"], "'attention' is not one of: core_attn"),
        (["cluster.offload=[weights]"], "'weights' is not one of: params, grads, optimizer, reference"),
        (["moe.token_dispatcher=allgather"], "is not one of: alltoall, flex"),
        (["parallel.overlap_param_gather=true"], "needs parallel.overlap_grad_reduce=true"),
        (["data.train.path=''"], "data.train.path is empty"),
        (["data.train.prompt_template='Solve:'"], "must have {prompt} once; it has it 0 times"),
        (["data.train.ground_truth_pattern='a('"], "not a regular expression"),
        (["data.train.ground_truth_pattern='a'"], "needs a group"),
        (["data.train.limit=0"], "data.train.limit=0 must be at least 1"),
        (["evaluation.sets.heldout.samples_per_prompt=0"], "evaluation.sets.heldout.samples_per_prompt=0"),
        (["evaluation.sets.heldout.dataset.path=''"], "evaluation.sets.heldout.dataset.path is empty"),
        (["~evaluation.sets"], "evaluation.every_steps=5 without any evaluation.sets"),
        (["reward.scorer=my.module"], "'package.module:function'"),
        (["model.path=''"], "model.path is empty"),
        (["model.path='package:'"], "a package name follows"),
        (["model.gguf_file=model.bin"], "does not end in .gguf"),
        (["trainer.run_dir=''"], "trainer.run_dir is empty"),
    ],
)
def test_ranges_and_combinations(overrides: list[str], expected: str) -> None:
    assert expected in problem(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.data=2", "parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"],
        ["rollout.sampling.top_p=0.9", "rollout.sampling.allow_biased_ratios=true"],
        ["algorithm.filtering={pass_rate_low:0.2,pass_rate_high:0.8}"],
        ["rollout.samples_per_prompt=1", "algorithm.filtering.enabled=false", "trainer.update_batch_size=8"],
        ["algorithm.overlong.penalty=false", "algorithm.overlong.buffer_tokens=0"],
        ["algorithm.clip.dual=null"],
        ["reward.scorer=my_rewards.math:score"],
        ["evaluation.sampling.temperature=0"],
        ["rollout.engines=2"],
    ],
)
def test_what_is_allowed(overrides: list[str]) -> None:
    validate(quickstart(*overrides))


def test_k1_is_refused_as_a_loss_term_only() -> None:
    config = quickstart()
    config.algorithm.kl.estimator = KLEstimator.k1
    validate(config)
    config.algorithm.kl.coefficient = 0.1
    with pytest.raises(ValueError, match="k2 or k3"):
        validate(config)


def test_correction_of_rollout_log_probs_by_themselves_is_refused() -> None:
    config = quickstart()
    config.algorithm.old_log_probs = OldLogProbs.rollout
    validate(config)
    config.algorithm.correction.kind = CorrectionKind.tis
    with pytest.raises(ValueError, match="recompute, or kind=none"):
        validate(config)


def test_a_set_name_fits_into_metric_and_file_names() -> None:
    config = quickstart()
    config.evaluation.sets["a/b"] = EvaluationSetConfig(config.data.train)
    with pytest.raises(ValueError, match="'a/b'"):
        validate(config)


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Config]:
    """A configuration whose model and datasets exist."""
    model = tmp_path / "base"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
    (model / "model.safetensors").touch()
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").touch()
    return lambda *overrides: quickstart(
        f"model.path={model}",
        f"data.train.path={tmp_path}/train.jsonl",
        f"evaluation.sets.heldout.dataset.path={tmp_path}/heldout.jsonl",
        *overrides,
    )


def test_files_that_are_there(made: Callable[..., Config], tmp_path: Path) -> None:
    validate_files(made())
    validate_files(made(f"data.train.path='{tmp_path}/*.jsonl'"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.path=nowhere", "model.path=nowhere: there is no such folder; make it with: python examples/quickstart"),
        ("model.path=package:no_such_package", "the package no_such_package is not installed; make it with"),
        ("model.path=package:hypothesis", "is not an HF model folder: it has no config.json"),
        ("model.gguf_file=x.gguf", "GGUF files there: none"),
        ("model.tokenizer_path=nowhere", "model.tokenizer_path=nowhere"),
        ("data.train.path='nowhere/*.parquet'", "data.train.path=nowhere/*.parquet"),
        ("evaluation.sets.heldout.dataset.path=nowhere", "evaluation.sets.heldout.dataset.path=nowhere"),
        ("rollout.max_response_tokens=120", "= 132 tokens exceed the model's window of 128"),
    ],
)
def test_files_that_are_missing(made: Callable[..., Config], override: str, expected: str) -> None:
    with pytest.raises(ValueError) as error:
        validate_files(made(override))
    assert expected in str(error.value)


def test_weights_must_be_there(made: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "base/model.safetensors").unlink()
    with pytest.raises(ValueError, match="no \\*.safetensors"):
        validate_files(made())
    (tmp_path / "base/config.json").write_text("{")
    (tmp_path / "base/model.safetensors").touch()
    with pytest.raises(ValueError, match="config.json"):
        validate_files(made())


def test_window_of_the_model() -> None:
    config = quickstart()
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    validate_model(config, {"max_position_embeddings": longest})
    validate_model(config, {})
    with pytest.raises(ValueError, match="by at least 1"):
        validate_model(config, {"max_position_embeddings": longest - 1})
