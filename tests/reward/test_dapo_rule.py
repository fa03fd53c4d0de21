"""DAPO's rule, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.data.types import Verdict
from dapo_megatron.reward.dapo_rule import judge, normalize_answer


def test_says_what_the_original_says_on_every_recorded_case(shared: Path) -> None:
    cases = [json.loads(line) for line in (shared / "verifier_cases.jsonl").read_text().splitlines()]
    assert len(cases) == 131
    disagreements = [
        case["id"]
        for case in cases
        if (judge(case["response"], case["ground_truth"]).kind == "right") != case["dapo_rule_says"]
    ]
    assert disagreements == []


def test_golds_of_the_real_sets_equal_themselves(shared: Path) -> None:
    for line in (shared / "data" / "math_500.jsonl").read_text().splitlines():
        gold = json.loads(line)["reward_model"]["ground_truth"]
        if "\n" not in gold and "=" not in gold:
            assert judge(f"Answer: {gold}", gold).kind == "right"


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("42", "42"),
        ("42.", "42."),
        ("$42.$", "42"),
        ("the value is $x = 1,234$", "1234"),
        ("1,234", "1234"),
        ("-1,234", "-1,234"),
        ("1,2 and 3", "1,2and3"),
        (r"\$5", "5"),
        (r"5\ \text{m}^2", "5"),
        (r"x\text{ and }y", "x,y"),
        (r"3\text{ and }4", "34"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\textbf{B}", "B"),
        (r"\overline{3}", "3"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\dfrac12", r"\dfrac{1}{2}"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"90^\circ", "90"),
        ("12 square units", "12"),
        ("an apple", "apple"),
        ("banana split", "banansplit"),
        ("a=b=c", "c"),
        ("5\\text{\ns}", "5"),
        (r"10{,}000", "10000"),
        ("", ""),
    ],
)
def test_normal_form(answer: str, normal: str) -> None:
    assert normalize_answer(answer) == normal


@pytest.mark.parametrize(
    ("response", "verdict"),
    [
        ("so\nAnswer: 42", Verdict("right", 1.0, "42")),
        ("so\nANSWER :\n\n 42", Verdict("right", 1.0, "42")),
        ("so\nanswer: 41", Verdict("wrong", 0.0, "41")),
        ("Answer: 41\nno,\nAnswer: 42", Verdict("right", 1.0, "42")),
        ("Answer: 42\nno,\nAnswer: 41", Verdict("wrong", 0.0, "41")),
        ("Answer: 42\nAnswer:", Verdict("right", 1.0, "42")),
        (r"It is \boxed{42}", Verdict("no answer", 0.0)),
        ("", Verdict("no answer", 0.0)),
        ("Answer: 42\n" + "x" * 289, Verdict("right", 1.0, "42")),
        ("Answer: 42\n" + "x" * 290, Verdict("no answer", 0.0)),
        ("Answer: [INVALID]", Verdict("wrong", 0.0, "[INVALID]")),
    ],
)
def test_verdict(response: str, verdict: Verdict) -> None:
    assert judge(response, "42") == verdict


@given(st.text(), st.text())
def test_any_text_gets_a_verdict(response: str, ground_truth: str) -> None:
    verdict = judge(response, ground_truth)
    assert verdict.kind in ("right", "wrong", "no answer")
    assert verdict.accuracy == (verdict.kind == "right")
