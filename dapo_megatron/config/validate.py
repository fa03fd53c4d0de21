"""What several fields must satisfy together, and what the ranges of single fields are.

`validate` needs nothing but the configuration; what it means for files and the model is in validate_model.py. Both run
before anything heavy starts, and name every problem at once.
"""

from __future__ import annotations

import importlib.util
import json
import math
import operator
import re
from collections.abc import Iterator
from typing import Any

from dapo_megatron.config.layout import broken_rules, world_size
from dapo_megatron.config.schema import (
    Config,
    CorrectionKind,
    DatasetConfig,
    KLEstimator,
    OldLogProbs,
    Placement,
    SamplingConfig,
)

PACKAGE_PREFIX = "package:"

OFFLOAD_PHASES = ("params", "grads", "optimizer", "reference")

FP8_SIZE_MULTIPLE = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}
"""What Transformer Engine asks of the sizes of a weight; experts' tokens are padded by Megatron."""

RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj")

_AT_LEAST: dict[str, float] = {
    "parallel.tensor": 1,
    "parallel.pipeline": 1,
    "parallel.virtual_pipeline": 1,
    "parallel.context": 1,
    "parallel.expert": 1,
    "parallel.expert_tensor": 1,
    "parallel.data": 1,
    "parallel.max_tokens_per_micro_batch": 1,
    "parallel.recompute.layers": 1,
    "moe.aux_loss_coefficient": 0,
    "precision.fp8.first_layers_bf16": 0,
    "precision.fp8.last_layers_bf16": 0,
    "precision.fp8.amax_history_len": 1,
    "precision.fp8.margin": 0,
    "algorithm.loss_norm_tokens": 1,
    "algorithm.kl.coefficient": 0,
    "algorithm.entropy_coefficient": 0,
    "algorithm.overlong.penalty_factor": 0,
    "algorithm.correction.low": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.decay_steps": 1,
    "optimizer.min_lr": 0,
    "optimizer.weight_decay": 0,
    "optimizer.clip_grad": 0,
    "optimizer.max_skipped_updates": 1,
    "rollout.engines": 1,
    "rollout.samples_per_prompt": 1,
    "rollout.max_response_tokens": 1,
    "rollout.max_concurrent_samples": 1,
    "rollout.kv_cache_bytes": 1,
    "rollout.tensor": 1,
    "rollout.cpu_threads": 1,
    "data.max_prompt_tokens": 1,
    "evaluation.every_steps": 1,
    "weights.buffer_bytes": 1,
    "cluster.cpu_threads_per_actor": 1,
    "trainer.steps": 1,
    "trainer.train_batch_size": 1,
    "trainer.update_batch_size": 1,
    "trainer.epochs": 1,
    "trainer.checkpoint_every_steps": 1,
    "trainer.save_samples_every_steps": 1,
    "trainer.samples_per_file": 0,
}
"""Smallest allowed value; a null is not checked."""

_ABOVE: dict[str, float] = {
    "algorithm.clip.low": 0,
    "algorithm.clip.high": 0,
    "algorithm.clip.dual": 1,
    "algorithm.correction.cap": 0,
    "optimizer.lr": 0,
    "optimizer.eps": 0,
    "trainer.peak_flops_per_device": 0,
    "weights.deadline_s": 0,
    "weights.max_log_prob_difference": 0,
    "cluster.start_deadline_s": 0,
    "cluster.phase_deadline_s": 0,
}
"""Bound that the value must exceed."""

_CHOICES: dict[str, tuple[str | int | None, ...]] = {
    "precision.params_dtype": ("float32", "bfloat16"),
    "precision.rollout_dtype": ("float32", "bfloat16"),
    "parallel.recompute.granularity": ("none", "selective", "full"),
    "parallel.recompute.method": ("uniform", "block"),
    "moe.router_dtype": ("float32", "float64", "params"),
    "moe.token_dispatcher": ("alltoall", "flex"),
    "optimizer.decay": ("constant", "linear", "cosine"),
    "optimizer.main_grads_dtype": ("float32", "bfloat16"),
    "optimizer.main_params_dtype": ("float32", "float16"),
    "optimizer.exp_avg_dtype": ("float32", "bfloat16", "float16", "float8"),
    "optimizer.exp_avg_sq_dtype": ("float32", "bfloat16", "float16", "float8"),
    "precision.fp8.recipe": (None, "delayed", "tensorwise", "blockwise", "mxfp8"),
    "precision.fp8.format": ("e4m3", "hybrid"),
    "precision.fp8.amax_compute_algo": ("max", "most_recent"),
    "rollout.quantization": (None, "fp8_per_channel", "fp8_block"),
    "rollout.sleep_level": (1, 2),
    "weights.transport": ("shared_memory", "ipc", "nccl", "nccl_m2n"),
    "weights.verify": ("manifest", "first", "checksums"),
    "cluster.device": ("auto", "cpu", "cuda"),
}


def validate(config: Config) -> None:
    """Check ranges and what fields must satisfy together.

    Raises:
        ValueError: lists every problem, each with what was given and what is allowed.
    """
    raise_all(
        [
            *_ranges(config),
            *_batch(config),
            *_layout(config),
            *_fp8(config),
            *_algorithm(config),
            *_optimizer(config),
            *_sampling("rollout.sampling", config.rollout.sampling, training=True),
            *_data(config),
            *_evaluation(config),
            *_places(config),
            *_transport(config),
        ]
    )


def package_of(path: str) -> str:
    """The package's name in a model.path of the kind package:NAME."""
    return path.removeprefix(PACKAGE_PREFIX)


def raise_all(problems: list[str]) -> None:
    """One ValueError for all problems, none for none."""
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        raise ValueError(f"the configuration has {len(problems)} problems:\n" + "\n".join(f"- {p}" for p in problems))


def _get(config: Config, path: str) -> Any:
    return operator.attrgetter(path)(config)


def _ranges(config: Config) -> Iterator[str]:
    for path, least in _AT_LEAST.items():
        value = _get(config, path)
        if value is not None and not least <= value < math.inf:
            yield f"{path}={value} must be at least {least}"
    for path, bound in _ABOVE.items():
        value = _get(config, path)
        if value is not None and not value > bound:
            yield f"{path}={value} must be above {bound}"
    for path, choices in _CHOICES.items():
        value = _get(config, path)
        if value not in choices:
            named = ["null" if choice is None else str(choice) for choice in choices]
            yield f"{path}={value!r} is not one of: {', '.join(named)}"
    for phase in config.cluster.offload:
        if phase not in OFFLOAD_PHASES:
            yield f"cluster.offload: {phase!r} is not one of: {', '.join(OFFLOAD_PHASES)}"
    for module in config.parallel.recompute.modules:
        if module not in RECOMPUTE_MODULES:
            yield f"parallel.recompute.modules: {module!r} is not one of: {', '.join(RECOMPUTE_MODULES)}"
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"optimizer.betas={betas} must be two numbers from 0 to below 1"


def _batch(config: Config) -> Iterator[str]:
    """A step is split by group into updates of one size."""
    groups, update = config.trainer.train_batch_size, config.trainer.update_batch_size
    n = config.rollout.samples_per_prompt
    if min(groups, update, n) < 1:
        return
    samples = groups * n
    valid = [n * divisor for divisor in range(1, groups + 1) if groups % divisor == 0]
    nearest = min(valid, key=lambda size: abs(size - update))
    if update % n:
        yield (
            f"trainer.update_batch_size={update} samples is not a multiple of rollout.samples_per_prompt={n}, and "
            f"groups are never split: the nearest valid size is {nearest}"
        )
    elif samples % update:
        yield (
            f"trainer.train_batch_size={groups} x rollout.samples_per_prompt={n} = {samples} samples do not divide "
            f"into updates of trainer.update_batch_size={update}: the nearest valid size is {nearest}"
        )
    if config.parallel.data > update:
        yield (
            f"parallel.data={config.parallel.data} ranks cannot share an update of trainer.update_batch_size={update} "
            f"samples: at most {update}"
        )
    budget = config.algorithm.filtering.max_prompts_per_step
    if budget is not None and budget < groups:
        yield (
            f"algorithm.filtering.max_prompts_per_step={budget} can never fill "
            f"trainer.train_batch_size={groups}: at least {groups}"
        )


def _layout(config: Config) -> Iterator[str]:
    yield from broken_rules(config.parallel)
    parallel = config.parallel
    if parallel.overlap_param_gather and not (parallel.overlap_grad_reduce and config.optimizer.distributed):
        yield (
            "parallel.overlap_param_gather=true needs parallel.overlap_grad_reduce=true and optimizer.distributed=true"
        )


def _fp8(config: Config) -> Iterator[str]:
    fp8 = config.precision.fp8
    if fp8.recipe is None:
        for name in ("params", "emulate", "first_layers_bf16", "last_layers_bf16", "power_of_two_scales"):
            if getattr(fp8, name):
                yield f"precision.fp8.{name}={json.dumps(getattr(fp8, name))} without a precision.fp8.recipe"
        return
    if fp8.power_of_two_scales and fp8.recipe != "blockwise":
        yield f"precision.fp8.power_of_two_scales=true goes with recipe=blockwise, given is {fp8.recipe}"
    if fp8.recipe == "delayed" and (fp8.first_layers_bf16 or fp8.last_layers_bf16):
        yield (
            "precision.fp8.recipe=delayed keeps one history for all layers: first_layers_bf16 and last_layers_bf16 "
            "need another recipe"
        )
    if fp8.emulate and fp8.params:
        yield "precision.fp8.params=true stores Transformer Engine's tensors, and precision.fp8.emulate=true has none"
    if fp8.params and not config.optimizer.distributed:
        # No other optimizer quantises the main parameters again after a step.
        yield "precision.fp8.params=true needs optimizer.distributed=true"
    if fp8.params and fp8.recipe == "mxfp8" and config.parallel.overlap_param_gather:
        yield (
            "precision.fp8.params=true with recipe=mxfp8 gathers parameters through the gradient buffer before the "
            "next update begins: parallel.overlap_param_gather=false"
        )
    if fp8.params and config.algorithm.kl.coefficient > 0:
        yield "precision.fp8.params=true has no reference policy beside it yet: algorithm.kl.coefficient=0"
    if fp8.params and fp8.recipe == "mxfp8" and {"params", "grads"} & set(config.cluster.offload):
        yield (
            "precision.fp8.params=true with recipe=mxfp8 keeps parameters and gradients in one buffer, which cannot be "
            "offloaded: cluster.offload=[optimizer]"
        )
    recompute = config.parallel.recompute
    if not fp8.emulate and fp8.recipe == "delayed" and recompute.granularity == "selective":
        for module in recompute.modules:
            if module in ("layernorm", "moe_act"):
                yield f"precision.fp8.recipe=delayed cannot recompute {module}: take it out of recompute.modules"
    if not fp8.emulate and config.precision.params_dtype != "bfloat16":
        yield (
            f"precision.fp8.recipe={fp8.recipe} goes with precision.params_dtype=bfloat16, given is "
            f"{config.precision.params_dtype}; precision.fp8.emulate=true works with either"
        )
    if not fp8.emulate and config.cluster.device == "cpu":
        yield (
            f"precision.fp8.recipe={fp8.recipe} needs a GPU and Transformer Engine, and cluster.device=cpu: "
            "precision.fp8.emulate=true shows its numerics there"
        )


def _algorithm(config: Config) -> Iterator[str]:
    algorithm, n = config.algorithm, config.rollout.samples_per_prompt
    if algorithm.kl.coefficient > 0 and algorithm.kl.estimator == KLEstimator.k1:
        yield "algorithm.kl.estimator=k1 has no expected gradient in a loss: k2 or k3"

    overlong, longest = algorithm.overlong, config.rollout.max_response_tokens
    if overlong.penalty:
        limit = overlong.max_response_tokens if overlong.max_response_tokens is not None else longest
        if limit < 1:
            yield (
                "algorithm.overlong.penalty=true needs a maximum length: "
                "set algorithm.overlong.max_response_tokens or rollout.max_response_tokens"
            )
        elif not 1 <= overlong.buffer_tokens <= limit:
            yield (
                f"algorithm.overlong.buffer_tokens={overlong.buffer_tokens} must lie between 1 and the maximum "
                f"response length {limit}"
            )
        elif limit - overlong.buffer_tokens >= longest:
            yield (
                f"algorithm.overlong.penalty=true never applies: it starts above {limit - overlong.buffer_tokens} "
                f"tokens, and rollout.max_response_tokens={longest}"
            )

    filtering = algorithm.filtering
    low, high = filtering.pass_rate_low, filtering.pass_rate_high
    if (low is None) != (high is None):
        yield "algorithm.filtering.pass_rate_low and pass_rate_high are set together or not at all"
    elif low is not None and high is not None and not 0 <= low <= high <= 1:
        yield f"algorithm.filtering: 0 <= pass_rate_low={low} <= pass_rate_high={high} <= 1 does not hold"
    elif filtering.enabled and low is None and n == 1:
        yield (
            "algorithm.filtering.enabled=true rejects every group of rollout.samples_per_prompt=1, whose accuracies "
            "are always equal: at least 2 samples, or no filtering"
        )

    correction = algorithm.correction
    if correction.kind != CorrectionKind.none and algorithm.old_log_probs == OldLogProbs.rollout:
        yield (
            f"algorithm.correction.kind={correction.kind} with algorithm.old_log_probs=rollout corrects nothing "
            "(the ratio is 1 everywhere): use old_log_probs=recompute, or kind=none"
        )
    if correction.kind == CorrectionKind.mis and not correction.low <= 1 <= correction.high:
        yield (
            f"algorithm.correction: low={correction.low} <= 1 <= high={correction.high} does not hold, so that "
            "tokens without any mismatch would be masked"
        )


def _optimizer(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.decay != "constant":
        if optimizer.decay_steps is None:
            yield (
                f"optimizer.decay={optimizer.decay} needs optimizer.decay_steps, the step that reaches "
                f"optimizer.min_lr: {config.trainer.steps} is trainer.steps"
            )
        elif optimizer.decay_steps <= optimizer.warmup_steps:
            yield (
                f"optimizer.decay_steps={optimizer.decay_steps} must be above "
                f"optimizer.warmup_steps={optimizer.warmup_steps}"
            )
        if optimizer.min_lr > optimizer.lr:
            yield f"optimizer.min_lr={optimizer.min_lr} must be at most optimizer.lr={optimizer.lr}"
    if optimizer.precision_aware:
        if importlib.util.find_spec("transformer_engine") is None:
            yield (
                "optimizer.precision_aware=true needs the Adam of Transformer Engine, which is not installed: "
                "pip install 'dapo-megatron[gpu]', or optimizer.precision_aware=false"
            )
        if not optimizer.distributed or config.precision.params_dtype != "bfloat16":
            yield (
                f"optimizer.precision_aware=true needs optimizer.distributed=true (it is {optimizer.distributed}) and "
                f"precision.params_dtype=bfloat16 (it is {config.precision.params_dtype})"
            )
    else:
        for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if getattr(optimizer, name) != "float32":
                yield (
                    f"optimizer.{name}={getattr(optimizer, name)} needs optimizer.precision_aware=true; without it "
                    "only float32 is possible"
                )


def _sampling(path: str, sampling: SamplingConfig, *, training: bool) -> Iterator[str]:
    temperature, top_p, top_k = sampling.temperature, sampling.top_p, sampling.top_k
    if not 0 <= temperature < math.inf or (training and temperature == 0):
        yield f"{path}.temperature={temperature} must be {'above' if training else 'at least'} 0"
    if not 0 < top_p <= 1:
        yield f"{path}.top_p={top_p} must be above 0 and at most 1"
    if top_k != -1 and top_k < 1:
        yield f"{path}.top_k={top_k} must be -1 (all tokens) or at least 1"
    if training and not sampling.allow_biased_ratios and (top_p < 1 or top_k != -1):
        yield (
            f"{path}: top_p={top_p}, top_k={top_k} bias the ratios of training: use top_p=1 and top_k=-1, "
            f"or accept the bias with {path}.allow_biased_ratios=true"
        )


def _data(config: Config) -> Iterator[str]:
    yield from _dataset("data.train", config.data.train)
    if config.reward.scorer != "dapo" and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", config.reward.scorer):
        yield f"reward.scorer={config.reward.scorer!r} must be 'dapo' or an import path 'package.module:function'"


def _dataset(path: str, dataset: DatasetConfig) -> Iterator[str]:
    if not dataset.path:
        yield f"{path}.path is empty: name a dataset folder, a *.parquet or *.jsonl file, or a glob"
    for column in ("prompt", "ground_truth"):
        if not getattr(dataset.columns, column):
            yield f"{path}.columns.{column} is empty: name the column"
    if dataset.limit is not None and dataset.limit < 1:
        yield f"{path}.limit={dataset.limit} must be at least 1, or null"
    template = dataset.prompt_template
    if template is not None and template.count("{prompt}") != 1:
        yield f"{path}.prompt_template must have {{prompt}} once; it has it {template.count('{prompt}')} times"
    pattern = dataset.ground_truth_pattern
    if pattern is not None:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            yield f"{path}.ground_truth_pattern={pattern!r} is not a regular expression: {error}"
        else:
            if groups < 1:
                yield f"{path}.ground_truth_pattern={pattern!r} needs a group (...) around the ground truth"


def _evaluation(config: Config) -> Iterator[str]:
    evaluation = config.evaluation
    yield from _sampling("evaluation.sampling", evaluation.sampling, training=False)
    if evaluation.every_steps is not None and not evaluation.sets:
        yield f"evaluation.every_steps={evaluation.every_steps} without any evaluation.sets"
    for name, each in evaluation.sets.items():
        if not re.fullmatch(r"[\w.-]+", name):
            yield f"evaluation.sets: the name {name!r} may hold letters, digits, '_', '-' and '.' only"
        if each.samples_per_prompt < 1:
            yield f"evaluation.sets.{name}.samples_per_prompt={each.samples_per_prompt} must be at least 1"
        yield from _dataset(f"evaluation.sets.{name}.dataset", each.dataset)


def _places(config: Config) -> Iterator[str]:
    """The model's name, the run directory and where the actors live."""
    model = config.model
    if not model.path:
        yield "model.path is empty: name an HF model folder, or package:NAME"
    if model.path.startswith(PACKAGE_PREFIX) and not package_of(model.path).isidentifier():
        yield f"model.path={model.path!r}: a package name follows {PACKAGE_PREFIX!r}"
    if model.gguf_file is not None and not model.gguf_file.endswith(".gguf"):
        yield f"model.gguf_file={model.gguf_file!r} does not end in .gguf"
    if not config.trainer.run_dir:
        yield "trainer.run_dir is empty: name a folder"
    if config.cluster.device == "cpu":
        if config.rollout.kv_cache_bytes is None:
            yield "rollout.kv_cache_bytes=null works with CUDA only, and cluster.device=cpu: name a size in bytes"


def _transport(config: Config) -> Iterator[str]:
    """What vLLM's CUDA backends demand of the places of ranks and engines, and engines in FP8 of their weights."""
    transport, placement = config.weights.transport, config.cluster.placement
    quantization = config.rollout.quantization
    if quantization is not None and config.precision.rollout_dtype != "bfloat16":
        yield (
            f"rollout.quantization={quantization} goes with precision.rollout_dtype=bfloat16, given is "
            f"{config.precision.rollout_dtype}"
        )
    if quantization == "fp8_block" and config.cluster.device == "cpu":
        yield "rollout.quantization=fp8_block needs a CUDA device, and cluster.device=cpu: use fp8_per_channel"
    if quantization == "fp8_block" and transport == "nccl_m2n":
        yield "rollout.quantization=fp8_block is quantised as a whole, and nccl_m2n sends parts: weights.transport=nccl"
    if config.cluster.phase_deadline_s < 2 * config.weights.deadline_s:
        yield (
            f"cluster.phase_deadline_s={config.cluster.phase_deadline_s:g} would end a sync before its own deadlines: "
            f"at least twice weights.deadline_s={config.weights.deadline_s:g}"
        )
    if transport == "shared_memory":
        return
    if config.cluster.device == "cpu":
        yield f"weights.transport={transport} needs CUDA devices, and cluster.device=cpu: use shared_memory"
    needed = Placement.colocated if transport == "ipc" else Placement.disaggregated
    if placement is not needed:
        yield f"weights.transport={transport} needs cluster.placement={needed}, given is {placement}"
    ranks, workers = world_size(config.parallel), config.rollout.engines * config.rollout.tensor
    if transport == "ipc" and ranks != workers:
        yield (
            f"weights.transport=ipc needs an engine's process on every training rank's device: {ranks} ranks, and "
            f"rollout.engines={config.rollout.engines} x rollout.tensor={config.rollout.tensor} = {workers}"
        )
    if config.weights.verify == "checksums":
        yield f"weights.verify=checksums compares bytes on the host, and weights.transport={transport} sends none there"
