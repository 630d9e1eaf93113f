"""Validation of static arguments: Python numbers and tuples, converted from any type.

Results are hashable and canonical. Values may be Python's, NumPy's or untraced JAX arrays. Checks of equal arguments
are cached (:func:`checked_once`): outside of ``jax.jit`` a small problem on a host takes 97 us instead of 204 with
``cpu-fna``, and 76 instead of 161 with ``flex-fna``.
"""

from __future__ import annotations

import difflib
import functools
import numbers
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from types import MappingProxyType
from typing import Any, TypeVar, TypeVarTuple

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T", int, bool)
C = TypeVar("C", bound=str)

#: A value for each dimension, or a single value for all. Arrays must be concrete at trace time.
Ints = int | Sequence[int] | np.ndarray[Any, Any] | jax.Array
Bools = bool | Sequence[bool] | np.ndarray[Any, Any] | jax.Array

_ARRAYS = (np.ndarray, jax.Array)
_TEXT = (str, bytes, bytearray, memoryview)  # sequences whose elements are not numbers
_MOST_VALUES = 64  # most elements of a sequence in a message
_LONGEST = 160  # most characters of a value in a message
_INT = frozenset((int,))
#: Largest integer that kernels accept.
LARGEST_INT = 2**63 - 1
#: Packages whose stack frames are skipped to find the user's line for a warning.
_BETWEEN = ("natten_jax", "jax", "jaxlib", "flax", "contextlib")


def shown(value: Any) -> str:
    """Return the ``repr`` of a wrong value for a message, shortened if it is long."""
    kind = type(value).__name__
    if isinstance(value, _ARRAYS):
        is_traced = isinstance(value, jax.core.Tracer)
        if not is_traced and (value.size > _MOST_VALUES or not isinstance(value.dtype, np.dtype)):
            return f"an array of shape {value.shape} and dtype {value.dtype}"
    elif isinstance(value, Sized) and not isinstance(value, range) and len(value) > _MOST_VALUES:
        return f"a {kind} of length {len(value)}"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer beyond Python's digit limit, or recursive lists
        return f"a {kind} that is too long to show"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def warn_of_line(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and point at the user's line that calls this package, jax or flax."""
    level, frame = 1, sys._getframe().f_back
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level + 1)


def check_static(name: str, value: Any) -> None:
    """Reject traced arrays, whose values are unknown at trace time."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} must be static, got the traced array {shown(value)}: hand it to jax.jit as "
            f"static_argnames={name!r}, or give a Python value or a NumPy array that is made outside"
        )


def int_tuple(
    name: str,
    value: Any,
    rank: int,
    *,
    repeat: bool = True,
    least: int = 1,
    words: Mapping[int, str] = MappingProxyType({}),
) -> tuple[int, ...]:
    """Convert ``value`` to ``rank`` Python ints of at least ``least``; a single int is repeated if ``repeat``.

    Args:
        name: The name of the argument.
        value: The argument.
        rank: Number of ints.
        repeat: True if a single int is allowed.
        least: Smallest allowed number.
        words: Additional allowed numbers, with their meanings.

    Raises:
        TypeError: ``value`` is traced, or not all its elements are ints.
        ValueError: ``value`` has another length, or an int is too small or too large for the kernels.
    """
    values: tuple[int, ...]
    if type(value) is int and repeat:
        values = (value,) * rank
    elif type(value) is tuple and len(value) == rank and _INT.issuperset(map(type, value)):
        values = value
    else:
        article = "an int or " if repeat else ""
        values = _tuple_of(python_int, name, value, rank, article, "ints", repeat)
    if min(values, default=least) < least and any(each < least and each not in words for each in values):
        others = "".join(f", or {number} for {meaning}" for number, meaning in words.items())
        raise ValueError(f"{name} must be at least {least}{others} in every dimension, got {shown(value)}")
    if max(values, default=1) > LARGEST_INT:
        raise ValueError(f"{name} must be less than 2**63 in every dimension, got {shown(value)}")
    return values


def bool_tuple(name: str, value: Any, rank: int) -> tuple[bool, ...]:
    """Convert ``value`` to ``rank`` Python bools; a single bool is repeated.

    Raises:
        TypeError: ``value`` is traced, or has an element that is not a bool.
        ValueError: ``value`` has another length.
    """
    if type(value) is bool:
        return (value,) * rank
    return _tuple_of(_python_bool, name, value, rank, "a bool or ", "bools", True)


def choice_tuple(name: str, value: Any, choices: Sequence[C], rank: int) -> tuple[C, ...]:
    """Convert ``value`` to ``rank`` of the allowed words; a single word is repeated.

    Raises:
        TypeError: ``value`` is neither a word nor a sequence of words.
        ValueError: ``value`` has another length, or an unknown word.
    """
    if type(value) is str and value in choices:
        return (choices[choices.index(value)],) * rank
    words = " or ".join(map(repr, choices))
    values: Any = (value,) * rank if isinstance(value, str) else value
    if not isinstance(values, Sequence) or any(not isinstance(each, str) for each in values[:_MOST_VALUES]):
        raise TypeError(f"{name} must be {words}, or a sequence of {rank} of them, got {shown(value)}")
    if len(values) != rank:
        raise ValueError(f"{name} must have {rank} value(s), one per token dimension, got {shown(value)}")
    unknown = next((each for each in values if each not in choices), None)
    if unknown is not None:
        raise ValueError(
            f"{name} must be {words} in every dimension, got {shown(value)}{_suggestion(unknown, choices)}"
        )
    return tuple(choices[choices.index(each)] for each in values)


#: Other libraries' words for the values of ``edges``.
_SYNONYMS = {"wrap": "periodic circular torus cyclic", "cut": "truncate zeros valid same", "shift": "clamp reflect"}


def _suggestion(word: str, choices: Sequence[str]) -> str:
    written = word[:64].lower()
    by_word = {each: choice for choice in choices for each in (choice, *_SYNONYMS.get(choice, "").split())}
    near = difflib.get_close_matches(written, by_word, 1)
    return f": did you mean {by_word[near[0]]!r}?" if near else ""


def one_bool(name: str, value: Any) -> bool:
    """Convert a Python or NumPy bool, or a zero-dimensional bool array, to a Python bool."""
    check_static(name, value)
    found = _python_bool(value)
    if found is None:
        raise TypeError(f"{name} must be a bool, got {_with_dtype(value)}")
    return found


def flag(name: str, value: Any, *, or_none: bool = False) -> bool:
    """Return ``value``, a Python or NumPy bool, as a Python bool; ``or_none`` adds ``None`` to the error message."""
    check_static(name, value)
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be {'None or ' if or_none else ''}a bool, got {shown(value)}")
    return bool(value)


def hashable(value: Any) -> Any:
    """Convert sequences and one-dimensional arrays to tuples, and zero-dimensional arrays to Python numbers.

    Values that every check would reject are returned unchanged, for the check to reject.
    """
    if isinstance(value, _ARRAYS):
        is_known = isinstance(value.dtype, np.dtype) and not isinstance(value, jax.core.Tracer)
        if not is_known or value.ndim > 1 or value.size > _MOST_VALUES:
            return value
        values = np.asarray(value).tolist()
        return tuple(values) if isinstance(values, list) else values
    if not isinstance(value, Sequence) or isinstance(value, _TEXT) or len(value) > _MOST_VALUES:
        return value
    return tuple(hashable(each) if isinstance(each, _ARRAYS) else each for each in value)


def _tuple_of(
    read: Callable[[Any], T | None], name: str, value: Any, rank: int, article: str, kinds: str, repeat: bool
) -> tuple[T, ...]:
    """Convert ``value`` to ``rank`` values with ``read``; a single value is repeated if ``repeat`` allows it."""
    check_static(name, value)
    is_array = isinstance(value, _ARRAYS)
    if is_array and value.ndim > 0:
        if not isinstance(value.dtype, np.dtype) or read(np.zeros((), value.dtype)) is None:
            raise TypeError(f"{name} must hold {kinds} only, got {_with_dtype(value)}")
        if value.shape != (rank,):
            raise ValueError(
                f"{name} must have {rank} value(s), one per token dimension, got {shown(value)} of shape {value.shape}"
            )
        value = np.asarray(value)
    elif is_array or not isinstance(value, Sequence) or isinstance(value, _TEXT):
        one = read(value) if repeat else None
        if one is None:
            raise TypeError(f"{name} must be {article}a sequence of {rank} {kinds}, got {_with_dtype(value)}")
        return (one,) * rank
    first = value[: max(rank, _MOST_VALUES)]  # do not check every element of a long sequence
    for each in first:
        check_static(name, each)
    found = [read(each) for each in first]
    values = tuple(each for each in found if each is not None)
    if len(values) < len(found):
        raise TypeError(f"{name} must hold {kinds} only, got {shown(value)}")
    if len(value) != rank:
        raise ValueError(f"{name} must have {rank} value(s), one per token dimension, got {shown(value)}")
    return values


def python_int(value: Any) -> int | None:
    """Convert an integer of any type, or a zero-dimensional integer array, to an int; ``None`` for other values."""
    if isinstance(value, _ARRAYS):
        return int(value) if value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.integer) else None
    if isinstance(value, numbers.Integral) and not isinstance(value, (bool, np.bool_)):
        return int(value)
    return None


def _python_bool(value: Any) -> bool | None:
    """Convert a bool of any type, or a zero-dimensional bool array, to a bool; ``None`` for other values."""
    if isinstance(value, _ARRAYS):
        return bool(value) if value.ndim == 0 and value.dtype == np.bool_ else None
    return bool(value) if isinstance(value, (bool, np.bool_)) else None


def _with_dtype(value: Any) -> str:
    return f"{shown(value)} of dtype {value.dtype}" if isinstance(value, _ARRAYS) else shown(value)


Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

#: Types of immutable values, for which results are cached.
_KEPT = (type(None), bool, int, float, str, np.dtype)
_MOST_RESULTS, _LONGEST_KEY = 4096, 1024


def checked_once(check: Callable[[*Arguments], Result]) -> Callable[[*Arguments], Result]:
    """Cache the result of a check for equal arguments.

    Results are cached for numbers, text, ``None``, element types, and tuples and lists of these. All further arguments,
    and rejected arguments, are checked in every call.

    Args:
        check: A pure function, whose result is immutable.
    """
    results: dict[tuple[Any, ...], Result] = {}

    @functools.wraps(check)
    def result_of(*arguments: *Arguments) -> Result:
        key = _key(arguments)
        if key is None:
            return check(*arguments)
        if key not in results:
            found = check(*arguments)
            if len(results) >= _MOST_RESULTS:
                results.clear()
            results[key] = found
            return found
        return results[key]

    return result_of


def _key(value: Any) -> tuple[Any, ...] | None:
    """Return a cache key for a value; ``None`` disables caching. The key has types, because ``1 == True``.

    Long sequences, and sequences that contain themselves, are not cached.
    """
    key: list[Any] = []
    rest = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, (tuple, list)) and len(part) <= _MOST_VALUES:
            key += type(part), len(part)
            rest += part
        elif isinstance(part, _KEPT):
            key += type(part), part
        else:
            return None
        if len(key) > _LONGEST_KEY:
            return None
    return tuple(key)


#: Assumed size of a symbolic batch: tiles also suit a single entry, and hundreds of entries take little memory per
#: step.
_ASSUMED_BATCH = 8


def planned_batch(batch: int) -> int:
    """Return ``batch``, or if it is symbolic the size that the cost model assumes."""
    return batch if isinstance(batch, int) else _ASSUMED_BATCH


def least_batch(batch: int) -> int:
    """Return ``batch``, or 1 if it is symbolic, for limits on memory that batch entries use one after another."""
    return batch if isinstance(batch, int) else 1


def check_extents(name: str, shape: Sequence[int], dimensions: Sequence[str]) -> None:
    """Check that only the batch is symbolic.

    Args:
        name: The name of the argument.
        shape: Its shape.
        dimensions: Names of the dimensions, the batch first.

    Raises:
        ValueError: Another extent is symbolic.
    """
    for axis, (what, extent) in enumerate(zip(dimensions, shape, strict=True)):
        if axis > 0 and not isinstance(extent, int):
            raise ValueError(
                f"{name} has shape {tuple(shape)}, in which {what} (dimension {axis}) is the symbolic {extent}: only "
                "the batch may be symbolic, because windows and tiles depend on the rest; export one for each"
            )


def array_of(value: Any) -> Any:
    """Return the array of an object with ``__jax_array__``; other objects are returned unchanged."""
    # JAX's own tracers have the attribute with the value None.
    convert = getattr(value, "__jax_array__", None)
    return value if convert is None else convert()
