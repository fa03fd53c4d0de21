r"""DAPO's own rule: the last `Answer: ...` near the end of a response equals the ground truth as a string.

Bit-exact with the scorer that DAPO was trained with (verl, `math_dapo`), quirks included: a final full stop is wrong,
`\boxed{42}` without `Answer:` is no answer, and everything up to the last `=` is dropped. Both sides are normalised
with the tables of Minerva (arXiv 2206.14858, appendix D.1, listing 1), whose order matters.
"""

from __future__ import annotations

import re

from dapo_megatron.data.types import Verdict

TAIL_CHARACTERS = 300
"""Only this many last characters of a response are searched."""

ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
NO_ANSWER = "[INVALID]"

SUBSTITUTIONS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)

# The line breaks inside \text{} are the listing's own.
REMOVED_EXPRESSIONS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)

REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),  # the first inline formula
        (r"(\\text\{)(.*?)(\})", r"\2"),
        (r"(\\textbf\{)(.*?)(\})", r"\2"),
        (r"(\\overline\{)(.*?)(\})", r"\2"),
        (r"(\\boxed\{)(.*)(\})", r"\2"),
        (r"(frac)([^{])(.)", r"frac{\2}{\3}"),  # \frac12 -> \frac{1}{2}
        (r"(sqrt)([^{])", r"sqrt{\2}"),  # \sqrt2 -> \sqrt{2}
    )
)


def normalize_answer(answer: str) -> str:
    """Minerva's normal form of a final answer."""
    answer = answer.split("=")[-1]
    for before, after in SUBSTITUTIONS:
        answer = answer.replace(before, after)
    for expression in REMOVED_EXPRESSIONS:
        answer = answer.replace(expression, "")
    for pattern, replacement in REWRITES:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    if (digits := answer.replace(",", "")).isdigit():
        answer = digits
    return answer.strip()


def judge(response: str, ground_truth: str) -> Verdict:
    """Verdict on a response: `right`, `wrong`, or `no answer` if there is no `Answer:` in its last 300 characters."""
    answers = ANSWER.findall(response[-TAIL_CHARACTERS:])
    extracted = normalize_answer(answers[-1] if answers else NO_ANSWER)
    if extracted == normalize_answer(ground_truth):
        return Verdict("right", 1.0, extracted)
    return Verdict("wrong", 0.0, extracted) if answers else Verdict("no answer", 0.0)
