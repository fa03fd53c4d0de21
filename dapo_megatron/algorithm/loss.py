"""The policy loss of an update, as a sum.

Every aggregation is written as `sum over trained tokens of weight[sample] * token_loss[token]`. The weights hold all
the denominators and are computed once, over the whole update, before it is split (`token_weights`). What a
micro-batch or a rank then computes (`policy_loss`) only needs to be summed: no later division, hence the same
loss and gradient for any split of the update. Metrics are raw sums for the same reason (`loss_metrics`).

Sources: DAPO (arXiv 2503.14476), Dr.GRPO (arXiv 2503.20783), dual clip (arXiv 1912.09729),
KL estimators (http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo_megatron.config.schema import Aggregation, AlgorithmConfig, KLEstimator

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before exp, so that one wild token cannot overflow."""

MAX_K3 = 10.0
"""Upper bound of the k3 estimator of a token."""


@dataclass(frozen=True)
class LossOutput:
    """What `policy_loss` returns.

    Attributes:
        loss: scalar with gradient, `sum(weights * token_loss)` over trained tokens.
        sums: detached float64 scalars, sums over trained tokens (`loss`: weighted) for `loss_metrics`:
            tokens, loss, kl_old, ratio, clip_low, clip_high, clip_dual, and entropy and kl_reference if given.
    """

    loss: Tensor
    sums: dict[str, Tensor]


def token_weights(
    aggregation: Aggregation,
    trained_tokens: Sequence[int],
    group_ids: Sequence[Hashable],
    loss_norm_tokens: int | None = None,
) -> list[float]:
    """Weight of each trained token of each sample in the aggregated loss of one update.

    With L the token losses, T_i the trained tokens of sample i, S the number of samples with T_i > 0:

    - token_mean: sum(L) / sum(T)
    - prompt_token_mean: mean over groups of (sum of L in the group / trained tokens of the group)
    - seq_mean_token_mean: sum over samples of sum_t(L) / T_i, over S
    - seq_mean_token_sum: sum(L) / S
    - seq_mean_token_sum_norm: sum(L) / (S * loss_norm_tokens)

    A sample or a group without a trained token is in neither numerator nor denominator.

    Args:
        aggregation: which of the above.
        trained_tokens: T_i of every sample of the whole update (all ranks, all micro-batches).
        group_ids: the group of every sample, in the same order.
        loss_norm_tokens: constant divisor of `seq_mean_token_sum_norm`; unused otherwise.

    Returns:
        One weight a sample; 0.0 for a sample with no trained token.

    Raises:
        ValueError: `seq_mean_token_sum_norm` without a positive `loss_norm_tokens`.
    """
    assert len(trained_tokens) == len(group_ids), (len(trained_tokens), len(group_ids))
    total_tokens = sum(trained_tokens)
    samples = sum(tokens > 0 for tokens in trained_tokens)
    group_tokens: defaultdict[Hashable, int] = defaultdict(int)
    for group_id, tokens in zip(group_ids, trained_tokens, strict=True):
        group_tokens[group_id] += tokens
    groups = sum(tokens > 0 for tokens in group_tokens.values())
    if aggregation == Aggregation.seq_mean_token_sum_norm and not (loss_norm_tokens and loss_norm_tokens > 0):
        raise ValueError(f"{aggregation} needs loss_norm_tokens > 0, got {loss_norm_tokens}")

    def weight(tokens: int, group_id: Hashable) -> float:
        match Aggregation(aggregation):
            case Aggregation.token_mean:
                return 1.0 / total_tokens
            case Aggregation.prompt_token_mean:
                return 1.0 / (groups * group_tokens[group_id])
            case Aggregation.seq_mean_token_mean:
                return 1.0 / (samples * tokens)
            case Aggregation.seq_mean_token_sum:
                return 1.0 / samples
            case Aggregation.seq_mean_token_sum_norm:
                assert loss_norm_tokens
                return 1.0 / (samples * loss_norm_tokens)

    return [
        weight(tokens, group_id) if tokens > 0 else 0.0
        for tokens, group_id in zip(trained_tokens, group_ids, strict=True)
    ]


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference) on tokens that the policy sampled.

    With x = clamp(logp_ref - logp, -20, 20): k1 = -x, k2 = x^2 / 2, k3 = min(exp(x) - x - 1, 10).
    """
    x = (reference_log_probs - log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match KLEstimator(estimator):
        case KLEstimator.k1:
            return -x
        case KLEstimator.k2:
            return x.square() / 2
        case KLEstimator.k3:
            return (torch.expm1(x) - x).clamp(max=MAX_K3)


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    settings: AlgorithmConfig,
    *,
    correction_weights: Tensor | None = None,
    reference_log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> LossOutput:
    """The weighted sum of the clipped policy-gradient loss over the trained tokens of any part of an update.

    Per token, with r = exp(clamp(logp - logp_old, -20, 20)): L = max(-A r, -A clip(r, 1 - low, 1 + high)); where
    A < 0 and dual clip c is on, L = min(L, -A c). The token loss is L * correction_weight + beta * KL(policy ||
    reference) - entropy_coefficient * H. Whatever stands at an untrained position, NaN and infinities included,
    reaches neither the loss nor the gradient. T is the number of tokens, in any packing.

    Args:
        log_probs: [T], of the policy being trained at the sampling temperature; gradient flows here.
        old_log_probs: [T], of the policy before the step's updates.
        advantages: [T].
        mask: bool [T], true on trained response tokens.
        weights: [T], each token's `token_weights`.
        settings: clip ranges, KL and entropy terms.
        correction_weights: [T], rollout correction; no gradient.
        reference_log_probs: [T], needed if `settings.kl.coefficient` is not 0.
        entropy: [T], of the temperature-scaled distribution; gradient flows here. Needed if
            `settings.entropy_coefficient` is not 0.

    Raises:
        ValueError: k1 as a loss term.
    """
    coefficient, estimator = settings.kl.coefficient, settings.kl.estimator
    if coefficient and estimator == KLEstimator.k1:
        raise ValueError("algorithm.kl.estimator=k1 has no expected gradient in a loss: choose k2 or k3")
    assert not coefficient or reference_log_probs is not None, "the KL term needs reference_log_probs"
    assert not settings.entropy_coefficient or entropy is not None, "the entropy term needs entropy"
    mask = mask.bool()

    def select(values: Tensor) -> Tensor:
        # Selection, not multiplication: 0 * NaN is NaN, in the loss and in its gradient.
        return torch.where(mask, values, torch.zeros_like(values))

    log_probs, old_log_probs, advantages = (select(log_probs), select(old_log_probs.detach()), select(advantages))
    log_ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - settings.clip.low, 1 + settings.clip.high)
    is_clipped = clipped > unclipped
    token_loss = torch.maximum(unclipped, clipped)
    is_dual_clipped = torch.zeros_like(mask)
    if settings.clip.dual is not None:
        bound = -advantages * settings.clip.dual
        is_dual_clipped = (advantages < 0) & (token_loss > bound)
        token_loss = torch.where(is_dual_clipped, bound, token_loss)
    if correction_weights is not None:
        token_loss = token_loss * select(correction_weights.detach())

    summands = {
        "tokens": mask,
        "kl_old": -log_ratio,
        "ratio": select(ratio),
        "clip_low": is_clipped & (ratio < 1),
        "clip_high": is_clipped & (ratio > 1),
        "clip_dual": is_dual_clipped,
    }
    if reference_log_probs is not None:
        kl = kl_estimate(log_probs, select(reference_log_probs.detach()), estimator)
        summands["kl_reference"] = kl
        if coefficient:
            token_loss = token_loss + coefficient * kl
    if entropy is not None:
        entropy = select(entropy)
        summands["entropy"] = entropy
        if settings.entropy_coefficient:
            token_loss = token_loss - settings.entropy_coefficient * entropy

    loss = (select(weights) * token_loss).sum()
    sums = {name: values.detach().double().sum() for name, values in summands.items()}
    return LossOutput(loss, sums | {"loss": loss.detach().double()})


def loss_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Metrics of an update from the sums of all its micro-batches and ranks; token means, except `policy/loss`.

    `policy/kl_old` is the k1 estimate of KL(old || policy). Empty if no token was trained.
    """
    if not sums["tokens"]:
        return {}
    names = {
        "entropy": "policy/entropy",
        "kl_old": "policy/kl_old",
        "ratio": "policy/ratio",
        "clip_low": "policy/clip_fraction_low",
        "clip_high": "policy/clip_fraction_high",
        "clip_dual": "policy/clip_fraction_dual",
        "kl_reference": "policy/kl_reference",
    }
    means = {metric: sums[name] / sums["tokens"] for name, metric in names.items() if name in sums}
    return {"policy/loss": sums["loss"]} | means
