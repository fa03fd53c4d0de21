"""The scorer that the configuration names, and what a user's function may return."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from dapo_megatron.config.schema import RewardConfig
from dapo_megatron.data.types import Group, Prompt, Sample, Verdict
from dapo_megatron.reward.scorer import ScoringInput, build_scorer


def group_of(*responses: str, ground_truth: str = "42") -> Group:
    prompt = Prompt(uid="q:1", token_ids=(1, 2), text="What is 6 * 7?", ground_truth=ground_truth, data_source="q")
    samples = [Sample(i, [5] * (i + 1), [-0.1] * (i + 1), "stop", text, 0) for i, text in enumerate(responses)]
    return Group(prompt, position=0, samples=samples)


@pytest.fixture
def user_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("my_rewards")
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    return module


def score_with(module: ModuleType, function: Callable, group: Group) -> list[Verdict]:
    module.score = function  # type: ignore[attr-defined]
    return build_scorer(RewardConfig("my_rewards:score")).score(group)


def test_dapo() -> None:
    group = group_of("Answer: 42", "Answer: 4", "I do not know")
    verdicts = build_scorer(RewardConfig("dapo")).score(group)
    assert [verdict.kind for verdict in verdicts] == ["right", "wrong", "no answer"]
    assert all(sample.verdict is None for sample in group.samples)


def test_user_function_sees_the_samples(user_module: ModuleType) -> None:
    seen = []

    def score(samples: list[ScoringInput]) -> list[float]:
        seen.extend(samples)
        return [0.5] * len(samples)

    score_with(user_module, score, group_of("first", "second"))
    assert seen[1] == ScoringInput(
        response="second",
        ground_truth="42",
        prompt="What is 6 * 7?",
        finish_reason="stop",
        response_tokens=2,
        uid="q:1",
        data_source="q",
    )


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (1, Verdict("right", 1.0)),
        (0.0, Verdict("wrong", 0.0)),
        (0.25, Verdict("wrong", 0.25)),
        (True, Verdict("right", 1.0)),
        (np.float32(0.5), Verdict("wrong", 0.5)),
        (np.bool_(True), Verdict("right", 1.0)),
        (Verdict("no answer", 0.0), Verdict("no answer", 0.0)),
    ],
)
def test_allowed_results(user_module: ModuleType, result: object, verdict: Verdict) -> None:
    assert score_with(user_module, lambda samples: [result], group_of("x")) == [verdict]


def test_an_array_of_results_is_allowed(user_module: ModuleType) -> None:
    verdicts = score_with(user_module, lambda samples: np.array([1.0, 0.0]), group_of("x", "y"))
    assert [verdict.accuracy for verdict in verdicts] == [1.0, 0.0]


@pytest.mark.parametrize("result", [None, float("nan"), float("inf"), -1.0, 2, "right", Verdict("maybe", 1.0)])
def test_refused_results_name_function_sample_and_text(user_module: ModuleType, result: object) -> None:
    with pytest.raises(ValueError) as error:
        score_with(user_module, lambda samples: [1.0, result], group_of("fine", "the bad one"))
    for part in ("my_rewards:score", "sample 1", "q:1", "the bad one", "42", repr(result)):
        assert part in str(error.value)


@pytest.mark.parametrize("results", [None, [], [1.0], [1.0, 0.0, 1.0], 1.0])
def test_wrong_count(user_module: ModuleType, results: object) -> None:
    with pytest.raises(ValueError, match=r"my_rewards:score returned .* for the 2 samples of prompt 'q:1'"):
        score_with(user_module, lambda samples: results, group_of("x", "y"))


def test_exceptions_pass_with_a_note(user_module: ModuleType) -> None:
    def score(samples: list[ScoringInput]) -> list[float]:
        raise KeyError("gold")

    with pytest.raises(KeyError) as error:
        score_with(user_module, score, group_of("x"))
    assert "my_rewards:score" in error.value.__notes__[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dappo", "known are dapo"),
        ("", "known are dapo"),
        ("my_rewards:", "package.module:function"),
        ("no_such_package.rewards:score", "no module 'no_such_package'.*PYTHONPATH"),
        ("my_rewards:scoer", "did you mean 'score'"),
        ("json:__doc__", "no function"),
    ],
)
def test_unknown_names(user_module: ModuleType, name: str, message: str) -> None:
    user_module.score = lambda samples: []  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=message):
        build_scorer(RewardConfig(name))
