"""Wrong arguments: the type of the exception, and a message that names the argument, its value and the rule."""

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
from natten_jax.backends.base import PureJaxBackend
from natten_jax.native import module as native
from natten_jax.plan import devices
from tests.support.families import FAMILIES, INTERPRETED, Family, tile_pair
from tests.support.machine import Machine
from tests.support.problems import OPERATORS, Case, element_types
from tests.support.programs import output_of, run_python


def array(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.zeros(shape, jnp.dtype(dtype)))  # which compiles nothing


def operands(rank: int, **changes: Any) -> dict[str, Any]:
    """Good arguments of ``na{rank}d``, with changes."""
    shape = (2, *(8, 9, 10)[:rank], 4, 16)
    return {"query": array(*shape), "key": array(*shape), "value": array(*shape), "kernel_size": 3, **changes}


@dataclasses.dataclass(frozen=True)
class Row:
    """A wrong call.

    Attributes:
        name: The name of the test.
        changes: Arguments of ``na2d`` that differ from good ones.
        error: The exception's type.
        message: Parts of its message.
    """

    name: str
    changes: dict[str, Any]
    error: type[Exception]
    message: tuple[str, ...]


Q = (2, 8, 9, 4, 16)
ROWS = [
    # Arrays.
    Row("query-rank", {"query": array(2, 8, 4, 16)}, ValueError, ("query", "(2, 8, 4, 16)", "na2d", "5")),
    Row("key-rank", {"key": array(2, 8, 9, 1, 4, 16)}, ValueError, ("key", "(2, 8, 9, 1, 4, 16)", "na2d")),
    Row("value-rank", {"value": array(2, 72, 4, 16)}, ValueError, ("value", "(2, 72, 4, 16)", "na2d")),
    Row("query-not-an-array", {"query": [[1.0]]}, TypeError, ("query", "array", "list")),
    Row("key-none", {"key": None}, TypeError, ("key", "array", "NoneType")),
    Row("key-dtype", {"key": array(*Q, dtype=jnp.bfloat16)}, ValueError, ("key", "bfloat16", "query", "float32")),
    Row("value-dtype", {"value": array(*Q, dtype=jnp.float16)}, ValueError, ("value", "float16", "query", "float32")),
    Row(
        "dtype-of-all",
        {name: array(*Q, dtype=jnp.int32) for name in ("query", "key", "value")},
        ValueError,
        ("query", "int32", "float16", "bfloat16", "float32", "float64"),
    ),
    Row("dtypes-that-are-supported", {"key": array(*Q, dtype=jnp.int8)}, ValueError, ("int8", "float16", "bfloat16")),
    Row("key-batch", {"key": array(3, 8, 9, 4, 16)}, ValueError, ("key", "batch", "3", "2")),
    Row("value-batch", {"value": array(1, 8, 9, 4, 16)}, ValueError, ("value", "batch", "1", "2")),
    Row("key-layout", {"key": array(2, 8, 8, 4, 16)}, ValueError, ("key", "(8, 8)", "query", "(8, 9)")),
    Row("value-layout", {"value": array(2, 9, 8, 4, 16)}, ValueError, ("value", "(9, 8)", "query", "(8, 9)")),
    Row("heads-of-value", {"value": array(2, 8, 9, 2, 16)}, ValueError, ("value", "2 heads", "key", "4")),
    Row(
        "heads-not-a-multiple",
        {"key": array(2, 8, 9, 3, 16), "value": array(2, 8, 9, 3, 16)},
        ValueError,
        ("query", "4 heads", "multiple", "3"),
    ),
    Row(
        "more-heads-in-key",
        {"key": array(2, 8, 9, 8, 16), "value": array(2, 8, 9, 8, 16)},
        ValueError,
        ("query", "4 heads", "multiple", "8"),
    ),
    Row("head-dim", {"key": array(2, 8, 9, 4, 8)}, ValueError, ("key", "head_dim 8", "query", "16")),
    Row("empty-head-dim", {"value": array(2, 8, 9, 4, 0)}, ValueError, ("value", "(2, 8, 9, 4, 0)", "at least 1")),
    # Additional keys and values.
    Row(
        "only-additional-keys",
        {"additional_keys": array(2, 5, 4, 16)},
        ValueError,
        ("additional_keys", "(2, 5, 4, 16)", "additional_values"),
    ),
    Row(
        "only-additional-values",
        {"additional_values": array(2, 5, 4, 16)},
        ValueError,
        ("additional_values", "(2, 5, 4, 16)", "additional_keys"),
    ),
    *(
        Row(
            f"additional-{name}",
            {"additional_keys": keys, "additional_values": values},
            ValueError,
            message,
        )
        for name, keys, values, message in (
            ("batch", array(1, 5, 4, 16), array(1, 5, 4, 16), ("additional_keys", "(1, 5, 4, 16)", "(2, 5, 4, 16)")),
            ("length", array(2, 5, 4, 16), array(2, 6, 4, 16), ("additional_values", "(2, 6, 4, 16)", "(2, 5, 4, 16)")),
            ("heads", array(2, 5, 2, 16), array(2, 5, 2, 16), ("additional_keys", "(2, 5, 2, 16)", "heads_kv")),
            ("head-dim", array(2, 5, 4, 8), array(2, 5, 4, 16), ("additional_keys", "(2, 5, 4, 8)")),
            ("rank", array(2, 5, 1, 4, 16), array(2, 5, 4, 16), ("additional_keys", "(2, 5, 1, 4, 16)")),
            ("value-rank", array(2, 5, 4, 16), array(5, 4, 16), ("additional_values", "(5, 4, 16)")),
            ("none-of-them", array(2, 0, 4, 16), array(2, 0, 4, 16), ("additional_keys", "(2, 0, 4, 16)", "n >= 1")),
            ("dtype", array(2, 5, 4, 16), array(2, 5, 4, 16, dtype=jnp.float16), ("additional_values", "float16")),
        )
    ),
    Row(
        "additional-not-an-array",
        {"additional_keys": 1.0, "additional_values": array(2, 5, 4, 16)},
        TypeError,
        ("additional_keys", "array"),
    ),
    # Windows.
    *(
        Row(f"{name}-{kind}", {name: value}, error, (name, shown))
        for name in ("kernel_size", "stride", "dilation")
        for kind, value, error, shown in (
            ("zero", 0, ValueError, "0"),
            ("negative", (3, -2), ValueError, "(3, -2)"),
            ("too-few", (3,), ValueError, "(3,)"),
            ("too-many", (3, 3, 3), ValueError, "(3, 3, 3)"),
            ("empty", (), ValueError, "()"),
            ("float", 3.0, TypeError, "3.0"),
            ("floats", (3, 2.0), TypeError, "(3, 2.0)"),
            ("bool", True, TypeError, "True"),
            ("numpy-bool", np.True_, TypeError, "True"),
            ("bools", (3, True), TypeError, "(3, True)"),
            ("text", "33", TypeError, "'33'"),
            ("none", None, TypeError, "None"),
            ("array", np.array([3.0, 3.0]), TypeError, "array"),
        )
    ),
    Row("edges-unknown", {"edges": "mirror"}, ValueError, ("edges", "'shift' or 'cut' or 'wrap'", "'mirror'")),
    Row("edges-unknown-in-one", {"edges": ("wrap", "pad")}, ValueError, ("edges", "'wrap'", "('wrap', 'pad')")),
    Row("edges-not-words", {"edges": (1, True)}, TypeError, ("edges", "'shift' or 'cut' or 'wrap'", "(1, True)")),
    Row("edges-none", {"edges": None}, TypeError, ("edges", "'shift'", "None")),
    Row("edges-too-many", {"edges": ["cut"] * 3}, ValueError, ("edges", "2 value(s)", "['cut', 'cut', 'cut']")),
    Row(
        "wrap-causal",
        {"edges": "wrap", "is_causal": (False, True)},
        ValueError,
        ("edges ('wrap', 'wrap')", "is_causal (False, True)", "wraps", "causal"),
    ),
    Row(
        "wrap-dilation",
        {"edges": ("shift", "wrap"), "dilation": 2},
        ValueError,
        ("edges ('shift', 'wrap')", "dilation (2, 2)", "(8, 9)", "2 does not divide 9"),
    ),
    Row("cut-window-larger-than-layout", {"edges": "cut", "kernel_size": 9}, ValueError, ("kernel_size", "9 > 8")),
    Row("stride-exceeds-window", {"stride": 4}, ValueError, ("stride", "(4, 4)", "kernel_size", "(3, 3)", "<=")),
    Row("stride-exceeds-window-in-one", {"stride": (3, 4)}, ValueError, ("stride", "(3, 4)", "kernel_size", "(3, 3)")),
    Row("window-exceeds-layout", {"kernel_size": (3, 10)}, ValueError, ("kernel_size", "(3, 10)", "(8, 9)", "10 > 9")),
    Row("dilated-window", {"dilation": (3, 3)}, ValueError, ("kernel_size", "(3, 3)", "dilation", "(8, 9)", "9 > 8")),
    # Causality and scale.
    *(
        Row(f"is-causal-{kind}", {"is_causal": value}, error, ("is_causal", shown))
        for kind, value, error, shown in (
            ("int", 1, TypeError, "1"),
            ("ints", (0, 1), TypeError, "(0, 1)"),
            ("none", None, TypeError, "None"),
            ("text", "no", TypeError, "'no'"),
            ("too-few", (True,), ValueError, "(True,)"),
            ("too-many", (True,) * 3, ValueError, "(True, True, True)"),
        )
    ),
    Row("scale-text", {"scale": "1"}, TypeError, ("scale", "'1'")),
    Row("scale-bool", {"scale": True}, TypeError, ("scale", "True")),
    Row("scale-nan", {"scale": float("nan")}, ValueError, ("scale", "nan", "finite")),
    Row("scale-infinite", {"scale": float("-inf")}, ValueError, ("scale", "-inf", "finite")),
    # Performance arguments.
    *(
        Row(f"only-{given}", {given: (4, 4)}, ValueError, (given, "(4, 4)", missing))
        for given, missing in (
            ("q_tile_shape", "kv_tile_shape"),
            ("kv_tile_shape", "q_tile_shape"),
            ("backward_q_tile_shape", "backward_kv_tile_shape"),
            ("backward_kv_tile_shape", "backward_q_tile_shape"),
        )
    ),
    *(
        Row(f"tile-{kind}", {"q_tile_shape": tile, "kv_tile_shape": (4, 4)}, error, ("q_tile_shape", shown))
        for kind, tile, error, shown in (
            ("one-int", 16, TypeError, "16"),
            ("rank", (4, 4, 4), ValueError, "(4, 4, 4)"),
            ("zero", (0, 4), ValueError, "(0, 4)"),
            ("float", (4.0, 4), TypeError, "(4.0, 4)"),
        )
    ),
    Row("schedule", {"kernel_schedule": "fast"}, ValueError, ("kernel_schedule", "'fast'", "non", "coop", "pp")),
    Row("schedule-type", {"kernel_schedule": 1}, ValueError, ("kernel_schedule", "1", "coop")),
    Row("splits", {"backward_kv_splits": 0}, ValueError, ("backward_kv_splits", "0")),
    Row("splits-type", {"backward_kv_splits": 1.5}, TypeError, ("backward_kv_splits", "1.5")),
    Row("memory", {"memory_usage_preference": "lavish"}, ValueError, ("memory_usage_preference", "lavish", "strict")),
    Row("memory-type", {"memory_usage_preference": None}, ValueError, ("memory_usage_preference", "None")),
    Row("deterministic-type", {"backward_deterministic": 1}, TypeError, ("backward_deterministic", "1")),
    Row("reduction-type", {"backward_use_xla_reduction": 1}, TypeError, ("backward_use_xla_reduction", "1")),
    Row("persistent-type", {"run_persistent_kernel": None}, TypeError, ("run_persistent_kernel", "None")),
    Row("torch-compile", {"torch_compile": True}, TypeError, ("takes torch_compile=False only", "True", "jax.jit")),
    Row("natten's reduction", {"backward_use_pt_reduction": True}, TypeError, ("backward_use_xla_reduction",)),
    Row("attention-arguments-type", {"attention_kwargs": [1]}, TypeError, ("attention_kwargs", "[1]")),
    Row("attention-arguments-key", {"attention_kwargs": {"causal": 1}}, TypeError, ("attention_kwargs", "'causal'")),
    Row(
        "attention-arguments-scale", {"attention_kwargs": {"scale": 1.0}}, ValueError, ("attention_kwargs", "scale=1.0")
    ),
    Row("attention-arguments-result", {"attention_kwargs": {"mask": 1.0}}, TypeError, ("attention_kwargs", "'mask'")),
    Row("backend-unknown", {"backend": "turbo-fna"}, ValueError, ("backend", "'turbo-fna'", "cpu-fna", "flex-fna")),
    Row("backend-of-attention", {"backend": "flex-fmha"}, ValueError, ("backend", "'flex-fmha'", "flex-fna")),
    Row("backend-type", {"backend": 3}, ValueError, ("backend", "3", "flex-fna")),
]


def expect(row: Row, call: Callable[[], Any]) -> None:
    with pytest.raises(row.error) as caught:
        call()
    assert type(caught.value) is row.error
    for part in row.message:
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_wrong_argument_of_neighborhood_attention(row: Row) -> None:
    expect(row, lambda: natten_jax.na2d(**operands(2, **row.changes)))


@pytest.mark.parametrize("row", [row for row in ROWS if row.name.startswith(("kernel", "is-causal", "schedule"))][::3])
def test_errors_are_raised_while_tracing(row: Row) -> None:
    def function(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        arguments = {**operands(2, **row.changes), "query": query, "key": key, "value": value}
        return natten_jax.na2d(**arguments)

    expect(row, lambda: jax.eval_shape(function, *(array(*Q) for _ in range(3))))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("other", [1, 2, 3])
def test_function_takes_the_rank_in_its_name_only(rank: int, other: int) -> None:
    if rank == other:
        jax.eval_shape(lambda: OPERATORS[rank](**operands(rank)))
        with pytest.raises(ValueError, match=re.escape(f"stride {(5,) * rank} exceeds kernel_size {(3,) * rank}")):
            OPERATORS[rank](**operands(rank, stride=5))
        with pytest.raises(ValueError, match=re.escape(f"token layout {(8, 9, 10)[:rank]}")):
            OPERATORS[rank](**operands(rank, kernel_size=11))
        return
    with pytest.raises(ValueError, match=rf"query has shape .*na{rank}d takes {rank + 3}-dimensional"):
        OPERATORS[rank](**operands(other))


S = (2, 8, 4, 16)
ATTENTION_ROWS = [
    Row("query-rank", {"query": array(2, 8, 9, 4, 16)}, ValueError, ("query", "(2, 8, 9, 4, 16)", "attention", "4")),
    Row("key-rank", {"key": array(2, 4, 16)}, ValueError, ("key", "(2, 4, 16)", "attention")),
    Row("not-an-array", {"value": 1}, TypeError, ("value", "array", "int")),
    Row("dtype", {"value": array(*S, dtype=jnp.float16)}, ValueError, ("value", "float16", "query", "float32")),
    Row("batch", {"key": array(1, 8, 4, 16)}, ValueError, ("key", "batch", "1", "2")),
    Row("lengths", {"key": array(2, 9, 4, 16)}, ValueError, ("value", "8 tokens", "key", "9")),
    Row("no-tokens", {"query": array(2, 0, 4, 16)}, ValueError, ("query", "(2, 0, 4, 16)", "at least 1")),
    Row("heads", {"key": array(2, 8, 3, 16), "value": array(2, 8, 3, 16)}, ValueError, ("query", "4 heads", "3")),
    Row("head-dim", {"query": array(2, 8, 4, 8)}, ValueError, ("key", "head_dim 16", "query", "8")),
    Row("is-causal", {"is_causal": 0}, TypeError, ("is_causal", "0")),
    Row("is-causal-tuple", {"is_causal": (True,)}, TypeError, ("is_causal", "(True,)")),
    Row("scale", {"scale": "a"}, TypeError, ("scale", "'a'")),
    Row("tile-alone", {"q_tile_size": 64}, ValueError, ("q_tile_size", "64", "kv_tile_size")),
    Row("tile-alone-kv", {"kv_tile_size": 64}, ValueError, ("kv_tile_size", "64", "q_tile_size")),
    Row(
        "tile-backward",
        {"backward_q_tile_size": 64},
        ValueError,
        ("backward_q_tile_size", "64", "backward_kv_tile_size"),
    ),
    Row("tile-zero", {"q_tile_size": 0, "kv_tile_size": 64}, ValueError, ("q_tile_size", "0", "at least 1")),
    Row("tile-type", {"q_tile_size": 6.0, "kv_tile_size": 64}, TypeError, ("q_tile_size", "6.0")),
    Row("schedule", {"kernel_schedule": "auto"}, ValueError, ("kernel_schedule", "'auto'", "coop")),
    Row("splits", {"backward_kv_splits": -1}, ValueError, ("backward_kv_splits", "-1")),
    Row("backend", {"backend": "cpu-fna"}, ValueError, ("backend", "'cpu-fna'", "cpu-fmha", "flex-fmha")),
]


@pytest.mark.parametrize("row", ATTENTION_ROWS, ids=lambda row: row.name)
def test_wrong_argument_of_attention(row: Row) -> None:
    expect(
        row, lambda: natten_jax.attention(**{"query": array(*S), "key": array(*S), "value": array(*S), **row.changes})
    )


# Tiles --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["fna", "fmha"])
def test_tiles_that_are_not_offered(family: Family, operator: str, pass_: str) -> None:
    """The message shows up to five that are, and a function of this package that lists them all."""
    prefix = "" if pass_ == "forward" else "backward_"
    q, s = (array(*shape, dtype=family.dtype) for shape in (Q, S))
    if operator == "fna":
        tiles: dict[str, Any] = {f"{prefix}q_tile_shape": (999, 999), f"{prefix}kv_tile_shape": (999, 998)}
        call = lambda: natten_jax.na2d(**operands(2, query=q, key=q, value=q, backend=family.fna, **tiles))  # noqa: E731
        asked = "(999, 998)"
    else:
        tiles = {f"{prefix}q_tile_size": 99_999_991, f"{prefix}kv_tile_size": 99_999_989}
        call = lambda: natten_jax.attention(s, s, s, backend=family.fmha, **tiles)  # noqa: E731
        asked = "99999989"
    with pytest.raises(ValueError, match="does not offer") as caught:
        jax.eval_shape(call)
    message = str(caught.value)
    assert asked in message
    assert all(name in message for name in tiles)
    (name,) = re.findall(r"natten_jax\.(\w+) lists them", message)
    arrays = (q,) if operator == "fna" else (s,)
    window = {"kernel_size": 3} if operator == "fna" else {}
    offered = [tile_pair(config) for config in getattr(natten_jax, name)(*arrays, **window)]
    assert ("bwd" in name) == bool(prefix)
    offered = list(dict.fromkeys(offered))
    shown = [pair for pair in offered if str(pair) in message]
    assert shown == offered[: len(shown)]
    assert len(shown) == min(5, len(offered))


# Backends -----------------------------------------------------------------------------------------------------------


class RefusingBackend(PureJaxBackend):
    """A backend that runs nothing."""

    family = ""

    def __init__(self, family: str, reason: str) -> None:
        self.family, self.reason = family, reason  # type: ignore[misc]

    def rejection(self, *_: Any) -> str:
        return self.reason

    def tile_pairs(self, *_: Any) -> list[Any]:
        return []

    def largest_tiles(self, *_: Any) -> tuple[int, int]:
        return 1, 1

    def forward(self, *_: Any) -> Any:
        raise AssertionError("must not run")


@pytest.mark.parametrize("operator", ["fna", "fmha"])
def test_named_backend_that_cannot_run_lists_those_that_can(operator: str) -> None:
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
def test_native_backend_for_another_platform_says_why(native_family: Family, is_gradient: bool) -> None:
    """The platform is known at lowering, not at tracing."""
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
    # Without a name, what is left runs.
    assert natten_jax.na1d(query, query, query, 5).shape == query.shape


@pytest.mark.parametrize("kind", ["missing", "broken"])
def test_package_works_without_its_native_module(kind: str) -> None:
    source = """
    import importlib.abc, importlib.machinery, sys

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name, path=None, target=None):
            if name == "natten_jax._native":
                return importlib.machinery.ModuleSpec(name, self)
        def create_module(self, spec):
            if sys.argv[1] == "missing":
                raise ModuleNotFoundError("No module named 'natten_jax._native'")
            raise ImportError("libnatten_jax.so: undefined symbol: nothing")
        def exec_module(self, module):
            pass

    sys.meta_path.insert(0, Finder())
    import jax.numpy as jnp
    import natten_jax
    from natten_jax.native import module as native
    assert "_native" in native.load_error, native.load_error
    x = jnp.ones((1, 9, 1, 8))
    print(natten_jax.na1d(x, x, x, 3).sum())
    assert natten_jax.get_configs_for_cpu_fna(x) == []
    try:
        natten_jax.na1d(x, x, x, 3, backend="cpu-fna")
    except ValueError as error:
        print(error)
    """
    output = output_of(run_python(source, kind, fresh=True))
    assert output.startswith("72.0")
    expected = "No module named 'natten_jax._native'" if kind == "missing" else "undefined symbol: nothing"
    assert expected in output
    assert "Backends that can: flex-fna" in output


def test_devices_have_readable_names() -> None:
    assert str(devices.Device("cuda", (9, 0))) == "cuda (compute capability 9.0)"
    assert devices.parse_compute_capability("10.3") == (10, 3)
    assert {*INTERPRETED, *(family.name for family in FAMILIES)} == {each.family for each in backends.registered()}
