"""Arguments with one value per dimension, and flags: accepted containers, errors, and caching of the checks."""

from __future__ import annotations

import array
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import natten_jax
from natten_jax import attention, na2d
from natten_jax.arguments.static import checked_once
from natten_jax.arrays.operands import Inputs
from natten_jax.ops.canonicalize import neighborhood_problem
from natten_jax.windows import WindowArguments
from tests.support.problems import OPERATORS

# Arguments with one value per dimension, and flags: accepted containers, and errors.


LAYOUT = (8, 9, 10)

INTS = ("kernel_size", "stride", "dilation")

TILES = ("q_tile_shape", "kv_tile_shape")


def query_of(rank: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(rank).standard_normal((1, *LAYOUT[:rank], 2, 8)), "float32")


def call(rank: int, **arguments: Any) -> Any:
    query = query_of(rank)
    return OPERATORS[rank](query, query, query, **{"kernel_size": 3, **arguments})


def refused(error: type[Exception], parts: tuple[str, ...], function: Callable[[], Any]) -> None:
    with pytest.raises(error) as caught:
        function()
    assert type(caught.value) is error
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert len(message) < 600


HOLDERS: dict[str, Callable[[tuple[int, ...]], Any]] = {
    "list": list,
    "numpy": np.array,
    "numpy-int8": lambda values: np.array(values, np.int8),
    "jax": jnp.array,
    "numpy-scalars": lambda values: tuple(map(np.int32, values)),
    "numpy-0d": lambda values: [np.array(value) for value in values],
    "jax-0d": lambda values: [jnp.array(value) for value in values],
    "python-array": lambda values: array.array("i", values),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_integers_may_be_held_in_sequences_and_arrays(hold: Callable[..., Any], rank: int) -> None:
    values = {
        "kernel_size": (3, 4, 5)[:rank], "stride": (2, 1, 3)[:rank], "dilation": (1, 2, 1)[:rank],
        "q_tile_shape": (4,) * rank, "kv_tile_shape": (2, 4, 2)[:rank],
    }  # fmt: skip
    expected = call(rank, **values, backend="flex-fna")
    held = {name: hold(value) for name, value in values.items()}
    np.testing.assert_array_equal(call(rank, **held, backend="flex-fna"), expected)


@pytest.mark.parametrize("hold", [np.array, jnp.array, list, lambda v: [np.array(x) for x in v]])
def test_booleans_may_be_held_in_sequences_and_arrays(hold: Callable[..., Any]) -> None:
    np.testing.assert_array_equal(call(2, is_causal=hold((True, False))), call(2, is_causal=(True, False)))


@pytest.mark.parametrize("array_of", [np.array, jnp.array, np.int64])
def test_arrays_of_no_dimension_are_scalars(array_of: Callable[..., Any]) -> None:
    arguments = {"kernel_size": 4, "stride": 2, "dilation": 2, "backward_kv_splits": 3}
    held = {name: array_of(value) for name, value in arguments.items()}
    flag: Any = array_of(True) if array_of is not np.int64 else np.True_
    np.testing.assert_array_equal(call(2, **held, is_causal=flag), call(2, **arguments, is_causal=True))
    query = query_of(1)
    attend: Any = functools.partial(natten_jax.attention, query, query, query)
    out = attend(is_causal=flag, return_lse=np.False_)
    np.testing.assert_array_equal(out, attend(is_causal=True))


@given(
    values=st.lists(st.integers(1, 2**31), min_size=2, max_size=2),
    dtype=st.sampled_from([np.int64, np.uint32, np.uint64]),
)
def test_windows_are_canonical_whatever_they_are_held_in(values: list[int], dtype: Any) -> None:
    held = np.array(values, dtype)
    expected = WindowArguments(tuple(values), 1, tuple(values), False).checked(2)
    found: Any = WindowArguments(held, np.array(1), list(held), np.array([False, False])).checked(2)
    assert found == expected
    assert all(type(value) is int for part in found[:3] for value in part)
    assert all(type(value) is bool for value in found[3])
    assert hash(found) == hash(expected)


# Invalid values.
BYTES = {"bytes": b"\x03\x03", "memoryview": memoryview(b"\x03\x03"), "str": "33"}


@pytest.mark.parametrize("value", BYTES.values(), ids=BYTES)
@pytest.mark.parametrize("name", [*INTS, *TILES, "backward_kv_splits", "is_causal"])
def test_text_and_bytes_are_no_sequences_of_numbers(name: str, value: Any) -> None:
    others = {"kv_tile_shape": (4, 4)} if name == "q_tile_shape" else {"q_tile_shape": (4, 4)} if name in TILES else {}
    shown = "memory" if isinstance(value, memoryview) else repr(value)
    refused(TypeError, (f"{name} must be", shown), lambda: call(2, **{**others, name: value}))


#: For each group of argument names: invalid values, the type of the error, and parts of the message.
WRONG: dict[tuple[str, ...], list[tuple[Any, type[Exception], tuple[str, ...]]]] = {
    (*INTS, "backward_kv_splits"): [
        (np.array([3.0, 3.0]), TypeError, ("ints", "float64")),
        (jnp.array([3.0, 3.0]), TypeError, ("ints", "float32")),
        (np.array(3.0), TypeError, ("int", "float64")),
        (np.array(["3", "3"]), TypeError, ("ints", "<U1")),
        (np.array([3]), ValueError, ("2 value(s)", "[3]")),
        (np.array([], int), ValueError, ("2 value(s)", "(0,)")),
        (np.array([[3, 3]]), ValueError, ("(1, 2)",)),
        (np.array([3, 0]), ValueError, ("at least 1", "[3, 0]")),
        (np.array(-2), ValueError, ("at least 1", "-2")),
        ((np.array([3]), 3), TypeError, ("ints only",)),
        (jax.random.key(0), TypeError, ("ints", "key")),
        ({3: 3, 4: 4}, TypeError, ("{3: 3, 4: 4}",)),
        (iter((3, 3)), TypeError, ("iterator",)),
    ],
    ("is_causal",): [
        (np.array([1, 0]), TypeError, ("bools", "int64")),
        (np.array([True]), ValueError, ("2 value(s)", "[ True]")),
        (jnp.array([True, False, True]), ValueError, ("2 value(s)", "True")),
        (np.array([[True, False]]), ValueError, ("(1, 2)",)),
        ((np.array([True]), True), TypeError, ("bools",)),
    ],
}


@pytest.mark.parametrize(
    ("name", "row"), [(name, row) for names, rows in WRONG.items() for name in names for row in rows]
)
def test_arrays_without_a_right_value_per_dimension(name: str, row: Any) -> None:
    value, error, parts = row
    refused(error, (name, *parts), lambda: call(2, **{name: value}))


@pytest.mark.parametrize("name", [*INTS, "is_causal", "backward_kv_splits", "q_tile_shape", "attention"])
@pytest.mark.parametrize("in_a_tuple", [False, True])
def test_traced_window_arguments_raise_must_be_static(name: str, in_a_tuple: bool) -> None:
    argument = "is_causal" if name == "attention" else name
    value = jnp.array([True, False]) if argument == "is_causal" else jnp.array([3, 3])

    def function(value: jax.Array) -> Any:
        if name == "attention":
            query = query_of(1)
            return natten_jax.attention(query, query, query, is_causal=value[0])  # type: ignore[call-overload]
        tiles = {"kv_tile_shape": (4, 4)} if name == "q_tile_shape" else {}
        return call(2, **{**tiles, name: (value[0], value[1]) if in_a_tuple else value})

    parts = f"{argument} must be static", "jax.jit", f"static_argnames={argument!r}"
    refused(TypeError, parts, lambda: jax.jit(function)(value))


# Flags --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [1, 0, None, "yes", (True,), np.array([True])])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_flags_are_bools(rank: int, value: Any) -> None:
    extra = query_of(1)
    attend: Any = functools.partial(natten_jax.attention, extra, extra, extra)
    refused(TypeError, ("return_lse must be a bool", repr(value)), lambda: attend(return_lse=value))
    # In the last case, the window is as large as the layout.
    for others in ({}, {"additional_keys": extra, "additional_values": extra}, {"kernel_size": LAYOUT[:rank]}):
        operator = functools.partial(call, rank, **others)
        refused(TypeError, ("return_lse must be a bool", repr(value)), functools.partial(operator, return_lse=value))
        if value is not None:
            parts = "try_fuse_additional_kv must be None or a bool", repr(value)
            refused(TypeError, parts, functools.partial(operator, try_fuse_additional_kv=value))


@pytest.mark.parametrize("value", [np.True_, np.False_])
def test_numpy_booleans_are_flags(value: Any) -> None:
    assert isinstance(call(1, return_lse=value, try_fuse_additional_kv=value), tuple) == bool(value)


# Huge numbers -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [2**40, 2**62, 2**63, 10**400, 10**5000], ids=["2^40", "2^62", "2^63", "400", "5000"])
@pytest.mark.parametrize("name", INTS)
def test_huge_integers_are_refused_by_name(name: str, value: int) -> None:
    for given_value in (value, (3, value)):
        refused(ValueError, (name,), functools.partial(call, 2, **{name: given_value}))


@pytest.mark.parametrize("name", [*TILES, "backward_q_tile_shape", "backward_kv_tile_shape", "backward_kv_splits"])
@pytest.mark.parametrize("value", [2**63, 10**5000], ids=["2^63", "5000 digits"])
def test_integers_that_no_kernel_can_take_are_refused_by_name(name: str, value: int) -> None:
    other = {"q": "kv", "kv": "q"}
    match = re.fullmatch(r"(backward_)?(q|kv)_tile_shape", name)
    others = {f"{match[1] or ''}{other[match[2]]}_tile_shape": (4, 4)} if match else {}
    refused(ValueError, (name, "2**63"), lambda: call(2, **others, **{name: (value, 1)}))


@pytest.mark.parametrize("backend", ["cpu-fna", "flex-fna", None])
@pytest.mark.parametrize("kernel_size", [3, LAYOUT[:2]])
@pytest.mark.parametrize("size", [2**31, 2**40, 2**62])
def test_huge_tiles_are_refused_by_the_backends(backend: str | None, kernel_size: Any, size: int) -> None:
    tiles = {f"{prefix}{side}_tile_shape": (size, size) for prefix in ("", "backward_") for side in ("q", "kv")}
    with pytest.raises(ValueError, match="does not offer"):
        jax.eval_shape(lambda: call(2, kernel_size=kernel_size, backend=backend, **tiles))


@pytest.mark.parametrize("backend", ["cpu-fna", "flex-fna"])
@pytest.mark.parametrize("kernel_size", [3, LAYOUT[:2]])
def test_more_splits_than_tiles_have_no_effect(backend: str, kernel_size: Any) -> None:
    out = call(2, kernel_size=kernel_size, backend=backend, backward_kv_splits=2**62)
    np.testing.assert_array_equal(out, call(2, kernel_size=kernel_size, backend=backend))


@pytest.mark.parametrize(
    "value",
    [range(10**15), [3] * 10**6, np.ones(10**6, int), "3" * 10**6, b"3" * 10**6, (3, [3] * 10**6), [[[[]]]]],
    ids=["range", "list", "array", "text", "bytes", "list-in-tuple", "nested"],
)
@pytest.mark.parametrize("name", [*INTS, "is_causal"])
def test_messages_shorten_long_values(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{name} must") as caught:
        call(2, **{name: value})
    assert len(str(caught.value)) < 400


@given(st.data())
def test_windows_of_huge_layouts_are_checked_by_arithmetic(data: st.DataObject) -> None:
    extents = [data.draw(st.integers(2**31, 2**62)) for _ in range(3)]
    size = tuple(data.draw(st.integers(1, extent)) for extent in extents)
    dilation = tuple(data.draw(st.integers(1, extent // size)) for extent, size in zip(extents, size, strict=True))
    array: Any = jax.ShapeDtypeStruct((2, *extents, 4, 8), jnp.float32)
    inputs = Inputs(array, array, array)
    problem = neighborhood_problem(3, inputs, WindowArguments(size, size, dilation, True))  # type: ignore[arg-type]
    assert (problem.kernel_size, problem.dilation) == (size, dilation)
    wider = tuple(extent // d + 1 for extent, d in zip(extents, dilation, strict=True))
    with pytest.raises(ValueError, match=r"kernel_size .* exceeds the token layout"):
        neighborhood_problem(3, inputs, WindowArguments(wider, 1, dilation))  # type: ignore[arg-type]


# Flax modules -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("array_of", [np.array, jnp.array, list])
def test_flax_modules_take_arrays(array_of: Callable[..., Any]) -> None:
    flax_layers = pytest.importorskip("tests.support.flax_layers")
    plain = {"kernel_size": (3, 4), "stride": (1, 2), "is_causal": (True, False), "kv_tile_shape": (2, 4)}
    plain |= {"q_tile_shape": (4, 4)}
    held = {name: array_of(value) for name, value in plain.items()}
    one, other = (flax_layers.nnx_module(2, **settings) for settings in (plain, held))
    assert one.neighborhood == other.neighborhood and hash(one.neighborhood) == hash(other.neighborhood)
    np.testing.assert_array_equal(other(flax_layers.inputs_of(2)), one(flax_layers.inputs_of(2)))
    one, other = (flax_layers.LINEN[2](num_heads=flax_layers.HEADS, **settings) for settings in (plain, held))
    assert one == other and hash(one) == hash(other)


# Results of checks are cached for equal arguments. Arguments that compare equal but differ in type, such as 1 and True,
# must have separate cache entries.


X = jnp.zeros((1, 6, 7, 2, 8))


def counted() -> tuple[Any, list[Any]]:
    """Return a cached check, and a list to which each execution of the check appends its argument."""
    asked: list[Any] = []

    @checked_once
    def check(value: Any) -> str:
        asked.append(value)
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


def test_mutable_arguments_are_checked_in_every_call() -> None:
    check, asked = counted()
    endless: list[Any] = []
    endless.append(endless)
    for value in (np.ones(1), X, np.int64(3), (1, np.ones(1)), {1: 2}, list(range(1000)), endless, range(3), object()):
        for _ in range(2):
            check(value)
        assert len(asked) == 2, value
        asked.clear()


def test_memory_is_bounded() -> None:
    check, asked = counted()
    for value in itertools.chain(range(10_000), [0]):
        check(value)
    assert asked.count(0) == 2


# Call an operator with valid arguments, and then with invalid arguments that compare equal to the valid arguments.
def test_arguments_that_compare_equal_are_still_refused() -> None:
    right: dict[str, Any] = {"kernel_size": (3, 1), "stride": 1, "dilation": (1, 2), "is_causal": (True, False)}
    wrong: dict[str, list[Any]] = {
        "kernel_size": [(3.0, 1), (3, True)], "stride": [1.0, True], "dilation": [(True, 2)], "is_causal": [(1, 0)],
        "backward_deterministic": [0],
    }  # fmt: skip
    na2d(X, X, X, **right)
    x = X.reshape(1, 42, 2, 8)
    attend: Any = functools.partial(attention, x, x, x)
    attend(is_causal=True)
    calls = [functools.partial(na2d, X, X, X, **{**right, name: each}) for name in wrong for each in wrong[name]]
    calls += [functools.partial(attend, is_causal=1), functools.partial(attend, scale=True)]
    names = [name for name in wrong for _ in wrong[name]] + ["is_causal", "scale"]
    for refused_call, name in zip(calls, names, strict=True):
        with pytest.raises(TypeError, match=name):
            refused_call()


def test_an_array_that_holds_the_window_may_change() -> None:
    window = np.array([3, 3])
    x = jax.random.normal(jax.random.key(0), X.shape)
    before = na2d(x, x, x, window)
    window[:] = 5
    np.testing.assert_array_equal(na2d(x, x, x, window), na2d(x, x, x, (5, 5)))
    np.testing.assert_array_equal(before, na2d(x, x, x, (3, 3)))
