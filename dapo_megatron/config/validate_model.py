"""What the configuration needs on the disk, and what it asks of the model, by the model's own config.json."""

from __future__ import annotations

import glob
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dapo_megatron.config.layout import ModelSizes, broken_rules, nearest_layouts, overrides, world_size
from dapo_megatron.config.schema import Config, DatasetConfig, ParallelConfig
from dapo_megatron.config.validate import FP8_SIZE_MULTIPLE, PACKAGE_PREFIX, package_of, raise_all


def validate_files(config: Config) -> None:
    """Check that the model, its tokenizer and the datasets are there, before anything heavy starts.

    Raises:
        ValueError: lists every missing file, with the command that makes it where the configuration names one.
    """
    problems = [*_model_files(config), *_dataset_files("data.train", config.data.train)]
    for name, each in config.evaluation.sets.items():
        problems += _dataset_files(f"evaluation.sets.{name}.dataset", each.dataset)
    raise_all(problems)
    if config.model.gguf_file is None:
        path = Path(config.model.path) / "config.json"
        try:
            hf_config = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
        validate_model(config, hf_config)


def validate_model(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Check that the model can be laid out so, and that the longest prompt with the longest response fits its window.

    Args:
        hf_config: the content of the model's config.json.

    Raises:
        ValueError: every rule that is broken, with the numbers, and the nearest layouts that work.
    """
    problems = []
    sizes = ModelSizes.of(hf_config)
    if sizes is not None:
        problems += [*_layout_of_model(config, sizes), *_fp8_of_model(config, hf_config, sizes)]
        problems += _engine_of_model(config, sizes)
    window = hf_config.get("max_position_embeddings")
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    if isinstance(window, int) and prompt + response > window:
        problems.append(
            f"data.max_prompt_tokens={prompt} + rollout.max_response_tokens={response} = {prompt + response} tokens "
            f"exceed the model's window of {window} (max_position_embeddings): "
            f"lower one of them by at least {prompt + response - window}"
        )
    sliding = hf_config.get("sliding_window") if hf_config.get("use_sliding_window", True) else None
    if isinstance(sliding, int) and prompt + response > sliding:
        problems.append(
            f"data.max_prompt_tokens={prompt} + rollout.max_response_tokens={response} = {prompt + response} tokens "
            f"exceed the model's sliding window of {sliding} (sliding_window), and training attends to everything: "
            f"lower one of them by at least {prompt + response - sliding}"
        )
    raise_all(problems)


def _layout_of_model(config: Config, sizes: ModelSizes) -> Iterator[str]:
    given = config.parallel
    broken = "; ".join(broken_rules(given, sizes))
    if not broken:
        return
    nearest = nearest_layouts(given, sizes, most_data=config.trainer.update_batch_size)
    if nearest:
        lines = [f"{broken}. The nearest layouts of {world_size(nearest[0])} ranks that work:"]
        yield "\n    ".join([*lines, *(overrides(layout, given) for layout in nearest)])
    else:
        yield broken


def _engine_of_model(config: Config, sizes: ModelSizes) -> Iterator[str]:
    tensor = config.rollout.tensor
    if sizes.heads % tensor:
        valid = [size for size in range(1, sizes.heads + 1) if sizes.heads % size == 0]
        yield (
            f"rollout.tensor={tensor} does not divide the model's {sizes.heads} attention heads: the nearest that does "
            f"is {min(valid, key=lambda size: abs(size - tensor))}"
        )
    if config.rollout.quantization is not None and config.cluster.device == "cpu" and sizes.experts:
        yield (
            f"rollout.quantization={config.rollout.quantization} on the CPU is for dense models, and this one has "
            f"{sizes.experts} experts: null, or a CUDA device"
        )


def _fp8_of_model(config: Config, hf_config: Mapping[str, Any], sizes: ModelSizes) -> Iterator[str]:
    """Megatron's bound on layers in bf16 and Transformer Engine's on sizes; emulation has none."""
    fp8, pipeline = config.precision.fp8, config.parallel.pipeline
    if fp8.recipe is None or fp8.emulate:
        return
    most = sizes.layers // pipeline
    for name in ("first_layers_bf16", "last_layers_bf16"):
        if getattr(fp8, name) > most:
            yield (
                f"precision.fp8.{name}={getattr(fp8, name)} is more than a pipeline stage has layers: at most {most} "
                f"({sizes.layers} layers / parallel.pipeline={pipeline})"
            )
    multiple = FP8_SIZE_MULTIPLE.get(fp8.recipe, 1)
    odd = [f"{what} {size}" for what, size in _linear_sizes(config.parallel, hf_config, sizes) if size % multiple]
    if odd:
        yield (
            f"precision.fp8.recipe={fp8.recipe} multiplies matrices whose sizes on a rank are multiples of {multiple}, "
            f"and here are: {', '.join(odd)}. Choose another parallel.tensor or recipe "
            f"({', '.join(f'{name} {size}' for name, size in FP8_SIZE_MULTIPLE.items())})"
        )


def _linear_sizes(
    parallel: ParallelConfig, hf_config: Mapping[str, Any], sizes: ModelSizes
) -> Iterator[tuple[str, int]]:
    """Rows and columns of the decoder's linear layers on one rank."""
    hidden = hf_config.get("hidden_size")
    if not isinstance(hidden, int) or hf_config.get("kv_lora_rank"):
        return  # Transformer Engine checks those of latent attention itself.
    head_dim = hf_config.get("head_dim") or hidden // sizes.heads
    yield "hidden_size", hidden
    yield "queries", sizes.heads * head_dim // parallel.tensor
    yield "queries, keys and values", (sizes.heads + 2 * sizes.kv_heads) * head_dim // parallel.tensor
    yield "MLP", sizes.ffn_hidden_size // parallel.tensor
    yield "expert", sizes.moe_ffn_hidden_size // parallel.expert_tensor


def _model_files(config: Config) -> Iterator[str]:
    model = config.model
    how = f"; make it with: {model.made_by}" if model.made_by else ""
    folder = Path(model.path)
    if model.path.startswith(PACKAGE_PREFIX):
        spec = importlib.util.find_spec(package_of(model.path))
        if spec is None or not spec.submodule_search_locations:
            yield f"model.path={model.path}: the package {package_of(model.path)} is not installed{how}"
            return
        folder = Path(spec.submodule_search_locations[0])
    if not folder.is_dir():
        yield f"model.path={model.path}: there is no such folder{how}"
        return
    if model.gguf_file is not None:
        if not (folder / model.gguf_file).is_file():
            there = ", ".join(sorted(file.name for file in folder.glob("*.gguf"))) or "none"
            yield f"model.gguf_file={model.gguf_file} is not in {folder}; GGUF files there: {there}{how}"
    elif not (folder / "config.json").is_file():
        yield f"model.path={model.path} is not an HF model folder: it has no config.json{how}"
    elif not any(folder.glob("*.safetensors")):
        yield f"model.path={model.path} has no *.safetensors file{how}"
    if model.tokenizer_path is not None and not Path(model.tokenizer_path).is_dir():
        yield f"model.tokenizer_path={model.tokenizer_path}: there is no such folder"


def _dataset_files(path: str, dataset: DatasetConfig) -> Iterator[str]:
    if not Path(dataset.path).exists() and not glob.glob(dataset.path, recursive=True):
        yield f"{path}.path={dataset.path}: there is no such file or folder"
