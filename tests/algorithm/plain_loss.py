"""The algorithm once more, in plain Python loops and floats: what the tests compare with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dapo_megatron.config.schema import AlgorithmConfig


@dataclass
class Row:
    """One sample: parallel lists over its response tokens."""

    group: int
    log_probs: list[float]
    old: list[float]
    rollout: list[float]
    reference: list[float]
    entropy: list[float]
    mask: list[bool]
    advantage: float
    correction: list[float] = field(default_factory=list)


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def kl(log_prob: float, reference: float, estimator: str) -> float:
    x = clamp(reference - log_prob, -20, 20)
    return {"k1": -x, "k2": x * x / 2, "k3": min(math.exp(x) - x - 1, 10)}[estimator]


def token_loss(row: Row, t: int, settings: AlgorithmConfig) -> float:
    a = row.advantage
    ratio = math.exp(clamp(row.log_probs[t] - row.old[t], -20, 20))
    loss = max(-a * ratio, -a * clamp(ratio, 1 - settings.clip.low, 1 + settings.clip.high))
    if settings.clip.dual is not None and a < 0:
        loss = min(loss, -a * settings.clip.dual)
    if row.correction:
        loss *= row.correction[t]
    loss += settings.kl.coefficient * kl(row.log_probs[t], row.reference[t], settings.kl.estimator)
    return loss - settings.entropy_coefficient * row.entropy[t]


def aggregate(rows: list[Row], losses: list[list[float]], aggregation: str, loss_norm_tokens: int) -> float:
    """`losses` are the token losses of the trained tokens of each row; sample by sample, group by group."""
    if aggregation == "token_mean":
        tokens = [loss for row in losses for loss in row]
        return sum(tokens) / len(tokens) if tokens else 0.0
    if aggregation == "prompt_token_mean":
        groups: dict[int, list[float]] = {}
        for row, row_losses in zip(rows, losses, strict=True):
            groups.setdefault(row.group, []).extend(row_losses)
        means = [sum(tokens) / len(tokens) for tokens in groups.values() if tokens]
        return sum(means) / len(means) if means else 0.0
    samples = []
    for row_losses in losses:
        if row_losses:
            divisor = {
                "seq_mean_token_mean": len(row_losses),
                "seq_mean_token_sum": 1,
                "seq_mean_token_sum_norm": loss_norm_tokens,
            }[aggregation]
            samples.append(sum(row_losses) / divisor)
    return sum(samples) / len(samples) if samples else 0.0


def update_loss(rows: list[Row], settings: AlgorithmConfig, loss_norm_tokens: int) -> float:
    losses = [[token_loss(row, t, settings) for t in range(len(row.mask)) if row.mask[t]] for row in rows]
    return aggregate(rows, losses, settings.aggregation, loss_norm_tokens)


def update_metrics(rows: list[Row], settings: AlgorithmConfig) -> dict[str, float]:
    """Token means over the trained tokens of the whole update."""
    totals = dict.fromkeys(("entropy", "kl_old", "ratio", "kl_reference"), 0.0)
    fractions = dict.fromkeys(("low", "high", "dual"), 0)
    tokens = 0
    for row in rows:
        for t, trained in enumerate(row.mask):
            if not trained:
                continue
            tokens += 1
            a, d = row.advantage, clamp(row.log_probs[t] - row.old[t], -20, 20)
            ratio = math.exp(d)
            totals["entropy"] += row.entropy[t]
            totals["kl_old"] -= d
            totals["ratio"] += ratio
            totals["kl_reference"] += kl(row.log_probs[t], row.reference[t], settings.kl.estimator)
            fractions["low"] += a < 0 and ratio < 1 - settings.clip.low
            fractions["high"] += a > 0 and ratio > 1 + settings.clip.high
            fractions["dual"] += settings.clip.dual is not None and a < 0 and ratio > settings.clip.dual
    if not tokens:
        return {}
    return {f"policy/{name}": value / tokens for name, value in totals.items()} | {
        f"policy/clip_fraction_{side}": count / tokens for side, count in fractions.items()
    }
