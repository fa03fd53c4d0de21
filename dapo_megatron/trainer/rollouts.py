"""The report's rollouts: what the same prompts were answered before training and after it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from html import escape
from typing import Any

from dapo_megatron.trainer.tracking import RunDirectory, samples_name

Record = dict[str, Any]
Pair = tuple[Record, Record]
"""The same prompt and sample index, at the first evaluation and at the last."""

_SHOWN_GAINED = 3
_SHOWN_SINGLE = 4
_SHOWN_CHARACTERS = 6000
_MOVES = {
    "gained": ("wrong → right", "good"),
    "kept": ("stayed right", "good"),
    "missed": ("stayed wrong", "warn"),
    "lost": ("right → wrong", "bad"),
}
# Control characters have no place in HTML: NUL and its like are shown as the pictures that Unicode has for them.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def rollouts_section(run: RunDirectory, evaluation_sets: Iterable[str]) -> str:
    """HTML of the rollouts of each evaluation set, or of the last training step where none was evaluated twice."""
    compared = "".join(_compared(run, name) for name in evaluation_sets)
    return compared or _last_rollouts(run, evaluation_sets)


def pair_up(before: Iterable[Record], after: Iterable[Record]) -> list[Pair]:
    """Records of the same `uid` and `index`, in the order of `before`; those on one side only are left out."""
    later = {(record.get("uid"), record.get("index")): record for record in after}
    return [(record, later[key]) for record in before if (key := (record.get("uid"), record.get("index"))) in later]


def is_right(record: Record) -> bool:
    """At least half of full accuracy."""
    return (record.get("accuracy") or 0.0) >= 0.5


def move(pair: Pair) -> str:
    """`gained`, `kept`, `missed` or `lost`."""
    return {(False, True): "gained", (True, True): "kept", (False, False): "missed", (True, False): "lost"}[
        is_right(pair[0]), is_right(pair[1])
    ]


def choose(pairs: list[Pair]) -> list[Pair]:
    """A few that tell most: some that went right (of different problems, wrong in different ways), one that stayed
    wrong, one that went wrong; where there is none of these, one that stayed right."""
    by_move: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_move.setdefault(move(pair), []).append(pair)
    gained = by_move.get("gained", [])
    of_each_kind = _first_by(gained, "kind")
    chosen = _first_by([*of_each_kind, *gained], "uid")[:_SHOWN_GAINED]
    chosen += [pair for kind in ("missed", "lost") for pair in by_move.get(kind, [])[:1]]
    return chosen or by_move.get("kept", [])[:1]


def _first_by(pairs: Iterable[Pair], key: str) -> list[Pair]:
    """The first pair for each value that the earlier record has under `key`."""
    firsts: dict[Any, Pair] = {}
    for pair in pairs:
        firsts.setdefault(pair[0].get(key), pair)
    return list(firsts.values())


def _compared(run: RunDirectory, name: str) -> str:
    steps = run.sample_steps(name)
    if len(steps) < 2:
        return ""
    first, last = steps[0], steps[-1]
    pairs = pair_up(run.read_samples(samples_name(first, name)), run.read_samples(samples_name(last, name)))
    if not pairs:
        return ""
    cards = "".join(_pair_card(pair, first, last) for pair in choose(pairs))
    return (
        f"<h2>Before and after: {escape(name)}</h2>\n"
        f'<p class="lead">{len(pairs):,} samples: the same prompts and sample indices, answered by the policy '
        f"of step {first} and of step {last}.</p>\n"
        f"{_moves_bar(pairs)}\n{cards}"
    )


def _moves_bar(pairs: list[Pair]) -> str:
    counts = Counter(move(pair) for pair in pairs)
    order = [kind for kind in ("kept", "gained", "lost", "missed") if counts[kind]]
    bar = "".join(f'<span class="{kind}" style="flex:{counts[kind]}"></span>' for kind in order)
    legend = "".join(
        f'<span><i class="{kind}"></i>{_MOVES[kind][0]} <b>{counts[kind]:,}</b> '
        f"({100 * counts[kind] / len(pairs):.0f}%)</span>"
        for kind in order
    )
    return f'<div class="card moves"><div class="bar">{bar}</div><div class="legend">{legend}</div></div>'


def _pair_card(pair: Pair, first: int, last: int) -> str:
    label, tone = _MOVES[move(pair)]
    sides = _side(pair[0], f"Step {first}") + _side(pair[1], f"Step {last}")
    return f'<article class="card pair">{_head(pair[0], _badge(label, tone))}<div class="sides">{sides}</div></article>'


def _last_rollouts(run: RunDirectory, evaluation_sets: Iterable[str]) -> str:
    """One column: the newest rollouts there are, right and wrong ones by turns."""
    names = [samples_name(steps[-1], name) for name in (*evaluation_sets, None) if (steps := run.sample_steps(name))]
    if not names:
        return ""
    records = run.read_samples(names[0])
    sides = [[record for record in records if is_right(record) is right] for right in (True, False)]
    turns = [record for at in range(_SHOWN_SINGLE) for side in sides for record in side[at : at + 1]]
    cards = "".join(
        f'<article class="card pair">{_head(record, "")}<div class="sides single">{_side(record, "")}</div></article>'
        for record in turns[:_SHOWN_SINGLE]
    )
    return f'<h2>Rollouts</h2>\n<p class="lead">From samples/{escape(names[0])}.jsonl.</p>\n{cards}'


def _head(record: Record, badge: str) -> str:
    return (
        f"<header>{badge}<span>problem <code>{_text(record.get('uid'))}</code>, sample {_text(record.get('index'))}"
        f"</span><span>ground truth <code>{_text(record.get('ground_truth'))}</code></span></header>"
        f'<pre class="prompt" dir="auto">{_text(record.get("prompt"))}</pre>'
    )


def _side(record: Record, title: str) -> str:
    kind = str(record.get("kind") or ("right" if is_right(record) else "wrong"))
    badges = _badge(f"{'✓' if is_right(record) else '✗'} {kind}", "good" if is_right(record) else "bad")
    if record.get("finish_reason") == "length":
        badges += _badge("cut at the limit", "warn")
    facts = [f"answered <code>{_text(record['extracted'])}</code>"] if record.get("extracted") is not None else []
    facts += [f"{record['response_tokens']:,} tokens"] if "response_tokens" in record else []
    facts += [f"reward {record['reward']:+.2f}"] if record.get("reward") is not None else []
    facts += [f"advantage {record['advantage']:+.2f}"] if record.get("advantage") is not None else []
    what = f"<strong>{escape(title)}</strong>{badges}<span>{', '.join(facts)}</span>"
    return (
        f'<section class="side"><div class="what">{what}</div>'
        f'<pre dir="auto">{_text(record.get("response"))}</pre></section>'
    )


def _badge(text: str, tone: str) -> str:
    return f'<span class="badge {tone}">{_escaped(text)}</span>'


def _text(value: object) -> str:
    """Any text as HTML; the middle of a very long one is left out."""
    text = "" if value is None else str(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return _escaped(text)
    half = _SHOWN_CHARACTERS // 2
    gap = f'<span class="left-out">\n\n({len(text) - 2 * half:,} characters left out)\n\n</span>'
    return _escaped(text[:half]) + gap + _escaped(text[-half:])


def _escaped(text: str) -> str:
    return escape(_CONTROL.sub(lambda match: "␡" if match[0] == "\x7f" else chr(0x2400 + ord(match[0])), text))
