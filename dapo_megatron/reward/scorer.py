"""From the configured scorer to verdicts on the samples of a group.

`reward.scorer` is a name of `SCORERS` or the import path `package.module:function` of a user's function

    def score(samples: list[ScoringInput]) -> list[Verdict | float]: ...

which gets the samples of one group and returns one result each, in order: a Verdict, or an accuracy between 0 and 1.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Real
from typing import Protocol, cast

import numpy as np

from dapo_megatron.config.schema import RewardConfig
from dapo_megatron.data.types import FinishReason, Group, Verdict
from dapo_megatron.reward import dapo_rule

KINDS = ("right", "wrong", "no answer", "error")
SHOWN_CHARACTERS = 300
"""How much of the end of a response an error shows."""


class Scorer(Protocol):
    """Judges groups; safe to call from several threads."""

    def score(self, group: Group) -> list[Verdict]:
        """One verdict for each sample of the group, in order. It does not change the group."""


@dataclass(frozen=True, slots=True)
class ScoringInput:
    """What a user's function sees of one sample.

    Attributes:
        response: the response as text.
        ground_truth: what a right answer equals.
        prompt: the prompt as text.
        finish_reason: `stop`, or `length` if the response was cut.
        response_tokens: its length.
        uid: the prompt's identity.
        data_source: name of the dataset the prompt is from.
    """

    response: str
    ground_truth: str
    prompt: str
    finish_reason: FinishReason
    response_tokens: int
    uid: str
    data_source: str


class DapoScorer:
    """DAPO's own rule (dapo_rule.py)."""

    def score(self, group: Group) -> list[Verdict]:
        """See Scorer."""
        return [dapo_rule.judge(sample.text, group.prompt.ground_truth) for sample in group.samples]


class FunctionScorer:
    """A user's function, with its results checked.

    An exception that the function raises passes through, with a note that says for which prompt.
    """

    def __init__(self, name: str, function: Callable[[list[ScoringInput]], Sequence[object]]) -> None:
        self._name = name
        self._function = function

    def score(self, group: Group) -> list[Verdict]:
        """See Scorer.

        Raises:
            ValueError: the function did not return one Verdict or number in [0, 1] for each sample.
        """
        prompt = group.prompt
        inputs = [
            ScoringInput(
                response=sample.text,
                ground_truth=prompt.ground_truth,
                prompt=prompt.text,
                finish_reason=sample.finish_reason,
                response_tokens=len(sample.token_ids),
                uid=prompt.uid,
                data_source=prompt.data_source,
            )
            for sample in group.samples
        ]
        try:
            # A copy, so that the function cannot change what an error then shows.
            results = self._function(list(inputs))
        except Exception as error:
            error.add_note(f"raised by scorer {self._name} on the {len(inputs)} samples of prompt {prompt.uid!r}")
            raise
        if not hasattr(results, "__len__") or not hasattr(results, "__iter__") or len(results) != len(inputs):
            given = f"{len(results)} results" if hasattr(results, "__len__") else repr(results)
            raise ValueError(
                f"scorer {self._name} returned {given} for the {len(inputs)} samples of prompt {prompt.uid!r}; "
                f"it must return a list with one Verdict or number for each. {_shown(inputs[0])}"
            )
        return [self._verdict(i, result, inputs[i]) for i, result in enumerate(results)]

    def _verdict(self, index: int, result: object, shown: ScoringInput) -> Verdict:
        if isinstance(result, Verdict):
            verdict = result
        elif isinstance(result, (Real, np.bool_)):
            accuracy = float(cast(float, result))
            verdict = Verdict("right" if accuracy == 1 else "wrong", accuracy)
        else:
            verdict = None
        if (
            verdict is None
            or verdict.kind not in KINDS
            or not math.isfinite(verdict.accuracy)
            or not 0 <= verdict.accuracy <= 1
        ):
            raise ValueError(
                f"scorer {self._name} returned {result!r} for sample {index} of prompt {shown.uid!r}; allowed are "
                f"numbers from 0 (wrong) to 1 (right) and Verdicts of kind {', '.join(KINDS)}. {_shown(shown)}"
            )
        return verdict


def _shown(sample: ScoringInput) -> str:
    return f"Ground truth: {sample.ground_truth!r}. The response ends: {sample.response[-SHOWN_CHARACTERS:]!r}"


SCORERS: dict[str, Callable[[], Scorer]] = {"dapo": DapoScorer}


def build_scorer(settings: RewardConfig) -> Scorer:
    """The scorer that `reward.scorer` names.

    Raises:
        ValueError: an unknown name, or an import path that leads to no function.
    """
    name = settings.scorer
    if name in SCORERS:
        return SCORERS[name]()
    module_name, separator, function_name = name.partition(":")
    if not (separator and module_name and function_name):
        raise ValueError(
            f"unknown reward.scorer {name!r}: known are {', '.join(SCORERS)}, "
            "or the import path package.module:function of your own"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module was found, something it imports was not
        raise ValueError(
            f"reward.scorer {name!r}: there is no module {error.name!r}; is it installed, or its folder on PYTHONPATH?"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        nearest = get_close_matches(function_name, functions, n=1)
        raise ValueError(
            f"reward.scorer {name!r}: {module_name} has no function {function_name!r}; "
            f"it has {', '.join(functions) or 'none'}" + (f"; did you mean {nearest[0]!r}?" if nearest else "")
        )
    return FunctionScorer(name, function)
