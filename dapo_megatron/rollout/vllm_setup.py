"""How vLLM is set up: the environment of its process and the arguments of its engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_megatron.config.schema import Config

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

WORKER_EXTENSION = "dapo_megatron.rollout.worker_extension.RolloutWorkerExtension"
CPU_PREFILL_TOKENS = 4096
"""Prompt tokens in one step on the CPU (more if one prompt may be longer: prompts are never split there)."""


def engine_environment(device: str, cpu_threads: int = 1) -> dict[str, str]:
    """Environment of a process that will hold a `RolloutEngine`, to be set before torch or vLLM is imported.

    Args:
        device: `cpu` or `cuda`.
        cpu_threads: `rollout.cpu_threads`.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dapo_megatron", "vllm")
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process
        "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", str(cache)),  # warm: 2 s to start instead of 12
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        environment |= {
            "TORCH_COMPILE_DISABLE": "1",  # compiling the rank of a log-prob takes 15 s
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines and training actors share the cores
            "OMP_NUM_THREADS": str(cpu_threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # spinning beside busy training actors costs a factor of ten
        }
    return environment


def build_vllm_engine(config: Config, hf_folder: str, device: str) -> LLMEngine:
    """Load the model of `hf_folder` into a vLLM engine in this process.

    Raises:
        ValueError: prompt + response exceed the model's window, vLLM cannot run its head size, or vLLM refuses another
            setting.
    """
    from transformers import AutoConfig
    from vllm import EngineArgs
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.v1.engine.llm_engine import LLMEngine

    from dapo_megatron.rollout.block_fp8_loader import LOAD_FORMAT
    from dapo_megatron.weights.block_fp8 import quantization_config
    from dapo_megatron.weights.hf_folder import HFFolder
    from dapo_megatron.weights.transport import engine_backend

    on_cpu = device == "cpu"
    hf = HFFolder(hf_folder)
    window = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    arguments: dict[str, Any] = {}
    if config.rollout.tensor > 1:
        # cluster/placement.py says where Ray's workers go.
        arguments["distributed_executor_backend"] = "mp" if on_cpu else "ray"
    if on_cpu:
        # A seeded request whose prompt is split dies on the CPU: its generator cannot be rewound.
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(window, CPU_PREFILL_TOKENS)}
        if hf.config.get("kv_lora_rank"):
            # vLLM's CPU kernel misreads the strided queries of latent attention: log-probs are off by 0.3.
            arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    if config.rollout.quantization == "fp8_block":
        shapes = {name: hf.shape(name) for name in hf.names()}
        arguments |= {
            "load_format": LOAD_FORMAT,
            "hf_overrides": {"quantization_config": quantization_config(shapes)},
        }
    else:  # vLLM quantises what it loads, now and at each sync
        arguments["quantization"] = config.rollout.quantization
    try:
        engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=hf_folder,
                tokenizer=config.model.tokenizer_path or hf_folder,
                generation_config="vllm",  # sampling defaults are ours; the folder's EOS ids still count
                dtype=config.precision.rollout_dtype,
                max_model_len=window,
                max_num_seqs=config.rollout.max_concurrent_samples,
                kv_cache_memory_bytes=config.rollout.kv_cache_bytes,
                tensor_parallel_size=config.rollout.tensor,
                enable_prefix_caching=config.rollout.enable_prefix_caching,
                enforce_eager=config.rollout.enforce_eager or on_cpu,
                enable_sleep_mode=not on_cpu,
                logprobs_mode="processed_logprobs",  # of the distribution sampled from, temperature included
                seed=config.trainer.seed,
                weight_transfer_config=WeightTransferConfig(backend=engine_backend(config.weights.transport)),
                worker_extension_cls=WORKER_EXTENSION,
                disable_log_stats=True,
                **arguments,
            )
        )
    except ValueError as error:
        if "max_model_len" not in str(error):
            raise
        model_window = AutoConfig.from_pretrained(hf_folder).get_text_config().max_position_embeddings
        raise ValueError(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {window} tokens: the model's window is "
            f"{model_window} (max_position_embeddings)"
        ) from error
    _check_head_size(engine, on_cpu)
    return engine


def _check_head_size(engine: LLMEngine, on_cpu: bool) -> None:
    """vLLM's Qwen2 ignores `head_dim` and would load a part of each projection without a word.

    Seen in this process alone: not in an engine of several.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    latent = engine.model_config.use_mla
    layers = engine.vllm_config.compilation_config.static_forward_context.values()
    built = {layer.head_size for layer in layers if hasattr(layer, "head_size")}
    wanted = engine.model_config.get_head_size()
    if built - {wanted} and not latent:
        raise ValueError(f"config.json has head_dim {wanted}; vLLM's model of this architecture uses {min(built)}")
    supported = (CPUMLABackend if latent else CPUAttentionBackend).get_supported_head_sizes()
    if on_cpu and not built <= set(supported):
        name = "kv_lora_rank + qk_rope_head_dim =" if latent else "head_dim"
        raise ValueError(f"{name} {min(built)}: vLLM's CPU attention knows {', '.join(map(str, supported))}")
