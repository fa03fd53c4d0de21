"""Hydra files and overrides -> `Config`.

Hydra's compose API merges the files of conf/ and the overrides `a.b=c`; the result is then laid over the schema's
defaults and built into the dataclasses, which is where a key, a type or a choice that the schema does not know is
refused. Every mistake of one load is named in one error. Nothing is written and no logging is configured.
"""

from __future__ import annotations

import difflib
import shutil
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dapo_megatron.config.schema import Config

INSTALLED_CONF = Path(__file__).resolve().parents[1] / "conf"
"""The files that the package ships."""

T = TypeVar("T")


def search_path(working_dir: Path | None = None) -> list[Path]:
    """Folders of configuration files, first match wins: conf/ in the working directory, then the installed one."""
    candidates = [(working_dir or Path.cwd()) / "conf", INSTALLED_CONF]
    folders = [folder.resolve() for folder in candidates if folder.is_dir()]
    return list(dict.fromkeys(folders))


def known_configs(search: Sequence[Path] | None = None) -> list[str]:
    """Names that `load_config` takes: the top-level files and the recipes."""
    found = set()
    for folder in search_path() if search is None else search:
        for file in [*folder.glob("*.yaml"), *folder.glob("recipe/*.yaml")]:
            found.add(file.relative_to(folder).with_suffix("").as_posix())
    return sorted(found)


def load_config(config_name: str, overrides: Sequence[str] = (), search: Sequence[Path] | None = None) -> Config:
    """Compose a configuration by name.

    Args:
        config_name: a file under conf/ without its ending, e.g. `quickstart` or `recipe/dapo_qwen2_5_32b`.
        overrides: Hydra overrides: `trainer.steps=2` for a value, `algorithm=grpo` for a file of a group.
        search: folders of configuration files; `search_path()` if None.

    Raises:
        ValueError: unknown name, file, key or choice (with the nearest valid one), wrong type, or a value that
            cannot be resolved. All problems with keys, types and choices are listed together.
    """
    search = search_path() if search is None else [Path(folder).resolve() for folder in search]
    config_name = config_name.removesuffix(".yaml")
    known = known_configs(search)
    if config_name not in known:
        raise ValueError(
            f"unknown configuration '{config_name}'{_nearest(config_name, known)}; "
            f"there are: {', '.join(known) or 'none'} (looked in {', '.join(map(str, search)) or 'no folder'})"
        )
    try:
        composed = _compose(config_name, _hydra_overrides(overrides, search), search)
    except HydraException as error:
        raise ValueError(f"configuration '{config_name}': {_one_line(error)}") from error
    except OmegaConfBaseException as error:
        raise ValueError(f"configuration '{config_name}': {_one_line(error)}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"configuration '{config_name}' is not valid YAML: {error}") from error
    return _to_config(composed)


def load_file(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read one resolved configuration, such as the `config.yaml` of a run, and apply value overrides to it.

    Raises:
        ValueError: see `load_config`.
    """
    folder, name = path.resolve().parent, path.name.removesuffix(".yaml")
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    return load_config(name, overrides, [folder])


def to_yaml(config: Config) -> str:
    """The configuration as YAML; `load_file` reads it back to an equal `Config`."""
    return yaml.dump(to_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def to_plain(node: Any) -> Any:
    """Dataclasses to dicts and enum members to their values, at any depth."""
    if is_dataclass(node):
        return {each.name: to_plain(getattr(node, each.name)) for each in fields(node)}
    if isinstance(node, Mapping):
        return {key: to_plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [to_plain(value) for value in node]
    return node.value if isinstance(node, Enum) else node


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as a block, and escapes what would be read back as an interpolation."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    if "\n" in text:
        style = "|" if text.strip() == text else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text.replace("${", r"\${"), style=style)


_Dumper.add_representer(str, _represent_text)


def _compose(config_name: str, overrides: list[str], search: Sequence[Path]) -> Any:
    """Run Hydra over the folders, laid one over the other (its own search path finds no primary file beyond one)."""
    with TemporaryDirectory() as overlay:
        for folder in reversed(search):
            for file in folder.rglob("*.yaml"):
                target = Path(overlay, file.relative_to(folder))
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
        with initialize_config_dir(config_dir=overlay, version_base="1.3"):
            return compose(config_name=config_name, overrides=overrides)


def _hydra_overrides(overrides: Sequence[str], search: Sequence[Path]) -> list[str]:
    """Value overrides become `++key=value`, since a file need not name every key of the schema."""
    result = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        line, key = override.input_line or "", override.key_or_group
        options = sorted({file.stem for folder in search for file in (folder / key).glob("*.yaml")})
        if options:
            chosen = override.value()
            if isinstance(chosen, str) and chosen not in options:
                raise ValueError(
                    f"{key}={chosen}: there is no file conf/{key}/{chosen}.yaml{_nearest(chosen, options)}; "
                    f"there are: {', '.join(options)}"
                )
            result.append(line)
        elif override.is_hydra_override():
            raise ValueError(f"unknown key '{key}': Hydra's own settings play no part here")
        elif override.is_delete():
            result.append(line)
        else:
            result.append("++" + line.lstrip("+"))
    return result


def _to_config(composed: Any) -> Config:
    """Lay the composed values over the defaults, resolve interpolations, build and check the dataclasses."""
    try:
        merged = OmegaConf.merge(OmegaConf.create(to_plain(Config())), OmegaConf.to_container(composed))
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"configuration: {_one_line(error)}") from error
    problems: list[str] = []
    config = _build(Config, values, "", problems)
    if problems:
        raise ValueError("\n".join(problems))
    return config


def _build(kind: type[T], node: Any, path: str, problems: list[str]) -> T:
    """Build the dataclass `kind` from a mapping; what is wrong is appended to `problems`."""
    hints = get_type_hints(kind)
    built = kind()
    if not isinstance(node, Mapping):
        problems.append(f"{path}={node!r} is not a group of keys; it has: {', '.join(hints)}")
        return built
    for key, value in node.items():
        dotted = f"{path}.{key}" if path else str(key)
        if key not in hints:
            problems.append(_unknown_key(dotted, value, path, list(hints)))
        else:
            setattr(built, key, _convert(hints[key], value, dotted, problems))
    return built


def _convert(kind: Any, value: Any, path: str, problems: list[str]) -> Any:
    """`value` as `kind`: a dataclass, an enum, a scalar, a list, a dict, or one of these or null."""
    if get_origin(kind) in (Union, types.UnionType):
        inner = [each for each in get_args(kind) if each is not type(None)]
        return None if value is None else _convert(inner[0], value, path, problems)
    if get_origin(kind) is list and isinstance(value, list):
        return [_convert(get_args(kind)[0], each, f"{path}[{i}]", problems) for i, each in enumerate(value)]
    if get_origin(kind) is dict and isinstance(value, Mapping):
        inner_kind = get_args(kind)[1]
        return {str(key): _convert(inner_kind, each, f"{path}.{key}", problems) for key, each in value.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        return _build(kind, value, path, problems)
    if isinstance(kind, type) and issubclass(kind, Enum):
        choices = [str(member.value) for member in kind]
        if str(value) in choices:
            return kind(str(value))
        problems.append(f"{path}={value!r} is not one of: {', '.join(choices)}{_nearest(str(value), choices)}")
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and number:
        return float(value)
    if kind is str and number:
        return str(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(kind, type) and isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    problems.append(f"{path}={value!r} must be {_WORDS.get(get_origin(kind) or kind, str(kind))}")
    return value


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "a group of named entries",
}


def _unknown_key(dotted: str, value: Any, parent: str, siblings: list[str]) -> str:
    """Nearest key: a sibling, else one that ends the same anywhere in the schema, else one spelled alike."""
    key = dotted.rpartition(".")[2]
    given = dotted
    while isinstance(value, Mapping) and value:
        name, value = next(iter(value.items()))
        given = f"{given}.{name}"
    everywhere = list(_leaf_paths(Config))
    nearest = [f"{parent}.{each}".lstrip(".") for each in difflib.get_close_matches(key, siblings, n=1)]
    for ending in (given, given.rpartition(".")[2]):
        nearest += [path for path in everywhere if path.endswith("." + ending)]
    nearest += difflib.get_close_matches(given, everywhere, n=1)
    hint = f"the nearest is '{nearest[0]}'; " if nearest else ""
    return f"unknown key '{given}': {hint}{parent or 'the top level'} has: {', '.join(siblings)}"


def _leaf_paths(kind: type, path: str = "") -> Iterator[str]:
    for name, hint in get_type_hints(kind).items():
        dotted = f"{path}.{name}" if path else name
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _leaf_paths(hint, dotted)
        else:
            yield dotted


def _nearest(given: str, choices: Sequence[str]) -> str:
    matches = difflib.get_close_matches(given, choices, n=1)
    return f" (nearest: '{matches[0]}')" if matches else ""


def _one_line(error: Exception) -> str:
    """The message without the lines about Hydra's own workings."""
    noise = ("object_type", "Set the environment", "See https://hydra.cc", "Config search path", "provider=")
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith(noise))
