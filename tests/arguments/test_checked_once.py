"""Checks that are made once for equal arguments: what is kept, and what must not be taken for the same."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax import attention, na1d, na2d
from natten_jax.arguments.static import checked_once

X = jnp.zeros((1, 6, 7, 2, 8))


def counted() -> tuple[Any, list[Any]]:
    """A check that refuses negative numbers, and the arguments that it was asked about."""
    asked: list[Any] = []

    @checked_once
    def check(value: Any) -> str:
        asked.append(value)
        if isinstance(value, int) and value < 0:
            raise ValueError(f"{value} is negative")
        return f"{value!r}"

    return check, asked


@pytest.mark.parametrize("value", [3, 2.5, True, "pp", None, (1, 2), [1, (2, "a")], np.dtype("float32"), ()])
def test_equal_arguments_are_checked_once(value: Any) -> None:
    check, asked = counted()
    assert check(value) == check(value) == f"{value!r}"
    assert len(asked) == 1


def test_arguments_of_other_types_are_others() -> None:
    check, asked = counted()
    alike = [1, 1.0, True, (1, 0), (1.0, 0), (True, 0), (1, False), ((1, 0),), ((True, 0),), ((1,), 0), ((True,), 0)]
    assert [check(value) for value in alike * 2] == [f"{value!r}" for value in alike * 2]
    assert len(asked) == len(alike)


def test_what_was_refused_is_refused_again() -> None:
    check, asked = counted()
    for _ in range(2):
        with pytest.raises(ValueError, match="-1 is negative"):
            check(-1)
    assert asked == [-1, -1]


def test_what_can_change_is_checked_in_every_call() -> None:
    check, asked = counted()
    endless: list[Any] = []
    endless.append(endless)
    for value in (np.array([1]), jnp.ones(1), np.int64(3), {1: 2}, list(range(1000)), endless, range(3), object()):
        check(value)
        check(value)
        assert len(asked) == 2, value
        asked.clear()


def test_a_list_that_changes_is_another() -> None:
    check, _ = counted()
    value = [1, 2]
    assert check(value) == "[1, 2]"
    value[0] = 5
    assert check(value) == "[5, 2]"


def test_memory_is_bounded() -> None:
    check, asked = counted()
    for value in itertools.chain(range(10_000), [0]):
        check(value)
    assert asked.count(0) == 2


# The operators: after a call that is right, ones whose arguments compare equal to its.


def test_windows_that_compare_equal_are_still_refused() -> None:
    na2d(X, X, X, (3, 1), stride=1, dilation=(1, 2), is_causal=(True, False))
    for name, value in (
        ("kernel_size", (3.0, 1)),
        ("kernel_size", (3, True)),
        ("stride", 1.0),
        ("stride", True),
        ("dilation", (True, 2)),
        ("is_causal", (1, 0)),
        ("backward_deterministic", 0),
    ):
        arguments: dict[str, Any] = {
            "kernel_size": (3, 1),
            "stride": 1,
            "dilation": (1, 2),
            "is_causal": (True, False),
            name: value,
        }
        with pytest.raises(TypeError, match=name):
            na2d(X, X, X, **arguments)


def test_attention_that_compares_equal_is_still_refused() -> None:
    x = X.reshape(1, 42, 2, 8)
    attention(x, x, x, is_causal=True)
    with pytest.raises(TypeError, match="is_causal"):
        attention(x, x, x, is_causal=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="scale"):
        attention(x, x, x, scale=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'tile'"):
        attention(x, x, x, tile=1)  # type: ignore[call-overload]


def test_an_array_that_holds_the_window_may_change() -> None:
    window = np.array([3, 3])
    x = jax.random.normal(jax.random.key(0), X.shape)
    before = na2d(x, x, x, window)
    window[:] = 5
    np.testing.assert_array_equal(na2d(x, x, x, window), na2d(x, x, x, (5, 5)))
    np.testing.assert_array_equal(before, na2d(x, x, x, (3, 3)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shapes_and_element_types_are_told_apart(dtype: str) -> None:
    for tokens in (8, 9):
        x = jnp.ones((2, tokens, 1, 8), dtype)
        found = na1d(x, x, x, 3)
        assert (found.shape, found.dtype) == (x.shape, x.dtype)
    with pytest.raises(ValueError, match="kernel_size"):
        na1d(x[:, :2], x[:, :2], x[:, :2], 3)
