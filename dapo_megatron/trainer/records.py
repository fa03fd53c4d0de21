"""A rollout as one JSON record of `samples/*.jsonl`."""

from __future__ import annotations

from typing import Any

from dapo_megatron.data.types import Group, Sample


def sample_record(step: int, group: Group, sample: Sample) -> dict[str, Any]:
    """The fields that every rollout has; training adds `outcome`, and `reward` and `advantage` where it was kept."""
    verdict = sample.verdict
    assert verdict is not None, "sample is not scored"
    return {
        "step": step,
        "uid": group.prompt.uid,
        "position": group.position,
        "prompt": group.prompt.text,
        "ground_truth": group.prompt.ground_truth,
        "index": sample.index,
        "response": sample.text,
        "response_tokens": len(sample.token_ids),
        "finish_reason": sample.finish_reason,
        "policy_version": sample.policy_version,
        "kind": verdict.kind,
        "accuracy": verdict.accuracy,
        "extracted": verdict.extracted,
    }
