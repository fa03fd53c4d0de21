"""What flows through the house: Prompt -> Sample -> Group -> TrainingSample -> MicroBatch (packing.py).

Token in, token out: a prompt is tokenised once, a response is the token ids that the engine sampled, and nothing
is tokenised again. These types import neither torch nor any engine, so that planning and reward processes stay light.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

FinishReason = Literal["stop", "length"]
"""`stop`: the policy ended the response itself (the stop token belongs to it). `length`: it was cut."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem.

    Attributes:
        uid: stable identity; duplicated dataset rows share it.
        token_ids: the prompt as the policy sees it.
        text: the same as text, for people.
        ground_truth: what a right answer equals.
        data_source: name of the dataset the row says it is from.
    """

    uid: str
    token_ids: tuple[int, ...]
    text: str
    ground_truth: str
    data_source: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a scorer says of a response.

    Attributes:
        kind: `right`, `wrong`, `no answer` or `error`.
        accuracy: 1.0 for right, 0.0 otherwise; user scorers may return values between.
        extracted: the answer that was judged, if one was found.
    """

    kind: str
    accuracy: float
    extracted: str | None = None


@dataclass(slots=True)
class Sample:
    """One response to a prompt.

    Attributes:
        index: position inside the group, 0 <= index < n.
        token_ids: the response, stop token included.
        log_probs: the engine's log-prob of each of these tokens when it was sampled.
        finish_reason: see FinishReason.
        text: the response decoded without special tokens.
        policy_version: number of updates behind the weights that sampled it.
        verdict: set by the scorer.
    """

    index: int
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    text: str
    policy_version: int
    verdict: Verdict | None = None


@dataclass(slots=True)
class Group:
    """The n samples of one prompt; `position` is the prompt's place in the stream."""

    prompt: Prompt
    position: int
    samples: list[Sample]

    @property
    def accuracies(self) -> list[float]:
        """Raw accuracy of each sample (before any shaping). The group must be scored."""
        assert all(sample.verdict is not None for sample in self.samples), "group is not scored"
        return [sample.verdict.accuracy for sample in self.samples if sample.verdict is not None]


@dataclass(slots=True)
class TrainingSample:
    """One row of an update, as a training actor receives it. R is the number of response tokens.

    Attributes:
        token_ids: int64 [P + R], prompt and response.
        prompt_tokens: P.
        trained: False masks the whole response (overlong filtering).
        advantage: one value for all response tokens.
        loss_weight: weight of each of its trained tokens in the aggregated loss; it already holds the denominator
            over the whole update (algorithm/loss.py, `token_weights`).
        rollout_log_probs: float32 [R].
        old_log_probs: float32 [R], or None before they are computed.
        reference_log_probs: float32 [R], or None without a KL term.
        correction_weights: float32 [R], or None without rollout correction.
    """

    token_ids: np.ndarray
    prompt_tokens: int
    trained: bool = True
    advantage: float = 0.0
    loss_weight: float = 0.0
    rollout_log_probs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    old_log_probs: np.ndarray | None = None
    reference_log_probs: np.ndarray | None = None
    correction_weights: np.ndarray | None = None

    @property
    def total_tokens(self) -> int:
        """P + R."""
        return len(self.token_ids)

    @property
    def response_tokens(self) -> int:
        """R."""
        return len(self.token_ids) - self.prompt_tokens


ActorPlan = Sequence[Sequence[Sequence[TrainingSample]]]
"""plan[data-parallel rank][micro-batch] -> samples; the same number of micro-batches on every rank."""
