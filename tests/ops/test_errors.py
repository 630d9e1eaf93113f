"""Errors for invalid arguments: the type of the exception, and a message with the argument's name, value and rule."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax import backends
from natten_jax.backends.flex.backend import FlexBackend
from natten_jax.native import module as native
from tests.support.families import Family, tile_pair
from tests.support.machine import Machine
from tests.support.problems import OPERATORS, Case, element_types


def array(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.zeros(shape, jnp.dtype(dtype)))  # jnp.zeros would compile a program for each shape


def operands(rank: int, **changes: Any) -> dict[str, Any]:
    """Return valid arguments of ``na{rank}d``, updated with ``changes``."""
    shape = (2, *(8, 9, 10)[:rank], 4, 16)
    return {"query": array(*shape), "key": array(*shape), "value": array(*shape), "kernel_size": 3, **changes}


@dataclasses.dataclass(frozen=True)
class Row:
    """An invalid call.

    Attributes:
        changes: Invalid arguments, which replace or extend the valid arguments.
        message: Strings that must occur in the error's message.
        error: Type of the exception.
    """

    changes: dict[str, Any]
    message: tuple[str, ...]
    error: type[Exception] = ValueError


Q = (2, 8, 9, 4, 16)
ROWS = [
    # Arrays.
    Row({"query": array(2, 8, 4, 16)}, ("query", "(2, 8, 4, 16)", "na2d", "5")),
    *(
        Row({name: wrong}, (name, *message))
        for name in ("key", "value")
        for wrong, message in (
            (array(2, 8, 9, 1, 4, 16), ("(2, 8, 9, 1, 4, 16)", "na2d")),
            (array(*Q, dtype=jnp.bfloat16), ("bfloat16", "query", "float32")),
            (array(3, 8, 9, 4, 16), ("batch", "3", "2")),
            (array(2, 8, 8, 4, 16), ("(8, 8)", "query", "(8, 9)")),
        )
    ),
    Row({"query": [[1.0]]}, ("query", "array", "list"), TypeError),
    Row(
        {name: array(*Q, dtype=jnp.int32) for name in ("query", "key", "value")},
        ("query", "int32", "float16", "bfloat16", "float32", "float64"),
    ),
    Row({"value": array(2, 8, 9, 2, 16)}, ("value", "2 heads", "key", "4")),
    Row({"key": array(2, 8, 9, 3, 16), "value": array(2, 8, 9, 3, 16)}, ("query", "4 heads", "multiple", "3")),
    Row({"key": array(2, 8, 9, 4, 8)}, ("key", "head_dim 8", "query", "16")),
    Row({"value": array(2, 8, 9, 4, 0)}, ("value", "(2, 8, 9, 4, 0)", "at least 1")),
    # Additional keys and values.
    Row({"additional_keys": array(2, 5, 4, 16)}, ("additional_keys", "(2, 5, 4, 16)", "additional_values")),
    Row({"additional_values": array(2, 5, 4, 16)}, ("additional_values", "(2, 5, 4, 16)", "additional_keys")),
    *(
        Row({"additional_keys": keys, "additional_values": values}, message)
        for keys, values, message in (
            (array(1, 5, 4, 16), array(1, 5, 4, 16), ("additional_keys", "(1, 5, 4, 16)", "(2, 5, 4, 16)")),
            (array(2, 5, 4, 16), array(2, 6, 4, 16), ("additional_values", "(2, 6, 4, 16)", "(2, 5, 4, 16)")),
            (array(2, 5, 2, 16), array(2, 5, 2, 16), ("additional_keys", "(2, 5, 2, 16)", "heads_kv")),
            (array(2, 5, 4, 16), array(5, 4, 16), ("additional_values", "(5, 4, 16)")),
            (array(2, 0, 4, 16), array(2, 0, 4, 16), ("additional_keys", "(2, 0, 4, 16)", "n >= 1")),
            (array(2, 5, 4, 16), array(2, 5, 4, 16, dtype=jnp.float16), ("additional_values", "float16")),
        )
    ),
    Row({"additional_keys": 1.0, "additional_values": array(2, 5, 4, 16)}, ("additional_keys", "array"), TypeError),
    # Windows.
    *(
        Row({name: value}, (name, shown), error)
        for name in ("kernel_size", "stride", "dilation")
        for value, error, shown in (
            (0, ValueError, "0"),
            ((3, -2), ValueError, "(3, -2)"),
            ((3,), ValueError, "(3,)"),
            ((), ValueError, "()"),
            (3.0, TypeError, "3.0"),
            (True, TypeError, "True"),
            (None, TypeError, "None"),
        )
    ),
    Row({"edges": "mirror"}, ("edges", "'shift' or 'cut' or 'wrap'", "'mirror'")),
    Row({"edges": ("wrap", "pad")}, ("edges", "'wrap'", "('wrap', 'pad')")),
    Row({"edges": (1, True)}, ("edges", "'shift' or 'cut' or 'wrap'", "(1, True)"), TypeError),
    Row({"edges": ["cut"] * 3}, ("edges", "2 value(s)", "['cut', 'cut', 'cut']")),
    Row(
        {"edges": "wrap", "is_causal": (False, True)},
        ("edges ('wrap', 'wrap')", "is_causal (False, True)", "wraps", "causal"),
    ),
    Row(
        {"edges": ("shift", "wrap"), "dilation": 2},
        ("edges ('shift', 'wrap')", "dilation (2, 2)", "(8, 9)", "2 does not divide 9"),
    ),
    Row({"edges": "cut", "kernel_size": 9}, ("kernel_size", "9 > 8")),
    Row({"stride": 4}, ("stride", "(4, 4)", "kernel_size", "(3, 3)", "<=")),
    Row({"kernel_size": (3, 10)}, ("kernel_size", "(3, 10)", "(8, 9)", "10 > 9")),
    Row({"dilation": (3, 3)}, ("kernel_size", "(3, 3)", "dilation", "(8, 9)", "9 > 8")),
    # Causality.
    *(
        Row({"is_causal": value}, ("is_causal", shown), error)
        for value, error, shown in (
            (1, TypeError, "1"),
            ((0, 1), TypeError, "(0, 1)"),
            (None, TypeError, "None"),
            ((True,), ValueError, "(True,)"),
        )
    ),
    # Performance arguments.
    *(
        Row({f"{prefix}{given}_tile_shape": (4, 4)}, (f"{prefix}{given}", "(4, 4)", f"{prefix}{missing}_tile_shape"))
        for prefix in ("", "backward_")
        for given, missing in (("q", "kv"), ("kv", "q"))
    ),
    *(
        Row({"q_tile_shape": tile, "kv_tile_shape": (4, 4)}, ("q_tile_shape", shown), error)
        for tile, error, shown in (
            (16, TypeError, "16"),
            ((4, 4, 4), ValueError, "(4, 4, 4)"),
            ((0, 4), ValueError, "(0, 4)"),
        )
    ),
    Row({"kernel_schedule": "fast"}, ("kernel_schedule", "'fast'", "non", "coop", "pp")),
    Row({"backward_kv_splits": 0}, ("backward_kv_splits", "0")),
    Row({"memory_usage_preference": "lavish"}, ("memory_usage_preference", "lavish", "strict")),
    Row({"backward_deterministic": 1}, ("backward_deterministic", "1"), TypeError),
    Row({"backward_use_xla_reduction": 1}, ("backward_use_xla_reduction", "1"), TypeError),
    Row({"run_persistent_kernel": None}, ("run_persistent_kernel", "None"), TypeError),
    Row({"backward_use_pt_reduction": True}, ("backward_use_xla_reduction",), TypeError),
    Row({"backend": "turbo-fna"}, ("backend", "'turbo-fna'", "cpu-fna", "flex-fna")),
    Row({"backend": "flex-fmha"}, ("backend", "'flex-fmha'", "flex-fna")),
    Row({"backend": 3}, ("backend", "3", "flex-fna")),
]


def expect(row: Row, call: Callable[[], Any]) -> None:
    with pytest.raises(row.error) as caught:
        call()
    assert type(caught.value) is row.error
    for part in row.message:
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.changes))
def test_wrong_argument_of_neighborhood_attention(row: Row) -> None:
    expect(row, lambda: natten_jax.na2d(**operands(2, **row.changes)))


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.changes.keys() & {"kernel_size", "is_causal", "kernel_schedule"}][::3]
)
def test_errors_are_raised_while_tracing(row: Row) -> None:
    def function(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        arguments = {**operands(2, **row.changes), "query": query, "key": key, "value": value}
        return natten_jax.na2d(**arguments)

    expect(row, lambda: jax.eval_shape(function, *(array(*Q) for _ in range(3))))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_function_takes_the_rank_in_its_name_only(rank: int) -> None:
    for other in {1, 2, 3} - {rank}:
        with pytest.raises(ValueError, match=rf"query has .*na{rank}d takes {rank + 3}-dimensional.*: na{other}d"):
            OPERATORS[rank](**operands(other))
    with pytest.raises(ValueError, match=re.escape(f"stride {(5,) * rank} exceeds kernel_size {(3,) * rank}")):
        OPERATORS[rank](**operands(rank, stride=5))
    with pytest.raises(ValueError, match=re.escape(f"token layout {(8, 9, 10)[:rank]}")):
        OPERATORS[rank](**operands(rank, kernel_size=11))


S = (2, 8, 4, 16)
ATTENTION_ROWS = [
    Row({"query": array(2, 8, 9, 4, 16)}, ("query", "(2, 8, 9, 4, 16)", "attention", "4")),
    Row({"key": array(2, 4, 16)}, ("key", "(2, 4, 16)", "attention")),
    Row({"key": array(2, 9, 4, 16)}, ("value", "8 tokens", "key", "9")),
    Row({"query": array(2, 0, 4, 16)}, ("query", "(2, 0, 4, 16)", "at least 1")),
    Row({"key": array(2, 8, 3, 16), "value": array(2, 8, 3, 16)}, ("query", "4 heads", "3")),
    Row({"query": array(2, 8, 4, 8)}, ("key", "head_dim 16", "query", "8")),
    Row({"is_causal": 0}, ("is_causal", "0"), TypeError),
    Row({"scale": "a"}, ("scale", "'a'"), TypeError),
    Row({"q_tile_size": 64}, ("q_tile_size", "64", "kv_tile_size")),
    Row({"backward_q_tile_size": 64}, ("backward_q_tile_size", "64", "backward_kv_tile_size")),
    Row({"q_tile_size": 0, "kv_tile_size": 64}, ("q_tile_size", "0", "at least 1")),
    Row({"q_tile_size": 6.0, "kv_tile_size": 64}, ("q_tile_size", "6.0"), TypeError),
    Row({"kernel_schedule": "auto"}, ("kernel_schedule", "'auto'", "coop")),
    Row({"backward_kv_splits": -1}, ("backward_kv_splits", "-1")),
    Row({"memory_usage_preference": "lavish"}, ("memory_usage_preference", "'lavish'", "strict")),
    Row({"backward_use_xla_reduction": 1}, ("backward_use_xla_reduction", "bool", "1"), TypeError),
    Row({"run_persistent_kernel": "no"}, ("run_persistent_kernel", "bool", "'no'"), TypeError),
    Row({"scale": float("inf")}, ("scale must be finite", "inf")),
    Row({"backend": 3}, ("backend", "3", "cpu-fmha")),
    Row({"backend": "cpu-fna"}, ("backend", "'cpu-fna'", "cpu-fmha", "flex-fmha")),
]


@pytest.mark.parametrize("row", ATTENTION_ROWS, ids=lambda row: "-".join(row.changes))
def test_wrong_argument_of_attention(row: Row) -> None:
    expect(
        row, lambda: natten_jax.attention(**{"query": array(*S), "key": array(*S), "value": array(*S), **row.changes})
    )


# Tiles --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["fna", "fmha"])
def test_tiles_that_are_not_offered(family: Family, operator: str, pass_: str) -> None:
    """The message shows up to five valid tiles, and the name of the function that lists all valid tiles."""
    prefix = "" if pass_ == "forward" else "backward_"
    operators: dict[str, Any] = {
        "fna": (natten_jax.na2d, Q, "shape", (999, 998), {"kernel_size": 3}),
        "fmha": (natten_jax.attention, S, "size", 99_999_989, {}),
    }
    call, shape, suffix, tile, window = operators[operator]
    x = array(*shape, dtype=family.dtype)
    tiles = {f"{prefix}{role}_tile_{suffix}": tile for role in ("q", "kv")}
    with pytest.raises(ValueError, match="does not offer") as caught:
        jax.eval_shape(lambda: call(x, x, x, backend=f"{family.name}-{operator}", **window, **tiles))
    message = str(caught.value)
    assert all(part in message for part in (str(tile), *tiles))
    (name,) = re.findall(r"natten_jax\.(\w+) lists all", message)
    assert ("bwd" in name) == bool(prefix)
    offered = list(dict.fromkeys(map(tile_pair, getattr(natten_jax, name)(x, **window))))
    assert [pair for pair in offered if str(pair) in message] == offered[:5]


# Backends -----------------------------------------------------------------------------------------------------------


class RefusingBackend(FlexBackend):
    """A backend that rejects every problem."""

    def __init__(self, family: str, reason: str) -> None:
        self.family, self.reason = family, reason  # type: ignore[misc]

    def rejection(self, *_: Any) -> str:
        return self.reason


@pytest.mark.parametrize("operator", ["fna", "fmha"])
def test_a_named_backend_that_cannot_run_lists_backends_that_can(operator: str) -> None:
    with element_types("float64"):
        arrays = [jnp.zeros(S, jnp.float64)] * 3
        windowed = functools.partial(natten_jax.na1d, kernel_size=3)
        call: Callable[..., Any] = natten_jax.attention if operator == "fmha" else windowed
        with pytest.raises(ValueError, match=f"backend='cpu-{operator}' cannot run") as caught:
            call(*arrays, backend=f"cpu-{operator}")
    message = str(caught.value)
    assert "float64" in message and "float32, float16, bfloat16" in message
    assert f"Backends that can: flex-{operator}" in message


def test_no_backend_lists_the_reason_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = (RefusingBackend("north", "it is too cold"), RefusingBackend("south", "it is too warm"))
    monkeypatch.setattr(backends, "_registered", list(refusing))
    x = array(2, 13, 4, 16)
    with pytest.raises(
        ValueError, match=r"no backend can run(.|\n)*north-fna: it is too cold(.|\n)*south-fna: it is too"
    ):
        natten_jax.na1d(x, x, x, 3)
    with pytest.raises(ValueError, match=r"it is too cold\. Backends that can: none"):
        natten_jax.attention(x, x, x, backend="north-fmha")


@pytest.mark.parametrize("is_gradient", [False, True])
def test_a_native_backend_for_another_platform_gives_the_reason(native_family: Family, is_gradient: bool) -> None:
    """The error is raised at lowering, because the platform is unknown at tracing."""
    platforms, reason = (["cpu"], "cpu") if native_family.needs_gpu else (["cuda"], "platform cpu only")
    case = Case((12,), (5,))
    operator: Any = case.operator(native_family.fna)
    function = jax.jit(jax.grad(lambda o: operator(o)[0].sum()) if is_gradient else operator)
    export = jax.export.export(function, platforms=platforms, disabled_checks=natten_jax.EXPORT_CHECKS)
    with pytest.raises(ValueError, match=f"{native_family.fna}.* cannot run the forward pass") as caught:
        export(case.operands(native_family.dtype, 0))
    assert reason in str(caught.value)


@pytest.mark.parametrize("name", ["na1d", "na2d", "na3d"])
def test_missing_arguments_name_the_operator(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name}\(\) missing 1 required positional argument: 'kernel_size'"):
        getattr(natten_jax, name)(*[array(2, 14, 4, 16)] * 3)


# The native module --------------------------------------------------------------------------------------------------


def test_native_module_is_loaded() -> None:
    assert native.load_error is None


def test_reason_for_a_missing_native_module_reaches_the_user(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load_error", "the native module was eaten")
    query = array(2, 15, 4, 16)
    with pytest.raises(ValueError, match=r"backend='cpu-fna' cannot run .*the native module was eaten"):
        natten_jax.na1d(query, query, query, 3, backend="cpu-fna")
    # A call that names no backend does not fail, because a backend other than cpu-fna runs it.
    assert natten_jax.na1d(query, query, query, 5).shape == query.shape
