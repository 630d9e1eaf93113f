"""Signatures of the public functions and classes, and flags of the commands."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import importlib.util
import inspect
import re
import runpy
from types import ModuleType
from typing import Any

import pytest

MODULES = (
    *("natten_jax", "natten_jax.fp8", "natten_jax.halo", "natten_jax.performance", "natten_jax.plot"),
    *("natten_jax.problem", "natten_jax.rotary", "natten_jax.simulator", "natten_jax.tuning", "natten_jax.windows"),
    *("flax_modules", "flax_modules.nnx", "flax_modules.linen"),
)
COMMANDS = "natten_jax.profiler", "natten_jax.doctor"


def take() -> dict[str, str]:
    """Return the signature of each public name, and the definition of each flag: nargs, default and choices."""
    found: dict[str, str] = {}
    for name in MODULES:
        if name.startswith("flax_modules") and importlib.util.find_spec("flax") is None:
            continue
        module = importlib.import_module(name)
        for attribute in _public_names(module):
            found |= _describe(f"{name}.{attribute}", getattr(module, attribute))
    for command in COMMANDS:
        found |= {f"{command} {flag}": text for flag, text in _flags(command).items()}
    return found


def _public_names(module: ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return sorted(listed)
    defined = ((name, getattr(value, "__module__", None)) for name, value in vars(module).items())
    return sorted(name for name, home in defined if home == module.__name__ and not name.startswith("_"))


def _describe(name: str, value: Any) -> dict[str, str]:
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return {name: ", ".join(f"{each.name}={each.value!r}" for each in value)}
    if isinstance(value, ModuleType):
        return {name: "module"}
    if not isinstance(value, type):
        return {name: _signature(value) if callable(value) else type(value).__name__}
    found = {name: _signature(value)}
    for attribute, member in vars(value).items():
        if attribute.startswith("_"):
            continue
        member = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        is_method = inspect.isfunction(member) and member.__module__ == value.__module__
        if is_method:
            found[f"{name}.{attribute}"] = _signature(member)
        elif isinstance(member, property):
            found[f"{name}.{attribute}"] = "property"
    if dataclasses.is_dataclass(value):
        fields = (field.name for field in dataclasses.fields(value) if not field.name.startswith("_"))
        found |= {f"{name}.{field}": "field" for field in fields if field not in ("name", "parent")}
    return found


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "callable"
    shown = []
    for parameter in signature.parameters.values():
        text = parameter.name
        if parameter.default is not parameter.empty:
            default = parameter.default
            is_named = callable(default) or isinstance(default, ModuleType)
            text += f"={default.__name__ if is_named else repr(default)}"
        shown.append(f"{parameter.kind.name.lower()} {text}")
    return re.sub(r" at 0x[0-9a-f]+", "", f"({', '.join(shown)})")


class _CapturedError(Exception):
    """Raised when a command parses its arguments: it ends the command, and passes the parser to ``_flags``."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def _flags(module: str) -> dict[str, str]:
    def capture(parser: argparse.ArgumentParser, *_: Any) -> Any:
        raise _CapturedError(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", capture)
        try:
            runpy.run_module(module, run_name=f"{module}.__main__", alter_sys=False)["main"]()
        except _CapturedError as captured:
            actions = captured.parser._actions
    return {
        "/".join(action.option_strings) or action.dest: (
            f"nargs={action.nargs!r} default={action.default!r} required={action.required} "
            f"choices={None if action.choices is None else sorted(map(str, action.choices))}"
        )
        for action in actions
    }
