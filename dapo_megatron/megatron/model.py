"""The policy: Megatron's GPTModel, built from an HF config, that returns log-probs of response tokens."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import Tensor

from dapo_megatron.config.schema import ParallelConfig
from dapo_megatron.megatron.attention import SDPACoreAttention
from dapo_megatron.megatron.logprob import response_log_probs
from dapo_megatron.megatron.packed import PackedBatch
from dapo_megatron.models.family import Dimensions, Family


class PolicyModel(GPTModel):
    """One model chunk. On the last pipeline stage it returns log-probs and entropies instead of logits.

    Args:
        vocab_size: the real vocabulary; Megatron's is padded to a multiple of the tensor-parallel size.
        Everything else is GPTModel's.
    """

    def __init__(self, config: TransformerConfig, spec: ModuleSpec, vocab_size: int, **kwargs: Any) -> None:
        ranks = config.tensor_model_parallel_size
        super().__init__(config, spec, -(-vocab_size // ranks) * ranks, **kwargs)
        self.real_vocab_size = vocab_size
        if self.post_process:
            # Called as a module, so that DDP's hooks see the output weight in use.
            self.output_layer.forward = self._response_log_probs

    def forward(self, batch: PackedBatch, temperature: float = 1.0) -> Any:  # type: ignore[override]
        """One micro-batch -> (log_probs, entropy), float32 [R] each; hidden states before the last stage."""
        hidden = self.hidden_states(batch)
        return self.output_layer(hidden, batch, temperature) if self.post_process else hidden

    def hidden_states(self, batch: PackedBatch) -> Tensor:
        """[T, 1, hidden_size], after the final norm on the last stage."""
        return super().forward(batch.tokens, batch.position_ids, None, packed_seq_params=batch.sequences)

    def output_weight(self) -> Tensor:
        """[padded vocabulary / TP, hidden_size], tied or not."""
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Ends GPTModel.forward where it would compute the logits of every position."""
        return hidden_states

    def _response_log_probs(self, hidden: Tensor, batch: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
        return response_log_probs(
            hidden.flatten(0, 1),
            batch.response_positions,
            self.output_weight(),
            batch.targets,
            temperature,
            self.real_vocab_size,
            self.pg_collection.tp,
        )


def build_chunks(
    family: Family, dimensions: Dimensions, parallel: ParallelConfig, params_dtype: torch.dtype
) -> list[PolicyModel]:
    """This rank's model chunks with uninitialised weights. Megatron's process groups must exist."""
    on_cuda = torch.cuda.is_available()
    transformer_engine = on_cuda and importlib.util.find_spec("transformer_engine") is not None
    config = TransformerConfig(
        **family.transformer_kwargs(dimensions),
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=params_dtype,
        pipeline_dtype=params_dtype,
        bf16=params_dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the only one that takes variable lengths
        # With the defaults, interleaved stages run and give wrong gradients.
        overlap_p2p_comm=parallel.virtual_pipeline is not None,
        batch_p2p_comm=parallel.virtual_pipeline is None,
        # The loss weights hold the denominators of the whole update: gradients are summed, never averaged.
        calculate_per_token_loss=True,
        perform_initialization=False,
        use_cpu_initialization=not on_cuda,
        apply_rope_fusion=transformer_engine,
        bias_activation_fusion=on_cuda,
        bias_dropout_fusion=on_cuda,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    stages = range(parallel.virtual_pipeline) if parallel.virtual_pipeline else [None]
    chunks = []
    for stage in stages:
        chunk = PolicyModel(
            config,
            _layer_spec(transformer_engine),
            dimensions.vocab_size,
            max_sequence_length=dimensions.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=dimensions.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=dimensions.rope_theta,
            vp_stage=stage,
        )
        _mark_tensor_parallel(chunk)
        # Torch's norms are built in float32 whatever params_dtype says.
        chunks.append(chunk.to(params_dtype).cuda() if on_cuda else chunk.to(params_dtype))
    return chunks


def _mark_tensor_parallel(chunk: PolicyModel) -> None:
    """What core's initialisation does on the side: unmarked, the gradient norm would count the first rank only."""
    dims = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in chunk.modules():
        if type(module) in dims and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, True, dims[type(module)], 1)


def _layer_spec(transformer_engine: bool) -> ModuleSpec:
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec()
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = SDPACoreAttention
    return spec
