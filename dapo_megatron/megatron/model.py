"""The policy: Megatron's GPTModel, built from an HF config, that returns log-probs of response tokens."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from dapo_megatron.config.layout import stage_layers
from dapo_megatron.config.schema import Config, FP8Config, MoEConfig, ParallelConfig, RecomputeConfig
from dapo_megatron.megatron.attention import SDPACoreAttention
from dapo_megatron.megatron.fp8_emulation import emulate_fp8
from dapo_megatron.megatron.kernels import rms_norm_class
from dapo_megatron.megatron.latent_attention import LatentSelfAttention
from dapo_megatron.megatron.logprob import TokenLosses, response_log_probs, response_loss
from dapo_megatron.megatron.packed import PackedBatch
from dapo_megatron.megatron.precision import Device, check_fp8, transformer_settings
from dapo_megatron.models.family import Dimensions, Family


class PolicyModel(GPTModel):
    """One model chunk. On the last pipeline stage it returns log-probs and entropies instead of logits.

    Args:
        vocab_size: the real vocabulary; Megatron's is padded to a multiple of the tensor-parallel size.
        Everything else is GPTModel's.
    """

    def __init__(
        self, config: TransformerConfig, spec: TransformerBlockSubmodules, vocab_size: int, **kwargs: Any
    ) -> None:
        ranks = config.tensor_model_parallel_size
        super().__init__(config, spec, -(-vocab_size // ranks) * ranks, **kwargs)
        self.real_vocab_size = vocab_size
        if self.post_process:
            # Called as a module, so that DDP's hooks see the output weight in use.
            self.output_layer.forward = self._response_log_probs

    def forward(  # type: ignore[override]
        self, batch: PackedBatch, temperature: float = 1.0, token_losses: TokenLosses | None = None
    ) -> Any:
        """One micro-batch -> (log_probs, entropy), float32 [R] each; hidden states before the last stage.

        With `token_losses` (see logprob.response_loss) -> (loss, log_probs, entropy); only the loss has gradients.
        """
        hidden = self.hidden_states(batch)
        return self.output_layer(hidden, batch, temperature, token_losses) if self.post_process else hidden

    def hidden_states(self, batch: PackedBatch) -> Tensor:
        """[T, 1, hidden_size], after the final norm on the last stage; with sequence parallelism this rank's part."""
        return super().forward(
            batch.tokens,
            batch.position_ids,
            None,
            packed_seq_params=batch.sequences,
            padding_mask=self._router_padding(batch) if self.config.num_moe_experts else None,
        )

    def _router_padding(self, batch: PackedBatch) -> Tensor:
        """Padding as the router takes it; with sequence parallelism core cuts out a rank's part on the first stage
        only."""
        if self.pre_process or not self.config.sequence_parallel:
            return batch.padding
        return scatter_to_sequence_parallel_region(batch.padding.T.contiguous()).T.contiguous()

    def output_weight(self) -> Tensor:
        """[padded vocabulary / TP, hidden_size], tied or not."""
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Ends GPTModel.forward where it would compute the logits of every position."""
        return hidden_states

    def _response_log_probs(
        self, hidden: Tensor, batch: PackedBatch, temperature: float, token_losses: TokenLosses | None
    ) -> tuple[Tensor, ...]:
        sequence_parallel = self.config.sequence_parallel
        if sequence_parallel:
            # Its backward pass sums the ranks' gradients and gives each rank its part.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        tokens = (
            hidden.flatten(0, 1),
            batch.response_positions,
            self.output_weight(),
            batch.targets,
            temperature,
            self.real_vocab_size,
        )
        group = self.pg_collection.tp
        if token_losses is None:
            return response_log_probs(*tokens, group, reduce_hidden_grad=not sequence_parallel)
        return response_loss(*tokens, token_losses, group, reduce_hidden_grad=not sequence_parallel)


def build_chunks(
    family: Family, dimensions: Dimensions, config: Config, params_dtype: torch.dtype
) -> list[PolicyModel]:
    """This rank's model chunks with uninitialised weights. Megatron's process groups must exist."""
    on_cuda = torch.cuda.is_available()
    check_fp8(config.precision.fp8, Device.here())
    # Emulation replaces core's own linear layers.
    has_transformer_engine = on_cuda and importlib.util.find_spec("transformer_engine") is not None
    transformer_engine = has_transformer_engine and not config.precision.fp8.emulate
    transformer = transformer_config(family, dimensions, config, params_dtype, transformer_engine)
    stages = range(config.parallel.virtual_pipeline) if config.parallel.virtual_pipeline else [None]
    chunks = []
    for stage in stages:
        chunk = PolicyModel(
            transformer,
            layer_spec(transformer, config.precision.fp8, transformer_engine, stage),
            dimensions.vocab_size,
            max_sequence_length=dimensions.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=dimensions.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=dimensions.rope_theta,
            rope_scaling=dimensions.llama3_rope_factor is not None,
            rope_scaling_factor=dimensions.llama3_rope_factor or 1.0,
            vp_stage=stage,
        )
        _mark_tensor_parallel(chunk)
        # Torch's norms are built in float32 whatever params_dtype says.
        chunk = chunk.to(params_dtype).cuda() if on_cuda else chunk.to(params_dtype)
        _fix_router_biases(chunk)
        chunks.append(chunk)
    return chunks


def transformer_config(
    family: Family, dimensions: Dimensions, config: Config, params_dtype: torch.dtype, transformer_engine: bool
) -> TransformerConfig:
    """Megatron's configuration of the model in the layout of this run."""
    on_cuda = torch.cuda.is_available()
    parallel = config.parallel
    if dimensions.latent and config.precision.fp8.emulate:
        raise ValueError("precision.fp8.emulate=true is not supported for multi-head latent attention: set it to false")
    settings = (MLATransformerConfig if dimensions.latent else TransformerConfig)(
        **family.transformer_kwargs(dimensions),
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=params_dtype,
        pipeline_dtype=params_dtype,
        bf16=params_dtype == torch.bfloat16,
        variable_seq_lengths=True,
        # With the defaults, interleaved stages run and give wrong gradients.
        overlap_p2p_comm=parallel.virtual_pipeline is not None,
        batch_p2p_comm=parallel.virtual_pipeline is None,
        # The loss weights hold the denominators of the whole update: gradients are summed, never averaged.
        calculate_per_token_loss=True,
        perform_initialization=False,
        use_cpu_initialization=not on_cuda,
        # Fused, Megatron's latent attention knows YaRN alone.
        apply_rope_fusion=transformer_engine and not dimensions.latent,
        bias_activation_fusion=on_cuda,
        bias_dropout_fusion=on_cuda,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        pipeline_model_parallel_layout=_uneven_stages(dimensions.layers, parallel),
        **transformer_settings(config.precision.fp8),
        **_moe_kwargs(config.moe, transformer_engine),
        **_recompute_kwargs(parallel.recompute),
    )
    if settings.virtual_pipeline_model_parallel_size is not None:
        assert settings.overlap_p2p_comm and not settings.batch_p2p_comm, "interleaved stages would be silently wrong"
    return settings


def _uneven_stages(layers: int, parallel: ParallelConfig) -> list[list[str]] | None:
    """Megatron's layout of model chunks where they are not all alike, which it takes without being told."""
    counts = stage_layers(layers, parallel.pipeline, parallel.virtual_pipeline)
    if len(set(counts)) == 1:
        return None
    stages = [["decoder"] * count for count in counts]
    return [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]


def _moe_kwargs(moe: MoEConfig, transformer_engine: bool) -> dict[str, Any]:
    return {
        "moe_token_dispatcher_type": moe.token_dispatcher,
        "moe_router_dtype": {"float32": "fp32", "float64": "fp64", "params": None}[moe.router_dtype],
        "moe_router_load_balancing_type": "aux_loss" if moe.aux_loss_coefficient else "none",
        "moe_aux_loss_coeff": moe.aux_loss_coefficient,
        "moe_grouped_gemm": moe.grouped_gemm and transformer_engine,
    }


def _recompute_kwargs(recompute: RecomputeConfig) -> dict[str, Any]:
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": recompute.method,
        "recompute_num_layers": recompute.layers,
    }


def _mark_tensor_parallel(chunk: PolicyModel) -> None:
    """What core 0.16 leaves to its initialisation: unmarked, the gradient norm would count the first rank only."""
    dims = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in chunk.modules():
        for kind, dim in dims.items():
            weight = module.weight if isinstance(module, kind) else None
            if weight is not None and not hasattr(weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(weight, True, dim, 1)
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name:
            # Without expert parallelism core would sum the gradients over the dense layers' group alone, although
            # tensor-parallel ranks hold copies of the experts and see different tokens.
            parameter.allreduce = False  # type: ignore[attr-defined]


def _fix_router_biases(chunk: PolicyModel) -> None:
    """Keep them in float32, and leave out the count of tokens that would move them: core's fails on padding."""
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            module._maintain_float32_expert_bias()
            module._apply_expert_bias = _count_nothing


def _count_nothing(*_: Any, **__: Any) -> None:
    pass


def balance_experts(chunks: Sequence[Any], coefficient: float) -> None:
    """Weigh the load-balancing loss of one micro-batch; gradients are summed over micro-batches and ranks.

    Core would multiply it by the tokens of the rank, to undo a division by all tokens that never happens here.
    """
    for chunk in chunks:
        chunk.config.moe_aux_loss_coeff = coefficient
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.calculate_per_token_loss = False


class RMSNorm(rms_norm_class()):  # type: ignore[misc]
    """Torch's or Apex's norm as Megatron builds one; core's own wrapper refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        # Each rank normalises its part of the sequence: the gradients are summed over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel


def layer_spec(
    transformer: TransformerConfig, fp8: FP8Config, transformer_engine: bool, virtual_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of this rank's stage: Transformer Engine's, or core's local ones with SDPA and our norms."""
    block = get_gpt_decoder_block_spec(transformer, transformer_engine, normalization="RMSNorm", vp_stage=virtual_stage)
    # Layers of one kind share a spec.
    block.layer_specs = [copy.deepcopy(layer) for layer in block.layer_specs]
    for layer in block.layer_specs:
        if transformer.multi_latent_attention:
            layer.submodules.self_attention.module = LatentSelfAttention
        if not transformer_engine:
            _use_our_modules(layer.submodules, transformer)
    if transformer_engine:
        return block
    block.layer_norm = RMSNorm
    if fp8.emulate:
        first_layer = get_transformer_layer_offset(transformer, vp_stage=virtual_stage)
        emulate_fp8(block, fp8, first_layer, transformer.num_layers)
    return block


def _use_our_modules(layer: Any, transformer: TransformerConfig) -> None:
    """SDPA and our norms, which a distributed checkpoint holds under the names of Transformer Engine's layer spec."""
    attention = layer.self_attention.submodules
    attention.core_attention = SDPACoreAttention
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if transformer.multi_latent_attention:
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    elif transformer.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
