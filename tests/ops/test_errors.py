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
from natten_jax.backends.base import Capabilities, PureJaxBackend
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
        changes: Arguments that differ from good ones.
        message: Parts of the error's message.
        error: The exception's type.
    """

    changes: dict[str, Any]
    message: tuple[str, ...]
    error: type[Exception] = ValueError


Q = (2, 8, 9, 4, 16)
ROWS = [
    # Arrays.
    Row({"query": array(2, 8, 4, 16)}, ("query", "(2, 8, 4, 16)", "na2d", "5")),
    Row({"key": array(2, 8, 9, 1, 4, 16)}, ("key", "(2, 8, 9, 1, 4, 16)", "na2d")),
    Row({"value": array(2, 72, 4, 16)}, ("value", "(2, 72, 4, 16)", "na2d")),
    Row({"query": [[1.0]]}, ("query", "array", "list"), TypeError),
    Row({"key": None}, ("key", "array", "NoneType"), TypeError),
    Row({"key": array(*Q, dtype=jnp.bfloat16)}, ("key", "bfloat16", "query", "float32")),
    Row({"value": array(*Q, dtype=jnp.float16)}, ("value", "float16", "query", "float32")),
    Row(
        {name: array(*Q, dtype=jnp.int32) for name in ("query", "key", "value")},
        ("query", "int32", "float16", "bfloat16", "float32", "float64"),
    ),
    Row({"key": array(*Q, dtype=jnp.int8)}, ("int8", "float16", "bfloat16")),
    Row({"key": array(3, 8, 9, 4, 16)}, ("key", "batch", "3", "2")),
    Row({"value": array(1, 8, 9, 4, 16)}, ("value", "batch", "1", "2")),
    Row({"key": array(2, 8, 8, 4, 16)}, ("key", "(8, 8)", "query", "(8, 9)")),
    Row({"value": array(2, 9, 8, 4, 16)}, ("value", "(9, 8)", "query", "(8, 9)")),
    Row({"value": array(2, 8, 9, 2, 16)}, ("value", "2 heads", "key", "4")),
    Row({"key": array(2, 8, 9, 3, 16), "value": array(2, 8, 9, 3, 16)}, ("query", "4 heads", "multiple", "3")),
    Row({"key": array(2, 8, 9, 8, 16), "value": array(2, 8, 9, 8, 16)}, ("query", "4 heads", "multiple", "8")),
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
            (array(2, 5, 4, 8), array(2, 5, 4, 16), ("additional_keys", "(2, 5, 4, 8)")),
            (array(2, 5, 1, 4, 16), array(2, 5, 4, 16), ("additional_keys", "(2, 5, 1, 4, 16)")),
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
            ((3, 3, 3), ValueError, "(3, 3, 3)"),
            ((), ValueError, "()"),
            (3.0, TypeError, "3.0"),
            ((3, 2.0), TypeError, "(3, 2.0)"),
            (True, TypeError, "True"),
            (np.True_, TypeError, "True"),
            (None, TypeError, "None"),
        )
    ),
    Row({"edges": "mirror"}, ("edges", "'shift' or 'cut' or 'wrap'", "'mirror'")),
    Row({"edges": ("wrap", "pad")}, ("edges", "'wrap'", "('wrap', 'pad')")),
    Row({"edges": (1, True)}, ("edges", "'shift' or 'cut' or 'wrap'", "(1, True)"), TypeError),
    Row({"edges": None}, ("edges", "'shift'", "None"), TypeError),
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
    Row({"stride": (3, 4)}, ("stride", "(3, 4)", "kernel_size", "(3, 3)")),
    Row({"kernel_size": (3, 10)}, ("kernel_size", "(3, 10)", "(8, 9)", "10 > 9")),
    Row({"dilation": (3, 3)}, ("kernel_size", "(3, 3)", "dilation", "(8, 9)", "9 > 8")),
    # Causality.
    *(
        Row({"is_causal": value}, ("is_causal", shown), error)
        for value, error, shown in (
            (1, TypeError, "1"),
            ((0, 1), TypeError, "(0, 1)"),
            (None, TypeError, "None"),
            ("no", TypeError, "'no'"),
            ((True,), ValueError, "(True,)"),
            ((True,) * 3, ValueError, "(True, True, True)"),
        )
    ),
    # Performance arguments.
    *(
        Row({given: (4, 4)}, (given, "(4, 4)", missing))
        for given, missing in (
            ("q_tile_shape", "kv_tile_shape"),
            ("kv_tile_shape", "q_tile_shape"),
            ("backward_q_tile_shape", "backward_kv_tile_shape"),
            ("backward_kv_tile_shape", "backward_q_tile_shape"),
        )
    ),
    *(
        Row({"q_tile_shape": tile, "kv_tile_shape": (4, 4)}, ("q_tile_shape", shown), error)
        for tile, error, shown in (
            (16, TypeError, "16"),
            ((4, 4, 4), ValueError, "(4, 4, 4)"),
            ((0, 4), ValueError, "(0, 4)"),
            ((4.0, 4), TypeError, "(4.0, 4)"),
        )
    ),
    Row({"kernel_schedule": "fast"}, ("kernel_schedule", "'fast'", "non", "coop", "pp")),
    Row({"backward_kv_splits": 0}, ("backward_kv_splits", "0")),
    Row({"backward_kv_splits": 1.5}, ("backward_kv_splits", "1.5"), TypeError),
    Row({"memory_usage_preference": "lavish"}, ("memory_usage_preference", "lavish", "strict")),
    Row({"backward_deterministic": 1}, ("backward_deterministic", "1"), TypeError),
    Row({"backward_use_xla_reduction": 1}, ("backward_use_xla_reduction", "1"), TypeError),
    Row({"run_persistent_kernel": None}, ("run_persistent_kernel", "None"), TypeError),
    Row({"torch_compile": True}, ("takes torch_compile=False only", "True", "jax.jit"), TypeError),
    Row({"backward_use_pt_reduction": True}, ("backward_use_xla_reduction",), TypeError),
    Row({"attention_kwargs": [1]}, ("attention_kwargs", "[1]"), TypeError),
    Row({"attention_kwargs": {"causal": 1}}, ("attention_kwargs", "'causal'"), TypeError),
    Row({"attention_kwargs": {"scale": 1.0}}, ("attention_kwargs", "scale=1.0")),
    Row({"attention_kwargs": {"mask": 1.0}}, ("attention_kwargs", "'mask'"), TypeError),
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
    Row({"query": array(2, 8, 9, 4, 16)}, ("query", "(2, 8, 9, 4, 16)", "attention", "4")),
    Row({"key": array(2, 4, 16)}, ("key", "(2, 4, 16)", "attention")),
    Row({"value": 1}, ("value", "array", "int"), TypeError),
    Row({"value": array(*S, dtype=jnp.float16)}, ("value", "float16", "query", "float32")),
    Row({"key": array(1, 8, 4, 16)}, ("key", "batch", "1", "2")),
    Row({"key": array(2, 9, 4, 16)}, ("value", "8 tokens", "key", "9")),
    Row({"query": array(2, 0, 4, 16)}, ("query", "(2, 0, 4, 16)", "at least 1")),
    Row({"key": array(2, 8, 3, 16), "value": array(2, 8, 3, 16)}, ("query", "4 heads", "3")),
    Row({"query": array(2, 8, 4, 8)}, ("key", "head_dim 16", "query", "8")),
    Row({"is_causal": 0}, ("is_causal", "0"), TypeError),
    Row({"is_causal": (True,)}, ("is_causal", "(True,)"), TypeError),
    Row({"scale": "a"}, ("scale", "'a'"), TypeError),
    Row({"q_tile_size": 64}, ("q_tile_size", "64", "kv_tile_size")),
    Row({"kv_tile_size": 64}, ("kv_tile_size", "64", "q_tile_size")),
    Row({"backward_q_tile_size": 64}, ("backward_q_tile_size", "64", "backward_kv_tile_size")),
    Row({"q_tile_size": 0, "kv_tile_size": 64}, ("q_tile_size", "0", "at least 1")),
    Row({"q_tile_size": 6.0, "kv_tile_size": 64}, ("q_tile_size", "6.0"), TypeError),
    Row({"kernel_schedule": "auto"}, ("kernel_schedule", "'auto'", "coop")),
    Row({"backward_kv_splits": -1}, ("backward_kv_splits", "-1")),
    Row({"memory_usage_preference": "lavish"}, ("memory_usage_preference", "'lavish'", "strict")),
    Row({"backward_use_xla_reduction": 1}, ("backward_use_xla_reduction", "bool", "1"), TypeError),
    Row({"backward_deterministic": None}, ("backward_deterministic", "bool", "None"), TypeError),
    Row({"run_persistent_kernel": "no"}, ("run_persistent_kernel", "bool", "'no'"), TypeError),
    Row({"scale": float("inf")}, ("scale must be finite", "inf")),
    Row({"q_tile_size": b"\x40", "kv_tile_size": 64}, ("q_tile_size", "b'@'"), TypeError),
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
    capabilities = Capabilities(("float32",), lambda *_: (1, 1), is_plain_jax=True)

    def __init__(self, family: str, reason: str) -> None:
        self.family, self.reason = family, reason  # type: ignore[misc]

    def rejection(self, *_: Any) -> str:
        return self.reason

    def tile_pairs(self, *_: Any) -> list[Any]:
        return []

    def attend(self, *_: Any) -> Any:
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
