"""Compare the window arithmetic in Python with the oracle's definition, and the C++ implementation with Python."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from natten_jax import windows
from natten_jax.native import module as native
from natten_jax.windows import EDGES, Edge, Window
from tests.support import oracle

#: Number of tokens, ``kernel_size``, ``stride``, causality or edge mode, and the keys that each query sees.
EXAMPLES: list[tuple[int, int, int, bool | Edge, str]] = [
    (8, 3, 1, False, "012 012 123 234 345 456 567 567"),
    (8, 4, 1, False, "0123 0123 0123 1234 2345 3456 4567 4567"),
    (8, 4, 2, False, "0123 0123 1234 1234 3456 3456 4567 4567"),
    (8, 4, 3, False, "0123 0123 0123 2345 2345 2345 4567 4567"),
    (9, 4, 4, False, "0123 0123 0123 0123 4567 4567 4567 4567 5678"),
    (8, 4, 1, True, "0 01 012 0123 1234 2345 3456 4567"),
    (8, 4, 2, True, "0 01 012 0123 234 2345 456 4567"),
    (10, 4, 3, True, "0 01 012 23 234 2345 56 567 5678 6789"),
    (10, 4, 4, True, "0 01 012 0123 4 45 456 4567 678 6789"),
    (6, 3, 1, "cut", "01 012 123 234 345 45"),
    (6, 4, 1, "cut", "01 012 0123 1234 2345 345"),
    (7, 3, 2, "cut", "012 012 234 234 456 456 56"),
    (7, 3, 3, "cut", "012 012 012 345 345 345 56"),
    (6, 3, 1, "wrap", "501 012 123 234 345 450"),
    (6, 4, 1, "wrap", "4501 5012 0123 1234 2345 3450"),
    (7, 3, 2, "wrap", "012 012 234 234 456 456 560"),
    (7, 5, 4, "wrap", "01234 01234 01234 01234 45601 45601 45601"),
]
LARGEST = 24


def parameters(length: int) -> Iterator[Window]:
    """Yield every window for a dilation group of ``length`` tokens."""
    for kernel_size in range(1, length + 1):
        for stride in range(1, kernel_size + 1):
            yield Window(kernel_size, stride, True)
            for edges in EDGES:
                yield Window(kernel_size, stride, False, edges)


def mask_around(start: Any, end: Any, length: int) -> np.ndarray:
    """Return ``[rows, length]``: how often the row's range, wrapped around, contains the column."""
    return np.sum([mask_of_bounds(start, end, length, shift) for shift in (-length, 0, length)], axis=0)


def mask_of_bounds(start: Any, end: Any, length: int, shift: int = 0) -> np.ndarray:
    """Return ``[rows, length]``: True if the row's range contains ``column + shift``."""
    columns = np.arange(length) + shift
    return (np.asarray(start)[:, None] <= columns) & (columns < np.asarray(end)[:, None])


@pytest.mark.parametrize(("length", "kernel_size", "stride", "kind", "expected"), EXAMPLES)
def test_written_out_examples(length: int, kernel_size: int, stride: int, kind: bool | Edge, expected: str) -> None:
    edges: Edge = "shift" if isinstance(kind, bool) else kind
    window = Window(kernel_size, stride, kind is True, edges)
    bounds = [windows.window_bounds(window, i, length) for i in range(length)]
    assert " ".join("".join(str(key % length) for key in range(*each)) for each in bounds) == expected
    walked = [oracle.window(i, length, *window) for i in range(length)]
    assert " ".join("".join(map(str, seen)) for seen in walked) == expected


@pytest.mark.parametrize("length", range(1, LARGEST + 1))
def test_windows_and_their_inverse_are_the_definition(length: int) -> None:
    index = np.arange(length)
    for window in parameters(length):
        mask = oracle.line_mask.__wrapped__(
            length, window.kernel_size, window.stride, 1, window.is_causal, window.edges
        )
        start, end = windows.window_bounds(window, index, length)
        first, last = windows.inverse_window_bounds(window, index, length, length)
        mask_from_bounds = mask_around if window.edges == "wrap" else mask_of_bounds
        np.testing.assert_array_equal(mask_from_bounds(start, end, length), mask)
        np.testing.assert_array_equal(mask_from_bounds(first, last, length), mask.T)
        # Starts and ends of ranges never decrease, every window contains its query, and every key is seen by a query.
        assert (np.diff([start, end, first, last]) >= 0).all()
        assert (start <= index).all() and (index < end).all() and (first < last).all()
        if window.edges != "wrap":
            assert (start >= 0).all() and (end <= length).all() and (first >= 0).all() and (last <= length).all()
        if window.edges != "cut" and not window.is_causal:
            assert (end - start == window.kernel_size).all()
        if window.edges == "wrap":  # inverse windows repeat with period ``length``
            for round_ in (-2, -1, 1, 2):
                again = windows.inverse_window_bounds(window, index + round_ * length, length, length)
                np.testing.assert_array_equal(again, np.array([first, last]) + round_ * length)


@pytest.mark.parametrize("is_causal", [False, True])
def test_whole_windows_between_sequences_of_different_lengths(is_causal: bool) -> None:
    for queries, keys in itertools.product(range(1, 13), repeat=2):
        mask = oracle.attention_mask(queries, keys, is_causal)
        for stride in range(1, keys + 1):
            window = Window(keys, stride, is_causal)
            start, end = windows.window_bounds(window, np.arange(queries), keys)
            np.testing.assert_array_equal(mask_of_bounds(start, end, keys), mask)
            first, last = windows.inverse_window_bounds(window, np.arange(keys), queries, keys)
            assert ((first >= 0) & (first <= last) & (last <= queries)).all()
            np.testing.assert_array_equal(mask_of_bounds(first, last, queries), mask.T)


@given(st.integers(1, 10**6), st.integers(1, 100), st.data())
def test_group_length_counts_the_tokens_of_a_dilation_group(extent: int, dilation: int, data: st.DataObject) -> None:
    group = data.draw(st.integers(0, min(extent, dilation) - 1))
    assert windows.group_length(extent, dilation, group) == len(range(group, extent, dilation))


@st.composite
def lines(draw: st.DrawFn, largest: int) -> tuple[Window, int, int]:
    """Draw a window, the index of a token in its dilation group, and the number of tokens in this group."""
    extent = draw(st.integers(1, largest))
    dilation = draw(st.one_of(st.just(1), st.integers(1, extent)))
    group = draw(st.integers(0, dilation - 1))
    length = windows.group_length(extent, dilation, group)
    kernel_size = draw(st.integers(1, extent // dilation))
    index = draw(st.integers(0, length - 1))
    is_causal = draw(st.booleans())
    edges: Edge = "shift" if is_causal else draw(st.sampled_from(EDGES))
    return Window(kernel_size, draw(st.integers(1, kernel_size)), is_causal, edges), index, length


@given(lines(2**40))
def test_a_long_line_agrees_with_its_inverse(line: tuple[Window, int, int]) -> None:
    """Test the tokens just inside and just outside both ends of a window and of an inverse window."""
    window, index, length = line

    def sees(query: int, key: int) -> bool:
        start, end = windows.window_bounds(window, query, length)
        return bool(start <= key < end)

    def is_seen(query: int, key: int) -> bool:
        first, last = windows.inverse_window_bounds(window, key, length, length)
        return bool(first <= query < last)

    for key in {k + e for k in windows.window_bounds(window, index, length) for e in (-1, 0)}:
        if 0 <= key < length:
            assert sees(index, int(key)) == is_seen(index, int(key))
    for query in {q + e for q in windows.inverse_window_bounds(window, index, length, length) for e in (-1, 0)}:
        if 0 <= query < length:
            assert sees(int(query), index) == is_seen(int(query), index)


@given(lines(300))
def test_a_query_in_a_long_dimension_follows_the_definition(line: tuple[Window, int, int]) -> None:
    window, index, length = line
    seen = oracle.window(index, length, *window)
    start, end = windows.window_bounds(*line)
    assert [key % length for key in range(start, end)] == seen


@pytest.mark.parametrize("length", [1, 2, 7, 9])
def test_jax_and_numpy_agree(length: int) -> None:
    index = np.arange(length, dtype=np.int32)
    for window in parameters(length):
        for function, arguments in (
            (windows.window_bounds, (length,)),
            (windows.inverse_window_bounds, (length, length)),
        ):
            expected = function(window, index, *arguments)
            found = function(window, jnp.asarray(index), *arguments, xp=jnp)
            assert all(isinstance(array, jnp.ndarray) for array in found)
            np.testing.assert_array_equal(found, expected)


# C++ implementation of windows --------------------------------------------------------------------------------------


@functools.cache
def compiled() -> Any:
    """Import and return the native module."""
    assert native.load_error is None, native.load_error
    return importlib.import_module("natten_jax._native")


def native_facts(window: Window) -> tuple[int, int, int]:
    """Return window size, stride and the value of the enum ``Ends`` in csrc/include/natten_jax/windows.h."""
    return window.kernel_size, window.stride, 1 if window.is_causal else {"shift": 0, "cut": 2, "wrap": 3}[window.edges]


def same_window(window: Window, index: int, length: int) -> None:
    """Check that the native implementation and Python return the same window of a query."""
    expected = tuple(map(int, windows.window_bounds(window, index, length)))
    assert tuple(compiled().window_bounds(index, length, *native_facts(window))) == expected, (window, index, length)


def same_inverse_window(window: Window, index: int, queries: int, keys: int) -> None:
    """Check that the native implementation and Python return the same inverse window of a key."""
    expected = tuple(map(int, windows.inverse_window_bounds(window, index, queries, keys)))
    found = tuple(compiled().inverse_window_bounds(index, queries, keys, *native_facts(window)))
    assert found == expected, (window, index, queries, keys)


@pytest.mark.parametrize("length", range(1, LARGEST + 1))
def test_native_windows_equal_python(length: int) -> None:
    index = np.arange(length)
    for window in parameters(length):
        bounds = np.stack(windows.window_bounds(window, index, length), axis=1).tolist()
        assert [list(compiled().window_bounds(i, length, *native_facts(window))) for i in range(length)] == bounds
        bounds = np.stack(windows.inverse_window_bounds(window, index, length, length), axis=1).tolist()
        assert [
            list(compiled().inverse_window_bounds(i, length, length, *native_facts(window))) for i in range(length)
        ] == bounds
        for i in (-length, -1, length, 2 * length - 1) if window.edges == "wrap" else ():
            same_inverse_window(window, i, length, length)


def test_native_windows_of_different_lengths_equal_python() -> None:
    for queries, keys, is_causal in itertools.product(range(1, 10), range(1, 10), (False, True)):
        for stride in range(1, keys + 1):
            window = Window(keys, stride, is_causal)
            for i in range(queries):
                same_window(window, i, keys)
            for j in range(keys):
                same_inverse_window(window, j, queries, keys)


@given(lines(2**40))
def test_native_windows_of_long_lines_equal_python(line: tuple[Window, int, int]) -> None:
    window, index, length = line
    same_window(window, index, length)
    same_inverse_window(window, index, length, length)


@given(st.integers(1, 2**40), st.integers(1, 2**40), st.data())
def test_native_group_length_equals_python(extent: int, dilation: int, data: st.DataObject) -> None:
    group = data.draw(st.integers(0, min(extent, dilation) - 1))
    expected = windows.group_length(extent, dilation, group)
    assert compiled().group_length(extent, dilation, group) == expected, (extent, dilation, group)
