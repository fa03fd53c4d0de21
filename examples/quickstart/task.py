"""The quick start's task: addition with the working written out, column by column, in single characters.

A response to `345+78=` adds the columns from the right, carry included, and ends with the answer:

    5+8=13;4+7+1=12;3+0+1=4;
    Answer: 423

Longer numbers need longer responses, and a response that writes its working twice costs nearly double. The
demonstrations that warm up the base policy are sloppy on purpose: that is what reinforcement learning repairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from random import Random
from typing import TypedDict

from transformers import Qwen2Tokenizer

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "\n 0123456789+-*/=;:,.?()Answer"
"""All characters of the task; `-*/,.?()` are spare, for variations of it."""


@dataclass(frozen=True)
class Problem:
    """Two numbers to add."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """The problem as the policy sees it."""
        return f"{self.left}+{self.right}="

    @property
    def ground_truth(self) -> str:
        """The sum in decimal digits."""
        return str(self.left + self.right)

    @property
    def operands(self) -> tuple[int, int]:
        """The two numbers in ascending order: a+b and b+a are the same problem."""
        return min(self.left, self.right), max(self.left, self.right)


@dataclass(frozen=True)
class Sloppiness:
    """What is wrong with a demonstration.

    Attributes:
        wrong_column: probability that a column's sum has a wrong units digit, which goes on into the answer.
        written_twice: probability that the working is written twice.
    """

    wrong_column: float = 0.0
    written_twice: float = 0.0


class ReinforcementRow(TypedDict):
    """A problem in DAPO-Math-17k's schema, with a plain string as prompt."""

    data_source: str
    prompt: str
    reward_model: dict[str, str]
    extra_info: dict[str, int]


def random_problem(random: Random, max_digits: int) -> Problem:
    """Both numbers have 1 to `max_digits` digits, every length equally likely, independently."""

    def number() -> int:
        digits = random.randint(1, max_digits)
        return random.randrange(0 if digits == 1 else 10 ** (digits - 1), 10**digits)

    return Problem(number(), number())


def split_problems(random: Random, max_digits: int, train: int, heldout: int) -> tuple[list[Problem], list[Problem]]:
    """Draw `train` and `heldout` problems, no two of which have the same operands in either order.

    Raises:
        ValueError: there are too few different problems of `max_digits` digits.
    """
    available = 10**max_digits * (10**max_digits + 1) // 2
    if 2 * (train + heldout) > available:
        raise ValueError(
            f"{train} + {heldout} different problems asked for, but numbers of up to {max_digits} digits make only "
            f"{available}, at most half of which can be drawn: use max_digits={max_digits + 1} or fewer problems"
        )
    problems: dict[tuple[int, int], Problem] = {}
    while len(problems) < train + heldout:
        problem = random_problem(random, max_digits)
        problems.setdefault(problem.operands, problem)
    drawn = list(problems.values())
    # Short problems run out first, so the order of drawing is not exchangeable: shuffle before splitting.
    random.shuffle(drawn)
    return drawn[heldout:], drawn[:heldout]


def demonstration(problem: Problem, random: Random, sloppiness: Sloppiness = Sloppiness()) -> str:
    """A response to `problem` (without the end-of-sequence token), right if `sloppiness` is zero."""
    working, digits, carry = "", "", 0
    for above, below in zip_longest(reversed(str(problem.left)), reversed(str(problem.right)), fillvalue="0"):
        column_sum = int(above) + int(below) + carry
        if random.random() < sloppiness.wrong_column:
            tens, units = divmod(column_sum, 10)
            column_sum = 10 * tens + random.choice([digit for digit in range(10) if digit != units])
        working += f"{above}+{below}{'+1' if carry else ''}={column_sum};"
        digits = str(column_sum % 10) + digits
        carry = column_sum // 10
    if random.random() < sloppiness.written_twice:
        working += "\n" + working
    return f"{working}\nAnswer: {'1' if carry else ''}{digits}"


def as_row(problem: Problem, index: int) -> ReinforcementRow:
    """The dataset row of a problem; `index` is its identity."""
    return {
        "data_source": "addition",
        "prompt": problem.prompt,
        "reward_model": {"ground_truth": problem.ground_truth, "style": "rule"},
        "extra_info": {"index": index},
    }


def build_tokenizer() -> Qwen2Tokenizer:
    """Qwen2's byte-level tokenizer without merges: one token a character, 32 tokens in all.

    It is Qwen2's because that is the class which AutoTokenizer loads for a Qwen2 model, whatever class was saved.
    Characters outside the vocabulary are dropped.
    """
    byte_level = {"\n": "\u010a", " ": "\u0120"}
    tokens = (PAD, EOS, *(byte_level.get(character, character) for character in CHARACTERS))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return Qwen2Tokenizer(
        vocab=vocabulary, merges=[], unk_token=None, pad_token=PAD, eos_token=EOS, padding_side="left"
    )
