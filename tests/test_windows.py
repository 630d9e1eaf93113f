"""The window arithmetic, in Python and in C++, against the definition that the oracle walks through."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from natten_jax import native, windows

#: ``length, kernel_size, stride, is_causal`` and the windows ``[start, end)`` of all queries.
EXAMPLES = [
    (8, 3, 1, False, "0-3 0-3 1-4 2-5 3-6 4-7 5-8 5-8"),
    (8, 4, 1, False, "0-4 0-4 0-4 1-5 2-6 3-7 4-8 4-8"),
    (8, 4, 2, False, "0-4 0-4 1-5 1-5 3-7 3-7 4-8 4-8"),
    (8, 4, 3, False, "0-4 0-4 0-4 2-6 2-6 2-6 4-8 4-8"),
    (8, 4, 4, False, "0-4 0-4 0-4 0-4 4-8 4-8 4-8 4-8"),
    (10, 4, 4, False, "0-4 0-4 0-4 0-4 4-8 4-8 4-8 4-8 6-10 6-10"),
    (8, 4, 1, True, "0-1 0-2 0-3 0-4 1-5 2-6 3-7 4-8"),
    (8, 4, 2, True, "0-1 0-2 0-3 0-4 2-5 2-6 4-7 4-8"),
    (10, 4, 3, True, "0-1 0-2 0-3 2-4 2-5 2-6 5-7 5-8 5-9 6-10"),
    (10, 4, 4, True, "0-1 0-2 0-3 0-4 4-5 4-6 4-7 4-8 6-9 6-10"),
]
LARGEST = 24


def parameters(length: int) -> Iterator[tuple[int, int, bool]]:
    """Every ``kernel_size, stride, is_causal`` of a line."""
    for kernel_size in range(1, length + 1):
        yield from itertools.product([kernel_size], range(1, kernel_size + 1), (False, True))


def mask_of_bounds(start: Any, end: Any, length: int) -> np.ndarray:
    """``[rows, length]``: whether each column lies in a row's range."""
    columns = np.arange(length)
    return (np.asarray(start)[:, None] <= columns) & (columns < np.asarray(end)[:, None])


@pytest.mark.parametrize(("length", "kernel_size", "stride", "is_causal", "expected"), EXAMPLES)
def test_written_out_examples(length: int, kernel_size: int, stride: int, is_causal: bool, expected: str) -> None:
    bounds = [windows.window_bounds(i, length, kernel_size, stride, is_causal) for i in range(length)]
    assert " ".join(f"{start}-{end}" for start, end in bounds) == expected
    walked = [oracle.window(i, length, kernel_size, stride, is_causal) for i in range(length)]
    assert " ".join(f"{seen.start}-{seen.stop}" for seen in walked) == expected


@pytest.mark.parametrize("length", range(1, LARGEST + 1))
def test_windows_and_their_inverse_are_the_definition(length: int) -> None:
    index = np.arange(length)
    for kernel_size, stride, is_causal in parameters(length):
        mask = oracle.line_mask.__wrapped__(length, kernel_size, stride, 1, is_causal)
        start, end = windows.window_bounds(index, length, kernel_size, stride, is_causal)
        np.testing.assert_array_equal(mask_of_bounds(start, end, length), mask)
        first, last = windows.inverse_window_bounds(index, length, length, kernel_size, stride, is_causal)
        np.testing.assert_array_equal(mask_of_bounds(first, last, length), mask.T)


@pytest.mark.parametrize("length", range(1, LARGEST + 1))
def test_what_kernels_rely_on(length: int) -> None:
    """Bounds never decrease, no query sees nothing, every key is seen, full windows have their size."""
    index = np.arange(length)
    for kernel_size, stride, is_causal in parameters(length):
        start, end = windows.window_bounds(index, length, kernel_size, stride, is_causal)
        assert (np.diff(start) >= 0).all() and (np.diff(end) >= 0).all()
        assert (start <= index).all() and (index < end).all()
        assert is_causal or (end - start == kernel_size).all()
        first, last = windows.inverse_window_bounds(index, length, length, kernel_size, stride, is_causal)
        assert (first < last).all()
        assert (np.diff(first) >= 0).all() and (np.diff(last) >= 0).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_whole_windows_between_sequences_of_different_lengths(is_causal: bool) -> None:
    for queries, keys in itertools.product(range(1, 13), repeat=2):
        mask = oracle.attention_mask(queries, keys, is_causal)
        for stride in range(1, keys + 1):
            start, end = windows.window_bounds(np.arange(queries), keys, keys, stride, is_causal)
            np.testing.assert_array_equal(mask_of_bounds(start, end, keys), mask)
            first, last = windows.inverse_window_bounds(np.arange(keys), queries, keys, keys, stride, is_causal)
            assert ((first >= 0) & (first <= last) & (last <= queries)).all()
            np.testing.assert_array_equal(mask_of_bounds(first, last, queries), mask.T)


@given(st.integers(1, 10**6), st.integers(1, 100), st.data())
def test_group_length_counts_the_tokens_of_a_dilation_group(extent: int, dilation: int, data: st.DataObject) -> None:
    group = data.draw(st.integers(0, min(extent, dilation) - 1))
    assert windows.group_length(extent, dilation, group) == len(range(group, extent, dilation))


@st.composite
def lines(draw: st.DrawFn, largest: int) -> tuple[int, int, int, int, bool]:
    """``index, length, kernel_size, stride, is_causal`` of one dilation group."""
    extent = draw(st.integers(1, largest))
    dilation = draw(st.one_of(st.just(1), st.integers(1, extent)))
    group = draw(st.integers(0, dilation - 1))
    length = windows.group_length(extent, dilation, group)
    kernel_size = draw(st.integers(1, extent // dilation))
    index = draw(st.integers(0, length - 1))
    return index, length, kernel_size, draw(st.integers(1, kernel_size)), draw(st.booleans())


@given(lines(2**40))
def test_a_long_line_agrees_with_its_inverse(line: tuple[int, int, int, int, bool]) -> None:
    """Just inside and just outside both ends of a window, and of an inverse window."""
    index, length, kernel_size, stride, is_causal = line
    window = kernel_size, stride, is_causal

    def sees(query: int, key: int) -> bool:
        start, end = windows.window_bounds(query, length, *window)
        return bool(start <= key < end)

    def is_seen(query: int, key: int) -> bool:
        first, last = windows.inverse_window_bounds(key, length, length, *window)
        return bool(first <= query < last)

    for key in {k + e for k in windows.window_bounds(index, length, *window) for e in (-1, 0)}:
        if 0 <= key < length:
            assert sees(index, int(key)) == is_seen(index, int(key))
    for query in {q + e for q in windows.inverse_window_bounds(index, length, length, *window) for e in (-1, 0)}:
        if 0 <= query < length:
            assert sees(int(query), index) == is_seen(int(query), index)


@given(lines(300))
def test_a_query_of_a_long_line_sees_what_the_definition_says(line: tuple[int, int, int, int, bool]) -> None:
    seen = oracle.window(*line)
    assert windows.window_bounds(*line) == (seen.start, seen.stop)


@pytest.mark.parametrize("length", [1, 2, 7, 9])
def test_jax_and_numpy_agree(length: int) -> None:
    index = np.arange(length, dtype=np.int32)
    for window in parameters(length):
        for function, arguments in (
            (windows.window_bounds, (length, *window)),
            (windows.inverse_window_bounds, (length, length, *window)),
        ):
            expected = function(index, *arguments)
            found = function(jnp.asarray(index), *arguments, xp=jnp)
            assert all(isinstance(array, jnp.ndarray) for array in found)
            np.testing.assert_array_equal(found, expected)


# The same arithmetic in C++ -----------------------------------------------------------------------------------------


@pytest.fixture
def compiled() -> Any:
    """The native module."""
    assert native.load_error is None, native.load_error
    _native: Any = importlib.import_module("natten_jax._native")

    return _native


def same(function: Callable[..., Any], twin: Callable[..., Any], *arguments: Any) -> None:
    """Compare the Python function with its native twin."""
    expected = function(*arguments)
    expected = tuple(map(int, expected)) if isinstance(expected, tuple) else int(expected)
    found = twin(*arguments)
    found = tuple(found) if isinstance(expected, tuple) else found
    assert found == expected, (function.__name__, arguments)


@pytest.mark.parametrize("length", range(1, LARGEST + 1))
def test_native_windows_equal_python(compiled: Any, length: int) -> None:
    index = np.arange(length)
    for window in parameters(length):
        bounds = np.stack(windows.window_bounds(index, length, *window), axis=1).tolist()
        assert [list(compiled.window_bounds(i, length, *window)) for i in range(length)] == bounds
        bounds = np.stack(windows.inverse_window_bounds(index, length, length, *window), axis=1).tolist()
        assert [list(compiled.inverse_window_bounds(i, length, length, *window)) for i in range(length)] == bounds


def test_native_windows_of_different_lengths_equal_python(compiled: Any) -> None:
    for queries, keys, is_causal in itertools.product(range(1, 10), range(1, 10), (False, True)):
        for stride in range(1, keys + 1):
            for i in range(queries):
                same(windows.window_bounds, compiled.window_bounds, i, keys, keys, stride, is_causal)
            for j in range(keys):
                arguments = (j, queries, keys, keys, stride, is_causal)
                same(windows.inverse_window_bounds, compiled.inverse_window_bounds, *arguments)


@given(lines(2**40))
def test_native_windows_of_long_lines_equal_python(line: tuple[int, int, int, int, bool]) -> None:
    assert native.load_error is None, native.load_error
    _native: Any = importlib.import_module("natten_jax._native")

    index, length, *window = line
    same(windows.window_bounds, _native.window_bounds, *line)
    same(windows.inverse_window_bounds, _native.inverse_window_bounds, index, length, length, *window)


@given(st.integers(1, 2**40), st.integers(1, 2**40), st.data())
def test_native_group_length_equals_python(extent: int, dilation: int, data: st.DataObject) -> None:
    assert native.load_error is None, native.load_error
    _native: Any = importlib.import_module("natten_jax._native")

    group = data.draw(st.integers(0, min(extent, dilation) - 1))
    same(windows.group_length, _native.group_length, extent, dilation, group)
