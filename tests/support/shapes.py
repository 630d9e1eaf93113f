"""Check annotated array shapes when functions are called."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

Sizes = dict[str, tuple[int, ...]]


def checked(function: Callable[..., Any], called: set[str]) -> Callable[..., Any]:
    """Wrap a function so that it raises if an argument or result does not have its annotated shape.

    Extents with the same name must be equal in all arguments and results of a call. Each call adds the function's name
    to ``called``.
    """
    signature, hints = inspect.signature(function), get_type_hints(function, include_extras=True)

    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        sizes: Sizes = {}
        called.add(function.__qualname__)
        for name, value in signature.bind(*arguments, **named).arguments.items():
            check(value, hints.get(name), sizes, f"{function.__qualname__}: {name}")
        result = function(*arguments, **named)
        check(result, hints.get("return"), sizes, f"{function.__qualname__} returns")
        return result

    return wrapper


def has_shapes(hint: Any) -> bool:
    """Return True if a type annotates the shape of an array."""
    if get_origin(hint) is Annotated:
        return any(isinstance(each, str) for each in hint.__metadata__)
    return any(map(has_shapes, [*get_args(hint), *_fields(hint).values()]))


def check(value: Any, hint: Any, sizes: Sizes, where: str) -> None:
    """Raise if arrays do not have their annotated shapes.

    ``sizes`` maps names to known extents. This function adds the extents with new names.
    """
    if value is None or hint is None:
        return
    if get_origin(hint) is Annotated:
        for words in (each for each in hint.__metadata__ if isinstance(each, str)):
            _check_array(tuple(value.shape), words.split(), sizes, f"{where} {words!r}")
    elif get_origin(hint) in (Union, types.UnionType):
        for each in get_args(hint):
            if has_shapes(each):
                check(value, each, sizes, where)
    elif get_origin(hint) is tuple:
        kinds = get_args(hint)
        kinds = kinds[:1] * len(value) if kinds[1:] == (...,) else kinds
        for i, (each, kind) in enumerate(zip(value, kinds, strict=True)):
            check(each, kind, sizes, f"{where}[{i}]")
    else:
        for name, kind in _fields(hint).items():
            check(getattr(value, name), kind, sizes, f"{where}.{name}")


def _fields(hint: Any) -> dict[str, Any]:
    """Return the types of a named tuple's fields."""
    return get_type_hints(hint, include_extras=True) if hasattr(hint, "_fields") else {}


def _check_array(shape: tuple[int, ...], words: Sequence[str], sizes: Sizes, where: str) -> None:
    several = [i for i, word in enumerate(words) if word.startswith("*") or word == "..."]
    assert len(several) <= 1, f"{where}: two names of several extents"
    extra = len(shape) - len(words)
    assert extra == 0 or (several and extra >= -1), f"{where}: it is {shape}"
    begin = 0
    for i, word in enumerate(words):
        end = begin + 1 + (extra if i in several else 0)
        found, begin = shape[begin:end], end
        if word.isdigit():
            assert found == (int(word),), f"{where}: it is {shape}"
        elif word == "_":
            assert len(found) == 1, f"{where}: it is {shape}"
        elif word != "...":
            expected = sizes.setdefault(word, found)
            assert found == expected, f"{where}: it is {shape}, but {word} is {expected}"
