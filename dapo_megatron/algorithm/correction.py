"""Rollout correction: importance weights between the trainer's policy and what the engine sampled from.

rho = exp(clamp(logp_old - logp_rollout, -20, 20)), of a token or of a whole sample. Truncated importance sampling
(tis: https://fengyao.notion.site/off-policy-rl), masked importance sampling (mis: IcePop, arXiv 2510.18855).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dapo_megatron.algorithm.loss import MAX_LOG_RATIO, kl_estimate
from dapo_megatron.config.schema import CorrectionConfig, CorrectionKind, CorrectionLevel, KLEstimator


def _importance_ratio(old: Tensor, rollout: Tensor, level: CorrectionLevel) -> Tensor:
    """rho: [R] at token level, [1] for a sample of at least one token."""
    log_ratio = old - rollout
    match CorrectionLevel(level):
        case CorrectionLevel.token:
            pass
        case CorrectionLevel.sequence:
            log_ratio = log_ratio.sum(dim=0, keepdim=True)
        case CorrectionLevel.sequence_geometric:
            log_ratio = log_ratio.mean(dim=0, keepdim=True)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _is_outside(rho: Tensor, settings: CorrectionConfig) -> Tensor:
    """Where tis would truncate or mis would mask; with no correction, where mis would."""
    if settings.kind == CorrectionKind.tis:
        return rho > settings.cap
    return (rho < settings.low) | (rho > settings.high)


def correction_weights(old: Tensor, rollout: Tensor, settings: CorrectionConfig) -> Tensor | None:
    """Weights on the policy loss of ONE sample's response tokens.

    tis: min(rho, cap). mis: rho inside [low, high], else 0 (a zeroed token keeps its place in the denominators).

    Args:
        old: [R], log-probs of the policy before the step's updates.
        rollout: [R], what the engine reported when it sampled.
        settings: kind, level and bounds.

    Returns:
        [R] without gradient (at the sequence levels the same value R times), or None if the kind is `none`.
    """
    if settings.kind == CorrectionKind.none:
        return None
    if not old.numel():
        return torch.zeros_like(old)
    rho = _importance_ratio(old.detach(), rollout.detach(), settings.level)
    if settings.kind == CorrectionKind.tis:
        weights = rho.clamp(max=settings.cap)
    else:
        weights = torch.where(_is_outside(rho, settings), torch.zeros_like(rho), rho)
    return weights.expand_as(old).contiguous()


def mismatch_metrics(
    old: Sequence[Tensor | np.ndarray], rollout: Sequence[Tensor | np.ndarray], settings: CorrectionConfig
) -> dict[str, float]:
    """How far the engine's log-probs are from the trainer's, over all samples of a step.

    `mismatch/logprob_diff_mean` and `_max` of |logp_old - logp_rollout|; `mismatch/k1` and `mismatch/k3`, token means
    of the estimates of KL(rollout || old); `mismatch/ess` = (sum rho)^2 / (N sum rho^2), before truncation; and
    `mismatch/outside_fraction`, the share of rho beyond the settings' bounds. The last two run over the N tokens,
    or over the N samples at the sequence levels.

    Args:
        old: for each sample [R].
        rollout: for each sample [R].
        settings: kind, level and bounds; with kind `none` the bounds are those of `mis`.

    Returns:
        The metrics; empty without any token.
    """
    pairs = [
        (torch.as_tensor(o).double(), torch.as_tensor(r).double()) for o, r in zip(old, rollout, strict=True) if len(o)
    ]
    if not pairs:
        return {}
    all_old, all_rollout = (torch.cat([o for o, _ in pairs]), torch.cat([r for _, r in pairs]))
    rho = torch.cat([_importance_ratio(o, r, settings.level) for o, r in pairs])
    difference = (all_old - all_rollout).abs()
    metrics = {
        "logprob_diff_mean": difference.mean(),
        "logprob_diff_max": difference.max(),
        "k1": kl_estimate(all_rollout, all_old, KLEstimator.k1).mean(),
        "k3": kl_estimate(all_rollout, all_old, KLEstimator.k3).mean(),
        "ess": rho.sum().square() / (len(rho) * rho.square().sum()),
        "outside_fraction": _is_outside(rho, settings).double().mean(),
    }
    return {f"mismatch/{name}": value.item() for name, value in metrics.items()}
