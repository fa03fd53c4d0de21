"""The typed configuration: one dataclass a group, every field documented.

Hydra files under conf/ compose onto `Config`; a key that is not here fails. What a single field allows is
stated beside it; what several fields must satisfy together is checked in validate.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Aggregation(StrEnum):
    """How token losses become one number (the denominators belong to the whole update)."""

    token_mean = "token_mean"
    prompt_token_mean = "prompt_token_mean"
    seq_mean_token_mean = "seq_mean_token_mean"
    seq_mean_token_sum = "seq_mean_token_sum"
    seq_mean_token_sum_norm = "seq_mean_token_sum_norm"


class Baseline(StrEnum):
    """What a sample's reward is compared with inside its group."""

    group_mean = "group_mean"
    leave_one_out = "leave_one_out"


class KLEstimator(StrEnum):
    """Estimators of KL(policy || reference) from one sampled token; k1 has no expected gradient in a loss."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class CorrectionKind(StrEnum):
    """Train / rollout mismatch correction: none, truncated importance sampling, masked importance sampling."""

    none = "none"
    tis = "tis"
    mis = "mis"


class CorrectionLevel(StrEnum):
    """What one importance weight covers: a token, a sample (product), a sample (geometric mean)."""

    token = "token"
    sequence = "sequence"
    sequence_geometric = "sequence_geometric"


class OldLogProbs(StrEnum):
    """Where the log-probs of the policy before the step's updates come from."""

    recompute = "recompute"
    rollout = "rollout"


class Acceptance(StrEnum):
    """Which accepted groups make the batch. `first_finished` is faster on long tails and biased to short ones."""

    stream_order = "stream_order"
    first_finished = "first_finished"


class BudgetExhausted(StrEnum):
    """What happens when a step has spent `max_prompts_per_step` without filling its batch."""

    train_partial = "train_partial"
    raise_error = "raise"


class Placement(StrEnum):
    """Which devices training ranks and rollout engines have."""

    colocated = "colocated"
    """The same ones: they take turns, and their memory moves (trainer/hybrid_engine.py)."""

    disaggregated = "disaggregated"
    """Each their own: nothing moves."""


class OnOverlongPrompt(StrEnum):
    """What happens to a prompt longer than `data.max_prompt_tokens`."""

    refuse = "refuse"
    drop = "drop"


class OnBadRow(StrEnum):
    """What happens to a dataset row that has no usable prompt or ground truth."""

    refuse = "refuse"
    skip = "skip"


class Packing(StrEnum):
    """How samples are packed into micro-batches; `balanced` also evens out the FLOPs of the data-parallel ranks."""

    first_fit_decreasing = "first_fit_decreasing"
    balanced = "balanced"


@dataclass
class ModelConfig:
    """The policy."""

    path: str = ""
    """An HF model folder, or `package:NAME` for files shipped inside an installed Python package."""

    gguf_file: str | None = None
    """Name of a GGUF file inside `path`; it is converted once to an HF folder under `cache_dir`."""

    tokenizer_path: str | None = None
    """Folder of the tokenizer; `path` if null."""

    cache_dir: str = ".cache/models"
    """Where converted models are kept."""

    made_by: str | None = None
    """The command that makes `path`, named in the error when the folder is missing."""


@dataclass
class RecomputeConfig:
    """Activations that backward computes again instead of keeping them (Megatron's words and choices)."""

    granularity: str = "none"
    """`none`, `selective` (only `modules`) or `full` (whole layers)."""

    modules: list[str] = field(default_factory=lambda: ["core_attn"])
    """With `selective`: core_attn, layernorm, mlp, moe, moe_act, shared_experts or mla_up_proj."""

    method: str = "uniform"
    """With `full`: `uniform` cuts all layers into units of `layers`; `block` recomputes `layers` a pipeline stage."""

    layers: int = 1
    """With `full`: see `method`."""


@dataclass
class MoEConfig:
    """How mixture-of-experts layers are trained; ignored by dense models."""

    aux_loss_coefficient: float = 0.0
    """Weight of the load-balancing loss, a mean over the micro-batches of an update; 0 turns it off. It is computed
    inside a micro-batch, so that it depends on how samples are packed."""

    router_dtype: str = "float32"
    """Number format of the routing: float32, float64, or `params` for that of the parameters."""

    token_dispatcher: str = "alltoall"
    """`alltoall`, or `flex` (DeepEP, CUDA only); Megatron's `allgather` does not take packed sequences."""

    grouped_gemm: bool = True
    """All experts of a rank in one grouped product where Transformer Engine is there; else one by one."""


@dataclass
class ParallelConfig:
    """Layout of the training actors. World size = data x tensor x pipeline x context."""

    tensor: int = 1
    """Tensor-parallel size (TP)."""

    pipeline: int = 1
    """Pipeline-parallel size (PP)."""

    virtual_pipeline: int | None = None
    """Model chunks per pipeline rank (VPP); null for one."""

    context: int = 1
    """Context-parallel size (CP)."""

    expert: int = 1
    """Expert-parallel size (EP)."""

    expert_tensor: int = 1
    """Tensor-parallel size inside an expert (ETP)."""

    data: int = 1
    """Data-parallel size (DP)."""

    sequence_parallel: bool = False
    """Shard activations along the sequence in the tensor-parallel group (SP)."""

    max_tokens_per_micro_batch: int = 16384
    """Whole sequences are packed into micro-batches of at most this many tokens; a longer sequence stands alone."""

    packing: Packing = Packing.balanced
    """How samples are packed into micro-batches."""

    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass still runs."""

    overlap_param_gather: bool = False
    """Gather updated parameters while the next forward pass already runs."""

    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)


@dataclass
class FP8Config:
    """Linear layers in FP8 through Transformer Engine."""

    recipe: str | None = None
    """`delayed` (a scale a tensor, from the largest values of earlier micro-batches), `tensorwise` (a scale a tensor,
    from the tensor itself), `blockwise` (1 x 128 for activations, 128 x 128 for weights; Hopper), `mxfp8` (1 x 32;
    Blackwell); null for none."""

    format: str = "e4m3"
    """`e4m3` for all tensors, or `hybrid`: e5m2 for gradients."""

    params: bool = False
    """Keep the parameters of the linear layers in FP8 (the float32 main parameters stay in the optimizer)."""

    first_layers_bf16: int = 0
    """Layers at the start of the model that stay in the parameters' dtype; not with `delayed`."""

    last_layers_bf16: int = 0
    """Layers at the end of the model that stay in the parameters' dtype; not with `delayed`."""

    amax_history_len: int = 1024
    """With `delayed`: micro-batches whose largest values are remembered."""

    amax_compute_algo: str = "max"
    """With `delayed`: `max` of the history, or `most_recent`."""

    margin: int = 0
    """With `delayed`: scales are smaller by 2^margin."""

    power_of_two_scales: bool = False
    """With `blockwise`: scales are powers of two (on Blackwell they always are) instead of any float32."""

    emulate: bool = False
    """Round to FP8 and multiply in the parameters' dtype instead: the recipe's numerics on any device, slowly."""


@dataclass
class PrecisionConfig:
    """Number formats of training and of the rollout engine."""

    params_dtype: str = "bfloat16"
    """Training parameters: float32 or bfloat16 (then with float32 main parameters and gradients)."""

    rollout_dtype: str = "bfloat16"
    """The rollout engine's weights: float32 or bfloat16."""

    fp8: FP8Config = field(default_factory=FP8Config)


@dataclass
class ClipConfig:
    """Clip-Higher: the trust region of the ratio is [1 - low, 1 + high]."""

    low: float = 0.2
    """Lower clip range, > 0."""

    high: float = 0.28
    """Upper clip range, > 0."""

    dual: float | None = 10.0
    """Bound c > 1 on the loss of tokens with a negative advantage (dual clip); null turns it off."""


@dataclass
class AdvantageConfig:
    """Group-relative advantage."""

    baseline: Baseline = Baseline.group_mean
    """`leave_one_out`: the mean of the others."""

    divide_by_std: bool = True
    """Divide by the group's standard deviation (n - 1) + 1e-6; false is Dr.GRPO."""


@dataclass
class KLConfig:
    """KL against a frozen reference policy (the policy at the start of the run)."""

    coefficient: float = 0.0
    """beta; 0 turns the term and the reference model off."""

    estimator: KLEstimator = KLEstimator.k3
    """k2 or k3; k1 is refused in a loss."""


@dataclass
class RewardShapingConfig:
    """From a verdict to the reward of a sample."""

    right: float = 1.0
    """Base reward of a right answer."""

    wrong: float = -1.0
    """Base reward of anything else."""


@dataclass
class OverlongConfig:
    """Overlong reward shaping. Lmax is `max_response_tokens`, Lbuf is `buffer_tokens`."""

    penalty: bool = True
    """Soft penalty: 0 up to Lmax - Lbuf, falling linearly to -1 at Lmax (times `penalty_factor`)."""

    max_response_tokens: int | None = None
    """Lmax; null takes `rollout.max_response_tokens`."""

    buffer_tokens: int = 4096
    """Lbuf, between 1 and Lmax."""

    penalty_factor: float = 1.0
    """Scale of the penalty."""

    floor: bool = True
    """Never below -1 x `penalty_factor` (the paper); false continues the line (verl, NeMo-RL)."""

    filter: bool = False
    """Overlong filtering: a truncated sample keeps its place in the group statistics but is not trained on."""


@dataclass
class FilteringConfig:
    """Dynamic sampling: groups whose accuracies carry no signal are replaced by further prompts."""

    enabled: bool = True
    """Off: every group is kept."""

    pass_rate_low: float | None = None
    """With `pass_rate_high`: keep a group iff its mean accuracy lies in [low, high]; null: iff not all equal."""

    pass_rate_high: float | None = None
    """See `pass_rate_low`."""

    acceptance: Acceptance = Acceptance.stream_order
    """Which accepted groups make the batch."""

    max_prompts_per_step: int | None = None
    """Budget of prompts that a step may finish; null: 10 x `trainer.train_batch_size`."""

    budget_exhausted: BudgetExhausted = BudgetExhausted.train_partial
    """Train what there is, with a warning, or raise."""


@dataclass
class CorrectionConfig:
    """Rollout correction: rho = exp(logp_old - logp_rollout)."""

    kind: CorrectionKind = CorrectionKind.none
    """`tis`: min(rho, cap). `mis`: rho inside [low, high], else 0."""

    level: CorrectionLevel = CorrectionLevel.token
    """What one weight covers."""

    cap: float = 2.0
    """C of `tis`, > 0."""

    low: float = 0.5
    """Lower end of `mis`."""

    high: float = 5.0
    """Upper end of `mis`."""


@dataclass
class AlgorithmConfig:
    """DAPO and its relatives; the formulas are in dapo_megatron/algorithm/."""

    clip: ClipConfig = field(default_factory=ClipConfig)
    aggregation: Aggregation = Aggregation.token_mean
    """Token-level policy gradient loss is `token_mean`."""

    loss_norm_tokens: int | None = None
    """Divisor of `seq_mean_token_sum_norm`; null takes `rollout.max_response_tokens`."""

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    entropy_coefficient: float = 0.0
    """Entropy bonus; 0 turns the term off."""

    reward: RewardShapingConfig = field(default_factory=RewardShapingConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    filtering: FilteringConfig = field(default_factory=FilteringConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    old_log_probs: OldLogProbs = OldLogProbs.recompute


@dataclass
class OptimizerConfig:
    """AdamW; the learning rate is warmed up linearly over steps and then constant, or decays."""

    lr: float = 1e-6
    """Peak learning rate."""

    warmup_steps: int = 20
    """Steps (not updates) until the peak; 0 starts at the peak."""

    decay: str = "constant"
    """After the warm-up: `constant`, `linear` or `cosine` (down to `min_lr`)."""

    decay_steps: int | None = None
    """The step, counted from the first of the run, that reaches `min_lr`; later steps stay there."""

    min_lr: float = 0.0
    """Where a decay ends."""

    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Adam's decay rates of the two moments."""

    eps: float = 1e-8
    clip_grad: float = 1.0
    """Global gradient-norm bound; 0 turns clipping off."""

    distributed: bool = True
    """Shard the optimizer state over the data-parallel ranks (Megatron's distributed optimizer)."""

    precision_aware: bool = False
    """Transformer Engine's Adam keeps the state, in the formats below; of float32 main parameters only the 16 bits that
    the bfloat16 parameters lack. Needs Transformer Engine, bfloat16 parameters and `distributed`."""

    main_grads_dtype: str = "float32"
    """Gradients as they are accumulated and reduced: float32, or bfloat16 with `precision_aware`."""

    main_params_dtype: str = "float32"
    """Main parameters: float32, or float16 with `precision_aware`."""

    exp_avg_dtype: str = "float32"
    """Adam's first moment: float32, or bfloat16, float16, float8 with `precision_aware`."""

    exp_avg_sq_dtype: str = "float32"
    """Adam's second moment, as the first."""

    max_skipped_updates: int = 5
    """Abort after this many updates in a row with a non-finite gradient norm."""


@dataclass
class SamplingConfig:
    """How responses are sampled. With top_p / top_k below full, ratios are biased: refused in training."""

    temperature: float = 1.0
    """> 0 in training; 0 is greedy (evaluation only)."""

    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""

    allow_biased_ratios: bool = False
    """Accept top_p / top_k below full in training."""


@dataclass
class RolloutConfig:
    """The vLLM engines."""

    engines: int = 1
    """Number of engine replicas."""

    samples_per_prompt: int = 16
    """n, the size of a group."""

    max_response_tokens: int = 20480
    """A response is cut here (finish_reason "length")."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    stop: list[str] = field(default_factory=list)
    """Strings that end a response, beside the model's end-of-sequence tokens."""

    max_concurrent_samples: int = 256
    """Samples that an engine decodes at once."""

    kv_cache_bytes: int | None = None
    """KV cache of an engine; null lets vLLM size it from the device's free memory (CUDA only)."""

    tensor: int = 1
    """Tensor-parallel size of an engine."""

    quantization: str | None = None
    """The engines' linear weights: null as `precision.rollout_dtype`, `fp8_per_channel` with a scale for each output
    channel (on the CPU for dense models in bfloat16), `fp8_block` with one for each 128 x 128 (CUDA)."""

    sleep_level: int = 1
    """What a colocated engine gives up while the training ranks work, beside its KV cache: 1 moves its weights to host
    memory (on the CPU they stay), 2 drops them, and the next sync brings all of them."""

    enable_prefix_caching: bool = True
    """Prompts of a group share their KV cache."""

    enforce_eager: bool = False
    """No CUDA graphs."""

    cpu_threads: int = 2
    """Threads of an engine on a CPU host."""


@dataclass
class ColumnsConfig:
    """Dotted paths into a dataset row; the defaults are DAPO-Math-17k's schema."""

    prompt: str = "prompt"
    """A string, or a chat: a list of {role, content}."""

    ground_truth: str = "reward_model.ground_truth"
    uid: str | None = "extra_info.index"
    """Rows with the same uid are one prompt; null, or absent in a row: a digest of prompt and ground truth."""

    data_source: str | None = "data_source"


@dataclass
class DatasetConfig:
    """One set of problems: an HF dataset folder, *.parquet, *.jsonl, or a glob of either."""

    path: str = ""
    split: str = "train"
    """Split of an HF dataset folder."""

    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    ground_truth_pattern: str | None = None
    r"""A regular expression whose first group is the ground truth in its column (GSM8K: `####\s*(.+)`)."""

    prompt_template: str | None = None
    """Text around the problem, with `{prompt}` once; null: the problem as it is."""

    chat_template: bool = True
    """Apply the tokenizer's chat template (a string prompt becomes one user message)."""

    limit: int | None = None
    """Use only the first rows."""


@dataclass
class DataConfig:
    """Training problems and how unusable ones are treated."""

    train: DatasetConfig = field(default_factory=DatasetConfig)
    max_prompt_tokens: int = 2048
    """Longest prompt; with `rollout.max_response_tokens` it makes the engine's window."""

    overlong_prompts: OnOverlongPrompt = OnOverlongPrompt.refuse
    bad_rows: OnBadRow = OnBadRow.refuse
    shuffle: bool = True
    """Seeded shuffle of the prompts, another one each epoch."""


@dataclass
class RewardConfig:
    """The scorer."""

    scorer: str = "dapo"
    """`dapo` (DAPO's own rule, bit-exact), or an import path `package.module:function`."""


@dataclass
class EvaluationSetConfig:
    """One validation set."""

    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    samples_per_prompt: int = 4
    """k of mean@k and pass@k."""


@dataclass
class EvaluationConfig:
    """Validation during training and by `dapo-megatron evaluate`."""

    sets: dict[str, EvaluationSetConfig] = field(default_factory=dict)
    """Name -> set."""

    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(top_p=0.7))
    before_training: bool = True
    every_steps: int | None = None
    """null: only before and after training."""

    seed: int = 1234
    """Seed of the sampled responses; the same problems get the same seeds at every evaluation."""


@dataclass
class WeightsConfig:
    """The crossing of the weights from the training actors into the engines."""

    transport: str = "shared_memory"
    """`shared_memory`: through host memory, to engines on the host of training rank 0. On CUDA also `ipc` (every rank
    shares its device with an engine's process), `nccl` (engines on devices of their own) and `nccl_m2n` (those too: one
    engine, training with data and tensor parallelism alone)."""

    buffer_bytes: int = 256 * 1024 * 1024
    """Size of one of two transfer buffers; a single larger layer gets the room that it needs."""

    verify: str = "first"
    """After every sync each tensor has come once with its shape (`manifest`); `checksums` compares a hash of every
    tensor on both sides too, `first` at the first sync of a run. Hashes are for shared_memory alone."""

    max_log_prob_difference: float | None = 0.5
    """The run stops if the log-probs of engines and training ranks differ by more than this on average over a batch:
    engines that run another policy. null: never. Not seen with `algorithm.old_log_probs=rollout`."""

    deadline_s: float = 600.0
    """Longest wait for the engines' answer to one call of a sync, and for a training rank's part of it."""


@dataclass
class ClusterConfig:
    """Placement of the Ray actors, and the deadlines of cross-process waits."""

    device: str = "auto"
    """`cpu`, `cuda` or `auto` (CUDA where it is available)."""

    placement: Placement = Placement.colocated

    address: str | None = None
    """Address of a running Ray cluster; null starts a local one."""

    cpu_threads_per_actor: int = 2
    """Threads of a training actor on a CPU host."""

    offload: list[str] = field(default_factory=lambda: ["params", "grads", "optimizer", "reference"])
    """What of colocated training ranks leaves the device while the engines generate. On a CPU only `grads` can."""

    start_deadline_s: float = 600.0
    """Longest wait for actors and engines to start."""

    phase_deadline_s: float = 3600.0
    """Longest wait for one phase of a step."""


@dataclass
class TrainerConfig:
    """The loop."""

    run_dir: str = "runs/default"
    """Where config, metrics, samples, checkpoints and the report go."""

    steps: int = 1000
    train_batch_size: int = 512
    """Groups (prompts) in a step."""

    update_batch_size: int = 512
    """Samples in an optimizer update: a multiple of n that divides train_batch_size x n."""

    epochs: int = 1
    """Passes over a step's batch."""

    seed: int = 42
    checkpoint_every_steps: int | None = None
    """null: only at the end."""

    save_samples_every_steps: int = 1
    """Write the rollouts of every k-th step to samples/."""

    samples_per_file: int = 64
    """Rollouts written of a step at most; 0 writes all."""

    peak_flops_per_device: float | None = None
    """FLOPs per second of a training device at its best; the update's share of it is then logged (MFU)."""


@dataclass
class Config:
    """The whole configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
