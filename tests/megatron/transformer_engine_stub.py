"""Transformer Engine as far as importing it goes: capitalised names are empty layers, others empty modules."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch

NAME = "transformer_engine"


class _Module(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        made = (
            type(name, (torch.nn.Module,), {"__module__": self.__name__}) if name[0].isupper() else _Module(full_name)
        )
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != NAME:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == NAME:
            module.__version__ = module.__dict__["version"]  # type: ignore[attr-defined]


def install(version: str) -> None:
    """Make `import transformer_engine` find this, under that version. For a process of its own."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    module = _Module(NAME)
    module.__dict__.update(__version__=version, __spec__=finder.find_spec(NAME, None))
    sys.modules[NAME] = module
