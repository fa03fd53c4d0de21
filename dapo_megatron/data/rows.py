"""From dataset files to checked problems: reading rows, finding their columns, saying what is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from glob import glob
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dapo_megatron.config.schema import ColumnsConfig, DatasetConfig

READ_BATCH_ROWS = 1024
SUFFIXES = (".jsonl", ".parquet")

Chat = list[dict[str, str]]
"""Messages: {role, content}."""


class BadRow(ValueError):
    """Why a row is unusable: one that the configuration may allow to be skipped."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A usable row.

    Attributes:
        place: `FILE row N`, counted from 1 (in a JSONL file: the line).
        uid: `DATA_SOURCE:INDEX`, or a digest of prompt and ground truth where there is no index.
        prompt: as in the row.
        ground_truth: what the pattern found, without white space around it.
        data_source: as in the row, or empty.
    """

    place: str
    uid: str
    prompt: str | Chat
    ground_truth: str
    data_source: str


def read_rows(dataset: DatasetConfig) -> Iterator[tuple[str, object]]:
    """(place, row) of every row, in the order of the (sorted) files.

    A row is a dict, or whatever else a JSON line holds; a line that is not JSON is the exception that says so.

    Raises:
        ValueError: nothing readable at the path.
    """
    if not dataset.path:
        raise ValueError("a dataset's path is empty: name an HF dataset folder, *.parquet, *.jsonl or a glob of either")
    path = Path(dataset.path).expanduser()
    if path.is_dir():
        yield from _read_hf_folder(path, dataset.split)
        return
    files = [path] if path.exists() else [Path(name) for name in sorted(glob(str(path), recursive=True))]
    if not files:
        siblings = [sibling.name for sibling in path.parent.glob("*")] if path.parent.is_dir() else []
        nearest = get_close_matches(path.name, siblings, n=1)
        raise ValueError(
            f"dataset {dataset.path} does not exist (working directory {Path.cwd()})"
            + (f"; did you mean {path.parent / nearest[0]}?" if nearest else "")
        )
    for file in files:
        if file.suffix not in SUFFIXES:
            raise ValueError(f"dataset {file}: the suffix must be one of {', '.join(SUFFIXES)}, got {file.suffix!r}")
    for file in files:
        yield from _read_jsonl(file) if file.suffix == ".jsonl" else _read_parquet(file)


def _read_jsonl(file: Path) -> Iterator[tuple[str, object]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row: object
            try:
                row = json.loads(line)
            except ValueError as error:  # malformed JSON or UTF-8
                row = error
            yield f"{file} row {number}", row


def _read_parquet(file: Path) -> Iterator[tuple[str, object]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        for batch in pq.ParquetFile(file).iter_batches(READ_BATCH_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield f"{file} row {number}", row
    except pa.ArrowException as error:
        raise ValueError(f"{file}: cannot be read as parquet after row {number}: {error}") from error


def _read_hf_folder(folder: Path, split: str) -> Iterator[tuple[str, object]]:
    """A folder written by `save_to_disk`, or one of data files as on the Hub."""
    import datasets

    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        saved = datasets.load_from_disk(str(folder))
    else:
        try:
            saved = datasets.load_dataset(str(folder))
        except (FileNotFoundError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(f"{folder} is not an HF dataset folder: {error}") from error
    if isinstance(saved, dict):
        if split not in saved:
            raise ValueError(f"dataset {folder} has no split {split!r}: it has {', '.join(map(str, saved))}")
        saved = saved[split]
    number = 0
    for batch in saved.with_format("arrow").iter(READ_BATCH_ROWS):
        for row in batch.to_pylist():
            number += 1
            yield f"{folder} [{split}] row {number}", row


def compile_pattern(pattern: str | None) -> re.Pattern[str] | None:
    """`ground_truth_pattern`, compiled; raises ValueError if it is not a pattern with a group."""
    if pattern is None:
        return None
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"ground_truth_pattern {pattern!r} is not a regular expression: {error}") from error
    if not compiled.groups:
        raise ValueError(f"ground_truth_pattern {pattern!r} needs a group around the ground truth, as in '#### (.+)'")
    return compiled


def parse_row(place: str, row: object, columns: ColumnsConfig, pattern: re.Pattern[str] | None) -> Problem:
    """The problem in a row. `pattern` (see `compile_pattern`) finds the ground truth inside its column.

    Raises:
        BadRow: it has no usable prompt or ground truth.
    """
    if isinstance(row, Exception):
        raise BadRow(f"not JSON: {row}")
    if not isinstance(row, Mapping):
        raise BadRow(f"a row must be an object, got {_typed(row)}")
    prompt = _checked_prompt(_required(row, columns.prompt), columns.prompt)
    ground_truth = _checked_ground_truth(_required(row, columns.ground_truth), columns.ground_truth, pattern)
    data_source = _optional(row, columns.data_source)
    if not isinstance(data_source, str | None):
        raise BadRow(f"{columns.data_source!r} must be a string, got {_typed(data_source)}")
    index = _optional(row, columns.uid)
    if index is None or index == "":
        uid = blake2b(json.dumps([prompt, ground_truth]).encode(), digest_size=12).hexdigest()
    elif isinstance(index, str | int) and not isinstance(index, bool):
        uid = f"{data_source}:{index}" if data_source else str(index)
    else:
        raise BadRow(f"{columns.uid!r} must be a string or an integer, got {_typed(index)}")
    return Problem(place, uid, prompt, ground_truth, data_source or "")


def _checked_prompt(value: object, column: str) -> str | Chat:
    if isinstance(value, str):
        if not value.strip():
            raise BadRow(f"empty prompt in {column!r}")
        return value
    if not isinstance(value, list):
        raise BadRow(f"prompt {column!r} must be a string or a list of messages, got {_typed(value)}")
    chat = []
    for message in value:
        role, content = (message.get(key) for key in ("role", "content")) if isinstance(message, Mapping) else (0, 0)
        if not (isinstance(role, str) and isinstance(content, str)):
            raise BadRow(f"a message of {column!r} must have a role and a content, both strings, got {message!r:.200}")
        chat.append({"role": role, "content": content})
    if not any(message["content"].strip() for message in chat):
        raise BadRow(f"empty prompt in {column!r}")
    return chat


def _checked_ground_truth(value: object, column: str, pattern: re.Pattern[str] | None) -> str:
    # A float is refused: 204.0, which a column with nulls makes of 204, would never equal "204".
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise BadRow(f"ground truth {column!r} must be a string or an integer, got {_typed(value)}")
    text = str(value)
    if pattern is not None:
        match = pattern.search(text)
        if match is None:
            raise BadRow(f"ground_truth_pattern {pattern.pattern!r} does not match {column!r}: {text[-200:]!r}")
        text = match[1] or ""
    if not text.strip():
        raise BadRow(f"empty ground truth in {column!r}")
    return text.strip()


def _lookup(row: Mapping[str, Any], path: str) -> tuple[bool, object]:
    """(found, value) at a dotted path; a column whose own name has the dots comes first."""
    if path in row:
        return True, row[path]
    value: object = row
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return False, None
        value = value[key]
    return True, value


def _required(row: Mapping[str, Any], path: str) -> object:
    found, value = _lookup(row, path)
    if not found:
        columns = list(_column_paths(row))
        nearest = get_close_matches(path, columns, n=1)
        raise BadRow(
            f"no column {path!r}; there are {', '.join(columns)}"
            + (f"; did you mean {nearest[0]!r}?" if nearest else "")
        )
    if value is None:
        raise BadRow(f"column {path!r} is null")
    return value


def _optional(row: Mapping[str, Any], path: str | None) -> object:
    return None if path is None else _lookup(row, path)[1]


def _column_paths(row: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _column_paths(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _typed(value: object) -> str:
    return f"{type(value).__name__} {value!r:.100}"
