"""Public names: each has a documentation page, and each function has a working example in its docstring."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import inspect
import io
import re
from pathlib import Path
from typing import Any

import pytest

import natten_jax
from tests.support.programs import run_python

ROOT = Path(__file__).parents[2]
_FLAX = "natten_jax.flax_modules."
#: Modules with public names, except :mod:`natten_jax` itself. None stands for all names in the module's ``__all__``.
MODULES = {
    "natten_jax.fp8": None,
    "natten_jax.halo": ("Halo", "bytes_received", "halo_of", "halos_of"),
    "natten_jax.performance": ("AttentionPerformanceArguments", "PerformanceArguments"),
    "natten_jax.plot": None,
    "natten_jax.problem": ("Axis", "Problem"),
    "natten_jax.rotary": None,
    "natten_jax.simulator": None,
    "natten_jax.windows": ("Window", "group_length", "inverse_window_bounds", "window_bounds"),
    f"{_FLAX}attention_fn": None,
    f"{_FLAX}convert": None,
    f"{_FLAX}linen": None,
    f"{_FLAX}nnx": None,
}


def public_names() -> dict[str, Any]:
    """Return every public object, by its full name."""
    objects = {f"natten_jax.{name}": getattr(natten_jax, name) for name in natten_jax.__all__}
    for name, members in MODULES.items():
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            pytest.importorskip("flax")
            raise
        objects |= {f"{name}.{member}": getattr(module, member) for member in members or module.__all__}
    return objects


def test_all_names_everything_public() -> None:
    names = {name for name in dir(natten_jax) if not name.startswith("_")}
    modules = {name for name in names if inspect.ismodule(getattr(natten_jax, name))}
    assert names - modules == set(natten_jax.__all__) - {"__version__"}
    documented = {name.split(".")[1] for name in MODULES}
    assert modules == documented - ({"flax_modules"} if importlib.util.find_spec("flax") is None else set())


def test_modules_are_imported_when_they_are_used() -> None:
    program = """
import natten_jax
assert natten_jax.plot.__name__ == "natten_jax.plot"
assert natten_jax.rotary.rotary_angles
for name in dir(natten_jax):
    getattr(natten_jax, name)
natten_jax.merge_attention
"""
    found = run_python(program, fresh=True)
    assert found.stderr.endswith("has no attribute 'merge_attention'. Did you mean: 'merge_attentions'?\n"), (
        found.stderr
    )


def test_every_public_name_has_a_page() -> None:
    pages = set()
    prefix = "natten_jax"
    for line in (ROOT / "docs" / "api.md").read_text().splitlines():
        if found := re.fullmatch(r"\.\. currentmodule:: (\S+)", line):
            prefix = found[1]
        elif found := re.fullmatch(r"   ([\w.]+)", line):
            pages.add(f"{prefix}.{found[1]}")
        elif line.startswith("| `get_"):  # functions whose pages are equal except for the name
            pages |= {f"natten_jax.{name}" for name in re.findall(r"`(\w+)`", line)}
    assert public_names().keys() - pages == set()


def test_examples() -> None:
    """Run all examples in a single process, because starting JAX takes most of the time."""
    pytest.importorskip("matplotlib").use("Agg")
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    report = io.StringIO()
    lacking = []
    for name, each in public_names().items():
        text = getattr(each, "__doc__", None) or ""
        test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
        is_module = "NeighborhoodAttention" in name and name.endswith("D")
        if (inspect.isfunction(each) or is_module) and not test.examples:
            lacking.append(name)
        with contextlib.redirect_stdout(report):
            runner.run(test, out=report.write)
    assert not runner.failures, report.getvalue()
    assert not lacking
