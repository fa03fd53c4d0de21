"""The training actor of one rank: log-probs, updates, and the weights for whoever needs them.

Loss, gradients and metrics are SUMS: the loss weights of the samples hold the denominators of the whole update, so
nothing here divides by micro-batches, tokens or ranks. All ranks call the same methods in the same order with the same
number of micro-batches.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from dapo_megatron.algorithm.loss import LossOutput, policy_loss
from dapo_megatron.config import layout
from dapo_megatron.config.schema import Config, ParallelConfig
from dapo_megatron.data.packing import alignment_of
from dapo_megatron.data.types import TrainingSample
from dapo_megatron.megatron.kernels import Kernels, kernels_in_use
from dapo_megatron.megatron.model import balance_experts, build_chunks
from dapo_megatron.megatron.offload import OffloadableState
from dapo_megatron.megatron.optimizer import build_optimizer, learning_rate
from dapo_megatron.megatron.packed import ContextPlace, PackedBatch, pack
from dapo_megatron.megatron.precision import data_parallel_settings
from dapo_megatron.models.registry import family_of
from dapo_megatron.weights.export import MegatronWeightSource
from dapo_megatron.weights.hf_folder import HFFolder, write_hf_folder
from dapo_megatron.weights.load import load_hf_weights, named_local_parameters

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

MicroBatches = list[list[TrainingSample]]

_SUMS = "tokens loss entropy kl_old ratio clip_low clip_high clip_dual kl_reference".split()


class MegatronActor:
    """One rank of the training actors.

    Args:
        config: the whole configuration.
        hf_folder: the initial policy, as a path or an open folder.
        rank, world_size: place among the training actors.
        master_address, master_port: where the ranks meet.

    Attributes:
        chunks: the DDP-wrapped model chunks of this rank.

    Raises:
        ValueError: an unusable model folder, a dtype or world size that does not fit.
    """

    def __init__(
        self,
        config: Config,
        hf_folder: str | HFFolder,
        *,
        rank: int,
        world_size: int,
        master_address: str,
        master_port: int,
    ) -> None:
        self._config = config
        self._source = HFFolder(hf_folder) if isinstance(hf_folder, str) else hf_folder
        self.family = family_of(self._source.config)
        self.dimensions = self.family.dimensions(self._source.config)
        self._dtype = _dtype(config.precision.params_dtype, "precision.params_dtype")
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._device.type == "cpu":
            torch.set_num_threads(config.cluster.cpu_threads_per_actor)
        initialize_parallel(config.parallel, rank, world_size, f"tcp://{master_address}:{master_port}")
        model_parallel_cuda_manual_seed(config.trainer.seed)

        chunks = build_chunks(self.family, self.dimensions, config, self._dtype)
        load_hf_weights(chunks, self._source, self.family, self.dimensions)
        self.chunks = _wrap(chunks, config)
        self._optimizer = build_optimizer(self.chunks, config.optimizer, self._dtype)
        self._reference: list[Tensor] | None = None
        if config.algorithm.kl.coefficient > 0:
            self._reference = [parameter.detach().clone() for _, parameter in named_local_parameters(self.chunks)]
        self._state = OffloadableState(self.chunks, self._optimizer, self._reference or ())
        self._skipped_in_a_row = 0
        self._alignment = alignment_of(config)

    @property
    def data_parallel_rank(self) -> int:
        """Which share of a batch is this rank's."""
        return parallel_state.get_data_parallel_rank()

    @property
    def answers_for_share(self) -> bool:
        """Whether this is the one rank of its share whose results are complete (last stage, first of TP and CP)."""
        return (
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )

    @property
    def kernels(self) -> Kernels:
        """Which library's kernels serve."""
        return kernels_in_use(self.chunks, self._optimizer)

    def offload(self, phases: Sequence[str]) -> dict[str, int]:
        """Free the device memory of phases; phase -> bytes freed (see OffloadableState)."""
        return self._state.offload(phases)

    def reload(self, phases: Sequence[str]) -> dict[str, int]:
        """Bring phases back; phase -> bytes taken."""
        return self._state.reload(phases)

    def log_probs(self, micro_batches: MicroBatches, *, reference: bool = False) -> list[list[np.ndarray]]:
        """Log-probs of the response tokens at the sampling temperature.

        Args:
            micro_batches: this rank's samples.
            reference: under the initial policy instead of the current one (needs a KL term).

        Returns:
            float32 [R] for each sample, nested as given; empty lists before the last pipeline stage.

        Raises:
            RuntimeError: the parameters are offloaded.
        """
        self._state.require("params")
        with self._reference_weights() if reference else contextlib.nullcontext(), torch.no_grad():
            results = self._run(micro_batches, _collect_log_probs, forward_only=True)
        return results if results else [[] for _ in micro_batches]

    def update(self, micro_batches: MicroBatches, *, step: int) -> dict[str, float]:
        """One optimizer update on the samples of all ranks.

        An update with no trained token, or whose gradient norm is not finite, changes nothing and is reported.

        Args:
            micro_batches: this rank's share, with old log-probs.
            step: the training step, from 1; sets the learning rate.

        Returns:
            algorithm/loss.py's sums over all ranks, and grad_norm, lr, skipped (0 or 1).

        Raises:
            RuntimeError: `optimizer.max_skipped_updates` non-finite gradient norms in a row; or something that an
                update needs is offloaded.
        """
        self._state.require("params", "grads", "optimizer")
        lr = learning_rate(self._config.optimizer, step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        if self._config.moe.aux_loss_coefficient:
            ranks_with_data = self._config.parallel.data
            balance_experts(self.chunks, self._config.moe.aux_loss_coefficient / (len(micro_batches) * ranks_with_data))
        sums = self._sum_over_ranks(self._run(micro_batches, self._read_loss, forward_only=False))
        updated, grad_norm = self._step() if sums["tokens"] else (False, 0.0)
        return sums | {"grad_norm": grad_norm, "lr": lr, "skipped": float(not updated)}

    def weight_source(self) -> MegatronWeightSource:
        """The current weights as full HF tensors in the rollout dtype; every pass reads them anew."""
        dtype = _dtype(self._config.precision.rollout_dtype, "precision.rollout_dtype")
        return MegatronWeightSource(self.chunks, self.family, self.dimensions, dtype)

    def export_hf(self, folder: Path) -> None:
        """Write the policy as an HF folder in the training dtype. All ranks call it, rank 0 writes.

        Raises:
            ValueError: the folder exists.
        """
        source = MegatronWeightSource(self.chunks, self.family, self.dimensions)
        tensors = iter(source)
        with self._state.on_device("params"):
            try:
                if source.yields:
                    write_hf_folder(Path(folder), tensors, self._source)
            finally:
                for _ in tensors:  # the other ranks send to the end, also after an error
                    pass
                dist.barrier()

    def _run(self, micro_batches: MicroBatches, read_output: Callable, *, forward_only: bool) -> list:
        """Megatron's schedule over the micro-batches; what `read_output(batch, output)` logs of each, in order."""
        temperature = self._config.rollout.sampling.temperature

        def forward_step(batches: Iterator[PackedBatch], model: Any) -> tuple[Any, Callable]:
            batch = next(batches)
            token_losses = None if forward_only else partial(self._token_losses, batch)
            return model(batch, temperature, token_losses), partial(read_output, batch)

        place = ContextPlace(parallel_state.get_context_parallel_rank(), self._config.parallel.context)
        batches = [pack(samples, self._device, self._alignment, place) for samples in micro_batches]
        iterators = [iter(batches) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=max(batch.tokens.numel() for batch in batches),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _token_losses(self, batch: PackedBatch, log_probs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        return self._policy_loss(batch, log_probs, entropy, rows).loss

    def _policy_loss(self, batch: PackedBatch, log_probs: Tensor, entropy: Tensor, rows: slice) -> LossOutput:
        """The loss of the response tokens `rows` of a micro-batch."""
        algorithm = self._config.algorithm
        correction, reference = batch.correction_weights, batch.reference_log_probs
        return policy_loss(
            log_probs,
            batch.old_log_probs[rows],
            batch.advantages[rows],
            batch.mask[rows],
            batch.loss_weights[rows],
            algorithm,
            correction_weights=None if correction is None else correction[rows],
            reference_log_probs=None if reference is None else reference[rows],
            entropy=entropy if algorithm.entropy_coefficient else entropy.detach(),
        )

    def _read_loss(
        self, batch: PackedBatch, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss, log_probs, entropy = output
        with torch.no_grad():
            sums = self._policy_loss(batch, log_probs, entropy, slice(None)).sums
        # Three values: of two, the schedule would divide the loss by the number of micro-batches.
        return loss, _no_tokens(loss), sums

    def _sum_over_ranks(self, results: list[dict[str, Tensor]]) -> dict[str, float]:
        names = [name for name in _SUMS if name != "kl_reference" or self._reference is not None]
        totals = torch.zeros(len(names), dtype=torch.float64, device=self._device)
        for sums in results:
            totals += torch.stack([sums[name] for name in names])
        # Stages before the last add zeros, and learn the sums.
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        dist.all_reduce(totals, group=parallel_state.get_pipeline_model_parallel_group())
        return dict(zip(names, totals.tolist(), strict=True))

    def _step(self) -> tuple[bool, float]:
        """Step unless the gradient norm is not finite: Megatron itself checks only where it scales the loss."""
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            self._count_skipped(grad_norm)
            return False, grad_norm
        self._skipped_in_a_row = 0
        self._optimizer.step()
        if self._config.parallel.overlap_param_gather:
            # Log-probs and weight syncs read the parameters next, not always through a forward pass.
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        return True, grad_norm

    def _count_skipped(self, grad_norm: float) -> None:
        names = (name for name, p in named_local_parameters(self.chunks) if not p.main_grad.isfinite().all())
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, next(names, None))
        name = next((name for name in found if name), "none: each gradient is finite, their norm is not")
        self._skipped_in_a_row += 1
        logger.warning("update skipped: gradient norm %s, first bad parameter: %s", grad_norm, name)
        if self._skipped_in_a_row >= self._config.optimizer.max_skipped_updates:
            raise RuntimeError(
                f"{self._skipped_in_a_row} updates in a row had a non-finite gradient norm; first bad parameter: {name}"
            )

    @contextlib.contextmanager
    def _reference_weights(self) -> Iterator[None]:
        if self._reference is None:
            raise ValueError("there is no reference policy: algorithm.kl.coefficient is 0")
        with self._state.on_device("reference"):
            self._swap_reference()
            try:
                yield
            finally:
                self._swap_reference()

    @torch.no_grad()
    def _swap_reference(self) -> None:
        assert self._reference is not None
        for (_, parameter), reference in zip(named_local_parameters(self.chunks), self._reference, strict=True):
            current = parameter.clone()
            parameter.copy_(reference)
            reference.copy_(current)


def initialize_parallel(parallel: ParallelConfig, rank: int, world_size: int, init_method: str) -> None:
    """torch.distributed and Megatron's process groups; what already exists in this process is kept.

    Raises:
        ValueError: the layout does not make the world size.
    """
    ranks = layout.world_size(parallel)
    if ranks != world_size:
        raise ValueError(
            f"parallel: data {parallel.data} x tensor {parallel.tensor} x pipeline {parallel.pipeline} x "
            f"context {parallel.context} = {ranks} ranks, but there are {world_size}"
        )
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor,
            create_gloo_process_groups=False,
        )


def _wrap(chunks: Sequence[Any], config: Config) -> list[Any]:
    """Megatron's DDP around each chunk, and what the schedules must know of it."""
    parallel = config.parallel
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.optimizer.main_grads_dtype == "float32",
        use_distributed_optimizer=config.optimizer.distributed,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        **data_parallel_settings(config.precision.fp8),
    )
    transformer = chunks[0].config
    wrapped = [
        DistributedDataParallel(transformer, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    transformer.finalize_model_grads_func = _sum_gradients
    if parallel.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        start_sync = [chunk.start_grad_sync for chunk in wrapped]
        transformer.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
        transformer.grad_sync_func = start_sync if len(wrapped) > 1 else start_sync[0]
    return wrapped


def _sum_gradients(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reduction over ranks without its division by tokens."""
    finalize_model_grads(model, None, **kwargs)


def _collect_log_probs(batch: PackedBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, list[np.ndarray]]:
    log_probs, _ = output
    total = sum(batch.response_lengths)
    if batch.response_lengths and parallel_state.get_context_parallel_world_size() > 1:
        # Each rank of the group has its part of every sequence.
        log_probs = log_probs.new_zeros(total).index_copy_(0, batch.response_places, log_probs)
        dist.all_reduce(log_probs, group=parallel_state.get_context_parallel_group())
    by_sample = np.split(log_probs.cpu().numpy(), np.cumsum(batch.response_lengths, dtype=np.int64))[:-1]
    return log_probs.new_zeros(()), _no_tokens(log_probs), by_sample


def _no_tokens(like: Tensor) -> Tensor:
    """The token count that the schedules ask for; nothing divides by it."""
    return torch.zeros((), dtype=torch.int, device=like.device)


def _dtype(name: str, key: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"{key}={name!r}: allowed are {', '.join(DTYPES)}")
    return DTYPES[name]
