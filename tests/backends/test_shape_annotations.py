"""Arrays have the shapes that their types say: those of every backend's passes, and those inside of plain JAX."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, get_type_hints

import jax
import pytest

from natten_jax.backends import flex
from tests.support.families import Family, family_named
from tests.support.problems import Case
from tests.support.shapes import checked, has_shapes

#: Extents that are all different: shared keys, another width of values, additional tokens, scales of heads.
CASE = Case(
    (6, 9),
    (3, 4),
    batch=5,
    heads=8,
    heads_kv=4,
    head_dim=16,
    head_dim_v=24,
    additional=7,
    fused=True,
    scales=(0.3,) * 8,
)


def run(case: Case, family: Family, **arguments: Any) -> None:
    """Trace both passes: shapes are known then."""
    operands = jax.eval_shape(lambda: case.operands(family.dtype, 0))
    cotangents = jax.eval_shape(lambda: case.cotangents(family.dtype, 0))
    operator = case.operator(family.fna, **arguments)
    jax.jit(lambda o, c: jax.vjp(operator, o)[1](c)).lower(operands, cotangents)


def says_shapes(function: Any) -> bool:
    return inspect.isfunction(function) and any(map(has_shapes, get_type_hints(function, include_extras=True).values()))


class Watched:
    """Functions that check their arrays from now on, and which of them were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.known: set[str] = set()
        self.called: set[str] = set()

    def replaced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self.known.add(function.__qualname__)
        return checked(function, self.called)

    def methods_of(self, kind: type) -> None:
        for name, member in list(vars(kind).items()):
            bare = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            # A named tuple's own methods are of no module of ours.
            if getattr(bare, "__module__", None) == kind.__module__ and says_shapes(bare):
                new: Any = self.replaced(bare)
                self._monkeypatch.setattr(kind, name, new if bare is member else type(member)(new))

    def functions_of(self, modules: list[Any], users: list[Any]) -> None:
        """Functions and methods that these modules define, wherever these and their users have a name for them."""
        new: dict[Any, Any] = {}
        for module in modules:
            for value in list(vars(module).values()):
                if getattr(value, "__module__", None) != module.__name__:
                    continue
                if inspect.isclass(value):
                    self.methods_of(value)
                elif says_shapes(value):
                    new[value] = self.replaced(value)
        for module in [*modules, *users]:
            for name, value in list(vars(module).items()):
                if inspect.isfunction(value) and value in new:
                    self._monkeypatch.setattr(module, name, new[value])


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> None:
    jax.clear_caches()


def test_passes_take_and_give_arrays_of_their_shapes(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    for kind in type(family.backend).__mro__[-2::-1]:
        watched.methods_of(kind)
    run(CASE.fitted(family), family)
    assert watched.called


def test_plain_jax_works_on_arrays_of_their_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {each.name for each in pkgutil.iter_modules(flex.__path__)} - {"backend"}
    modules = [importlib.import_module(f"{flex.__name__}.{name}") for name in sorted(names)]
    watched = Watched(monkeypatch)
    watched.functions_of(modules, [flex.backend])
    plain = family_named("flex")
    several = {"q_tile_shape": (2, 4), "kv_tile_shape": (2, 4)}
    run(CASE, plain, **several)
    run(dataclasses.replace(CASE, layout=(12, 9), dilation=(2, 1)), plain, q_tile_shape=(2, 4), kv_tile_shape=(2, 3))
    run(dataclasses.replace(CASE, edges=("wrap", "shift")), plain, **several)
    run(dataclasses.replace(CASE, extents=((4, 7), (6, 9), (3, 4), (5, 5), (6, 4))), plain, **several)
    run(dataclasses.replace(CASE, additional=0, relative_bias=True, key_bias="heads"), plain, **several)
    # Forward mode, and the forward pass alone.
    operator, operands = CASE.operator(plain.fna), CASE.operands("float32", 0)
    jax.jit(lambda each: jax.jvp(operator, (each,), (each,))).lower(operands)
    jax.jit(operator).lower(operands)
    assert len(watched.known) > 30
    assert watched.called == watched.known
