"""Compares two checkpoints of any kind, tensor by tensor, and their forward passes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from dapo_megatron.models.registry import family_of
from dapo_megatron.weights.convert import to_hf
from dapo_megatron.weights.hf_folder import Checkpoint, HFFolder, read_config

LOGITS_TOLERANCE = 1e-5

_ELEMENTS_AT_A_TIME = 4 * 1024 * 1024


def differences(a: Checkpoint, b: Checkpoint) -> Iterator[str]:
    """One line for each tensor that differs: in its place, dtype, shape or bytes; then by how much at most, and where.

    A tied output weight may be absent on one side.
    """
    names = [set(a.names()), set(b.names())]
    for name in [*a.names(), *(name for name in b.names() if name not in names[0])]:
        there = [name in side for side in names]
        if all(there):
            difference = _difference(a, name, b, name)
        else:
            has, lacks = (a, b) if there[0] else (b, a)
            tied_to = _tied_to(lacks, name)
            if tied_to is None or tied_to not in lacks.names():
                yield f"{name}: only in {has.path}"
                continue
            difference = _difference(has, name, lacks, tied_to)
        if difference:
            yield f"{name}: {difference}"


def _tied_to(checkpoint: Checkpoint, name: str) -> str | None:
    """What a tensor that this checkpoint lacks is tied to."""
    if not checkpoint.config.get("tie_word_embeddings"):
        return None
    return next((row.tied_to for row in family_of(checkpoint.config).table if row.tied_to and name in row.hf), None)


def _difference(a: Checkpoint, name_a: str, b: Checkpoint, name_b: str) -> str | None:
    shapes, dtypes = (a.shape(name_a), b.shape(name_b)), (a.dtype(name_a), b.dtype(name_b))
    if shapes[0] != shapes[1]:
        return f"shape {list(shapes[0])} and {list(shapes[1])}"
    x, y = a.tensor(name_a), b.tensor(name_b)
    found = [f"dtype {dtypes[0]} and {dtypes[1]}"] if dtypes[0] != dtypes[1] else []
    if found or not _same_bytes(x, y):
        largest, where = _largest_difference(x, y)
        values = f"{x[where].item():.9g} and {y[where].item():.9g}"
        found.append(f"max difference {largest:.6g} at {list(where)} ({values})" if largest else "values equal")
    return ", ".join(found) or None


def _same_bytes(x: Tensor, y: Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (x, y)))


def _largest_difference(x: Tensor, y: Tensor) -> tuple[float, tuple[int, ...]]:
    """In float64; a value that is NaN on one side only differs by infinity."""
    largest, place = 0.0, 0
    flat_x, flat_y = x.flatten(), y.flatten()
    for start in range(0, len(flat_x), _ELEMENTS_AT_A_TIME):
        p, q = (flat[start : start + _ELEMENTS_AT_A_TIME].double() for flat in (flat_x, flat_y))
        same = (p == q) | (p.isnan() & q.isnan())
        off = torch.where(same, 0.0, (p - q).abs().nan_to_num(torch.inf, torch.inf))
        value, index = off.max(0)
        if value > largest:
            largest, place = value.item(), start + int(index)
    return largest, tuple(int(i) for i in torch.unravel_index(torch.tensor(place), x.shape))


def logits_difference(a: Checkpoint, b: Checkpoint, text: str) -> tuple[float, str]:
    """The largest difference of float32 logits on a text, by transformers, and a sentence that says where.

    Raises:
        ValueError: neither checkpoint has a tokenizer, or the text is empty.
    """
    tokens = _tokens(a, b, text)
    x, y = (_logits(checkpoint, tokens) for checkpoint in (a, b))
    largest, (position, token) = _largest_difference(x, y)
    agree = int((x.argmax(-1) == y.argmax(-1)).sum())
    return largest, (
        f"max difference {largest:.6g} at position {position}, token {token}; "
        f"the most likely token agrees at {agree} of {len(x)} positions"
    )


def _tokens(a: Checkpoint, b: Checkpoint, text: str) -> Tensor:
    from transformers import AutoTokenizer

    folder = next((c.config_folder for c in (a, b) if (c.config_folder / "tokenizer_config.json").is_file()), None)
    if folder is None:
        raise ValueError(f"neither {a.path} nor {b.path} has a tokenizer, which --logits needs")
    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    if not tokens.numel():
        raise ValueError("the text for --logits is empty")
    return tokens


def _logits(checkpoint: Checkpoint, tokens: Tensor) -> Tensor:
    """[tokens, vocabulary]; a Megatron checkpoint becomes an HF folder for it, and so does one in FP8."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint.path
        if not isinstance(checkpoint, HFFolder) or checkpoint.config != read_config(folder):
            folder = Path(scratch) / "hf"
            to_hf(checkpoint.path, folder, lambda *_: None, hf_config=checkpoint.config_folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            return model(tokens).logits[0]
