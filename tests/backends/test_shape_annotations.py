"""Arrays match their annotated shapes in the passes of all backends, and in all functions of the flex backend."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Sequence
from typing import Any, get_type_hints

import jax
import pytest

from natten_jax.backends import flex
from natten_jax.backends.base import Backend
from tests.support.families import Family, family_named
from tests.support.problems import Case
from tests.support.shapes import checked, has_shapes

#: All dimensions of the arrays have different extents, so that a check finds dimensions in a wrong order.
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
    """Trace both passes. Functions that :func:`watch` has replaced check shapes while they are traced."""
    operands = jax.eval_shape(lambda: case.operands(family.dtype, 0))
    cotangents = jax.eval_shape(lambda: case.cotangents(family.dtype, 0))
    operator = case.operator(family.fna, **arguments)
    jax.jit(lambda o, c: jax.vjp(operator, o)[1](c)).lower(operands, cotangents)


def says_shapes(function: Any) -> bool:
    return inspect.isfunction(function) and any(map(has_shapes, get_type_hints(function, include_extras=True).values()))


def watch(monkeypatch: pytest.MonkeyPatch, modules: set[str], owners: Sequence[Any]) -> tuple[set[str], set[str]]:
    """Replace the annotated functions of modules by functions that check the shapes of their arrays.

    Functions are replaced under all names that they have in ``owners``. Returns two sets of names: all replaced
    functions, and the functions that have been called. Calls add to the second set.
    """
    known: dict[Any, Any] = {}
    called: set[str] = set()
    members = [
        (owner, name, member, member.__func__ if isinstance(member, (classmethod, staticmethod)) else member)
        for owner in owners
        for name, member in vars(owner).items()
    ]
    for *_, function in members:
        if getattr(function, "__module__", None) in modules and says_shapes(function):
            known[function] = checked(function, called)
    for owner, name, member, function in members:
        if inspect.isfunction(function) and function in known:
            new = known[function] if function is member else type(member)(known[function])
            monkeypatch.setattr(owner, name, new)
    return {function.__qualname__ for function in known}, called


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> None:
    jax.clear_caches()


def test_passes_take_and_give_arrays_of_their_shapes(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = type(family.backend).__mro__[-2::-1]
    _, called = watch(monkeypatch, {kind.__module__ for kind in kinds}, kinds)
    run(CASE.fitted(family), family)
    assert called


def test_plain_jax_works_on_arrays_of_their_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = sorted(each.name for each in pkgutil.iter_modules(flex.__path__))
    modules = [importlib.import_module(f"{flex.__name__}.{name}") for name in names]
    classes = [each for module in modules for each in vars(module).values() if inspect.isclass(each)]
    helpers = [each for each in classes if not issubclass(each, Backend)]
    known, called = watch(monkeypatch, {module.__name__ for module in modules}, [*modules, *helpers])
    plain = family_named("flex")
    several = {"q_tile_shape": (2, 4), "kv_tile_shape": (2, 4)}
    run(CASE, plain, **several)
    run(dataclasses.replace(CASE, layout=(12, 9), dilation=(2, 1)), plain, q_tile_shape=(2, 4), kv_tile_shape=(2, 3))
    run(dataclasses.replace(CASE, edges=("wrap", "shift")), plain, **several)
    run(dataclasses.replace(CASE, extents=((4, 7), (6, 9), (3, 4), (5, 5), (6, 4))), plain, **several)
    run(dataclasses.replace(CASE, additional=0, relative_bias=True, key_bias="heads"), plain, **several)
    # Forward-mode differentiation, and a forward pass without a backward pass.
    operator, operands = CASE.operator(plain.fna), CASE.operands("float32", 0)
    jax.jit(lambda each: jax.jvp(operator, (each,), (each,))).lower(operands)
    jax.jit(operator).lower(operands)
    assert len(known) > 30
    assert called == known
