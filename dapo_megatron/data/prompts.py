"""From dataset rows to tokenised prompts, and the endless order in which they are drawn.

Rows with one uid are one prompt. Each prompt is rendered and tokenised once, here. Nothing is dropped in silence:
what is skipped or too long is refused or counted, as the configuration says.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from dapo_megatron.config.schema import DatasetConfig, OnBadRow, OnOverlongPrompt
from dapo_megatron.data.rows import BadRow, Chat, Problem, compile_pattern, parse_row, read_rows
from dapo_megatron.data.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadedPrompts:
    """The prompts of a dataset, in the order of its rows, and what became of the rest.

    Attributes:
        prompts: one for each uid.
        rows: rows read.
        duplicates: rows whose uid an earlier row has.
        skipped: (place, reason) of each unusable row.
        dropped_overlong: prompts longer than the limit.
    """

    prompts: list[Prompt] = field(default_factory=list)
    rows: int = 0
    duplicates: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)
    dropped_overlong: int = 0


def load_prompts(
    dataset: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    overlong_prompts: OnOverlongPrompt = OnOverlongPrompt.refuse,
    bad_rows: OnBadRow = OnBadRow.refuse,
) -> LoadedPrompts:
    """Read, check, de-duplicate, render and tokenise the problems of a dataset.

    Args:
        dataset: where the rows are and how to read them.
        tokenizer: of the policy.
        max_prompt_tokens: longest prompt allowed.
        overlong_prompts: refuse or drop a longer one.
        bad_rows: refuse or skip a row without a usable prompt or ground truth.

    Raises:
        ValueError: a missing file, an unknown column, a bad row or a long prompt that is to be refused, two different
            problems with one uid, a template or a pattern that cannot work, or nothing left to train on.
    """
    pattern = compile_pattern(dataset.ground_truth_pattern)
    _check_templates(dataset, tokenizer)
    loaded = LoadedPrompts()
    problems: dict[str, Problem] = {}
    texts: dict[str, str] = {}

    def reject(place: str, reason: object) -> None:
        if bad_rows == OnBadRow.refuse:
            raise ValueError(f"{place}: {reason} (data.bad_rows=skip skips and counts such rows)")
        loaded.skipped.append((place, str(reason)))

    for place, row in _limited(read_rows(dataset), dataset.limit):
        loaded.rows += 1
        try:
            problem = parse_row(place, row, dataset.columns, pattern)
            if problem.uid in problems:
                _check_same(problems[problem.uid], problem)
                loaded.duplicates += 1
            else:
                texts[problem.uid] = _render(problem.prompt, dataset, tokenizer)
                problems[problem.uid] = problem
        except BadRow as reason:
            reject(place, reason)

    too_long: list[str] = []
    for (uid, problem), token_ids in zip(problems.items(), _tokenize(texts.values(), dataset, tokenizer), strict=True):
        if not token_ids:
            reject(problem.place, "the prompt has no tokens")
        elif len(token_ids) > max_prompt_tokens:
            too_long.append(f"{problem.place} ({len(token_ids)} tokens)")
        else:
            prompt = Prompt(uid, tuple(token_ids), texts[uid], problem.ground_truth, problem.data_source)
            loaded.prompts.append(prompt)
    if too_long and overlong_prompts == OnOverlongPrompt.refuse:
        raise ValueError(
            f"{len(too_long)} prompts are longer than data.max_prompt_tokens={max_prompt_tokens}: "
            f"{', '.join(too_long[:3])}{', ...' if len(too_long) > 3 else ''} "
            "(data.overlong_prompts=drop drops and counts them)"
        )
    loaded.dropped_overlong = len(too_long)
    _log_summary(dataset.path, loaded)
    if not loaded.prompts:
        why = f"; the first skipped row is {': '.join(loaded.skipped[0])}" if loaded.skipped else ""
        raise ValueError(
            f"{dataset.path} has no usable prompt: {loaded.rows} rows, {len(loaded.skipped)} skipped, "
            f"{loaded.dropped_overlong} too long{why}"
        )
    return loaded


def _log_summary(path: str, loaded: LoadedPrompts) -> None:
    logger.info(
        "%s: %d prompts from %d rows (%d duplicates, %d skipped, %d too long)",
        path,
        len(loaded.prompts),
        loaded.rows,
        loaded.duplicates,
        len(loaded.skipped),
        loaded.dropped_overlong,
    )
    for place, reason in loaded.skipped[:3]:
        logger.warning("skipped %s: %s", place, reason)


def _limited(rows: Iterator[tuple[str, object]], limit: int | None) -> Iterator[tuple[str, object]]:
    if limit is not None and limit < 1:
        raise ValueError(f"a dataset's limit must be at least 1 row, got {limit}")
    for i, row in enumerate(rows):
        if i == limit:
            return
        yield row


def _check_same(first: Problem, second: Problem) -> None:
    for what, a, b in (
        ("prompts", first.prompt, second.prompt),
        ("ground truths", first.ground_truth, second.ground_truth),
    ):
        if a != b:
            raise ValueError(
                f"{first.place} and {second.place} have the same uid {first.uid!r} but different {what}: "
                f"{str(a)[-100:]!r} and {str(b)[-100:]!r}. Set columns.uid to a column that tells problems apart, "
                "or to null for a digest of prompt and ground truth"
            )


def _check_templates(dataset: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    if dataset.prompt_template is not None and (count := dataset.prompt_template.count("{prompt}")) != 1:
        raise ValueError(f"prompt_template must have {{prompt}} once, it has it {count} times")
    if dataset.chat_template and not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: set the dataset's chat_template=false for plain prompts")


def _render(prompt: str | Chat, dataset: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """The prompt as the policy sees it; `prompt_template` goes around a string or the last user message."""
    import jinja2

    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]
    if dataset.prompt_template is not None:
        last = next((message for message in reversed(chat) if message["role"] == "user"), None)
        if last is None:
            raise BadRow("prompt_template needs a user message to go around")
        last["content"] = dataset.prompt_template.replace("{prompt}", last["content"])
    if not dataset.chat_template:
        if len(chat) > 1:
            raise BadRow(f"a chat of {len(chat)} messages needs the chat template")
        text = chat[0]["content"]
    else:
        try:
            text = str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        except jinja2.TemplateError as error:
            raise BadRow(f"the chat template refuses it: {error}") from error
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise BadRow("the prompt has a lone surrogate, which no tokenizer takes")
    return text


def _tokenize(
    texts: Iterable[str], dataset: DatasetConfig, tokenizer: PreTrainedTokenizerBase
) -> Sequence[Sequence[int]]:
    """Token ids of each text."""
    batch = list(texts)
    if not batch:
        return []
    # A chat template writes the special tokens itself; a plain text gets those that the tokenizer adds.
    encoded = tokenizer(batch, add_special_tokens=not dataset.chat_template, verbose=False)
    ids: Sequence[Sequence[int]] = encoded["input_ids"]
    return ids


def _hash63(*parts: str | int) -> int:
    """A 63-bit number that depends on the parts alone: the same on every machine and in every version."""
    return int.from_bytes(blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest(), "big") >> 1


def sample_seed(run_seed: int, position: int, sample_index: int) -> int:
    """Seed of one sample's random numbers, from its prompt's place in the stream and its own in the group.

    63 bits, all that a SamplingParams.seed can carry. (torch's CPU generator looks at the low 32 only.)
    """
    return _hash63("sample", run_seed, position, sample_index)


class PromptStream:
    """An endless stream of prompts: `stream[position]` is a pure function of prompts, seed and position.

    Epoch after epoch (position // number of prompts) every prompt comes once; with `shuffle` in another seeded order
    each epoch, else in that of the dataset.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True) -> None:
        assert prompts, "a stream needs at least one prompt"
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[int, list[int]] = {}

    def __getitem__(self, position: int) -> Prompt:
        assert position >= 0, position
        epoch, place = divmod(position, len(self._prompts))
        return self._prompts[self._order(epoch)[place] if self._shuffle else place]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            # Sampling runs ahead of training, hence two epochs at most are in use.
            self._orders = {kept: order for kept, order in self._orders.items() if abs(kept - epoch) == 1}
            self._orders[epoch] = sorted(
                range(len(self._prompts)), key=lambda index: _hash63("order", self._seed, epoch, index)
            )
        return self._orders[epoch]
