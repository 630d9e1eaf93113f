"""Malformed calls straight to the host's custom call targets: every one is an error with a sentence, never a crash.

The calls run in a process of their own (this file as a program), which reports before and after each: a crash is
the failure of one test.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import run_python

import natten_jax

TARGETS = ("natten_jax_cpu_forward", "natten_jax_cpu_backward")
PROBLEM_OPERANDS = ("query", "key", "value", "additional_keys", "additional_values", "origins")
BACKWARD_OPERANDS = (*PROBLEM_OPERANDS, "logsumexp", "out_cotangent", "delta")
EXTENTS = ("query_layout", "kv_layout", "kernel_size", "stride", "dilation", "q_tile_shape", "kv_tile_shape")
INT64_MAX, INT64_MIN = 2**63 - 1, -(2**63)
INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)


@dataclasses.dataclass
class Call:
    """A call of a target; cases change a good one."""

    operands: dict[str, Any]
    attributes: dict[str, Any]
    results: dict[str, Any]


def good_call(target: str) -> Call:
    """A small call in which nothing is wrong: 2 heads over 1 head, 4 x 5 x 6 tokens, 3 additional ones."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    tokens = (4, 5, 6)
    operands = {
        "query": draw(2, *tokens, 2, 8),
        "key": draw(2, *tokens, 1, 8),
        "value": draw(2, *tokens, 1, 12),
        "additional_keys": draw(2, 3, 1, 8),
        "additional_values": draw(2, 3, 1, 12),
        "origins": np.zeros((2, 3), np.int32),
    }
    results = {"out": (2, *tokens, 2, 12), "logsumexp": (2, *tokens, 2)}
    if target.endswith("backward"):
        operands |= {
            "logsumexp": 3 + draw(2, *tokens, 2),
            "out_cotangent": draw(2, *tokens, 2, 12),
            "delta": draw(2, *tokens, 2),
        }
        results = {f"d{name}": operands[name].shape for name in PROBLEM_OPERANDS[:5]}
    attributes = {
        "query_layout": tokens,
        "kv_layout": tokens,
        "kernel_size": (2, 3, 3),
        "stride": (1, 2, 3),
        "dilation": (2, 1, 2),
        "is_causal": (0, 1, 0),
        "q_tile_shape": (2, 2, 4),
        "kv_tile_shape": (2, 4, 4),
    }
    return Call(
        operands,
        {**{name: np.asarray(value, np.int64) for name, value in attributes.items()}, "scale": np.float32(0.3)},
        {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in results.items()},
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """A change of a good call, and parts of the message that it must lead to; ``None`` where it may also run."""

    name: str
    change: Callable[[Call], None]
    message: tuple[str, ...] | None


def set_operand(name: str, value: Any) -> Callable[[Call], None]:
    return lambda call: call.operands.__setitem__(name, value)


def set_attribute(name: str, value: Any) -> Callable[[Call], None]:
    return lambda call: call.attributes.__setitem__(name, value)


def set_integers(**values: tuple[int, ...]) -> Callable[[Call], None]:
    return lambda call: call.attributes.update({k: np.asarray(v, np.int64) for k, v in values.items()})


def set_result(name: str, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Callable[[Call], None]:
    return lambda call: call.results.__setitem__(name, jax.ShapeDtypeStruct(shape, dtype))


def operand_cases(target: str) -> list[Case]:
    """Wrong rank, element type and extents of each operand."""
    good = good_call(target)
    cases = []
    for name, array in good.operands.items():
        other = np.int32 if array.dtype == np.float32 else np.float32
        shapes = {
            "scalar": (),
            "one-axis-less": array.shape[1:],
            "one-axis-more": (*array.shape, 1),
            "flat": (array.size,),
            **{f"longer-{i}": tuple(n + (i == j) for j, n in enumerate(array.shape)) for i in range(array.ndim)},
            **{f"empty-{i}": tuple(n * (i != j) for j, n in enumerate(array.shape)) for i in range(array.ndim)},
        }
        for kind, shape in shapes.items():
            cases.append(Case(f"{name}-{kind}", set_operand(name, np.zeros(shape, array.dtype)), ("natten_jax",)))
        for dtype in (other, np.float16, np.int8, np.bool_):
            wrong = array.astype(dtype)
            cases.append(Case(f"{name}-{np.dtype(dtype).name}", set_operand(name, wrong), ("natten_jax", "dtype")))

    def three_heads_over_two(call: Call) -> None:
        call.operands["query"] = np.zeros((2, 4, 5, 6, 3, 8), np.float32)
        for name in ("key", "value"):
            call.operands[name] = call.operands[name].repeat(2, axis=4)

    def no_operand(call: Call) -> None:
        del call.operands["origins"]

    def surplus_operand(call: Call) -> None:
        call.operands["more"] = np.zeros(3, np.float32)

    return [
        *cases,
        Case("heads-not-a-multiple", three_heads_over_two, ("query has 3 heads", "multiple")),
        Case("operand-missing", no_operand, ()),
        Case("operand-surplus", surplus_operand, ()),
    ]


def attribute_cases() -> list[Case]:
    """Wrong type, length and values of each attribute."""
    cases = []
    for name in (*EXTENTS, "is_causal"):
        cases += [
            Case(f"{name}-missing", lambda call, name=name: call.attributes.__delitem__(name), ("natten_jax", name)),
            Case(f"{name}-scalar", set_attribute(name, np.int64(2)), ("natten_jax", name)),
            Case(f"{name}-float", set_attribute(name, np.ones(3, np.float32)), ("natten_jax", name)),
            Case(f"{name}-int32", set_attribute(name, np.ones(3, np.int32)), ("natten_jax", name)),
            Case(f"{name}-text", set_attribute(name, "3 3 3"), ("natten_jax", name)),
            *(
                Case(f"{name}-length-{n}", set_integers(**{name: (1,) * n}), ("natten_jax", name, "3 values"))
                for n in (0, 1, 2, 4, 1000)
            ),
        ]
        bad = (-1, 2, INT32_MAX, INT64_MAX, INT64_MIN)
        if name != "is_causal":
            bad = (0, -1, INT32_MIN, INT32_MAX + 1, 2**62, INT64_MAX, INT64_MIN)
        for value, position in itertools.product(bad, range(3)):
            values = tuple(value if i == position else 1 for i in range(3))
            cases.append(Case(f"{name}-{value}-at-{position}", set_integers(**{name: values}), ("natten_jax", name)))
    huge = (INT32_MAX,) * 3
    return [
        *cases,
        Case("scale-missing", lambda call: call.attributes.__delitem__("scale"), ("natten_jax", "scale")),
        *(
            Case(f"scale-{name}", set_attribute("scale", value), ("natten_jax", "scale"))
            for name, value in (
                ("nan", np.float32("nan")),
                ("infinite", np.float32("-inf")),
                ("float64", np.float64(1)),
                ("integer", np.int64(1)),
                ("array", np.ones(1, np.float32)),
            )
        ),
        Case("attribute-surplus", set_integers(window=(1, 1, 1)), ("natten_jax", "attributes")),
        Case("no-attributes", lambda call: call.attributes.clear(), ("natten_jax",)),
        Case("stride-exceeds-window", set_integers(stride=(1, 4, 3)), ("natten_jax", "stride", "kernel_size")),
        Case("window-exceeds-layout", set_integers(kernel_size=(2, 6, 3)), ("natten_jax", "kernel_size", "kv_layout")),
        Case("dilated-window", set_integers(dilation=(2, 2, 2)), ("natten_jax", "dilation")),
        Case("dilated-window-overflows", set_integers(kernel_size=huge, dilation=huge), ("natten_jax",)),
        Case("layouts-differ", set_integers(query_layout=(4, 5, 7)), ("natten_jax", "query_layout", "kv_layout")),
        Case("layout-below-extent", set_integers(query_layout=(4, 5, 5), kv_layout=(4, 5, 5)), ("natten_jax",)),
        Case("query-tile-too-large", set_integers(q_tile_shape=(17, 17, 17)), ("natten_jax", "q_tile_shape", "4096")),
        Case("kv-tile-too-large", set_integers(kv_tile_shape=(1, 1, 4097)), ("natten_jax", "kv_tile_shape", "4096")),
        Case("tile-product-overflows", set_integers(kv_tile_shape=huge), ("natten_jax", "kv_tile_shape")),
    ]


def origin_cases() -> list[Case]:
    """Places outside the layout. Keys may lie outside, where no query sees them; queries may not."""
    cases = []
    for (row, name), column, value in itertools.product(
        enumerate(("query", "key")), range(3), (-1, 1, 1000, INT32_MAX, INT32_MIN)
    ):
        origins = np.zeros((2, 3), np.int32)
        origins[row, column] = value
        message = ("natten_jax", "origins", "query") if row == 0 else None
        cases.append(Case(f"{name}-origin-{column}-{value}", set_operand("origins", origins), message))
    large = {"query_layout": (INT32_MAX,) * 3, "kv_layout": (INT32_MAX,) * 3}
    ones = (1, 1, 1)
    wide = {"kernel_size": (INT32_MAX,) * 3, "stride": (INT32_MAX,) * 3, "dilation": ones}
    far = np.full((2, 3), INT32_MAX - 6, np.int32)

    def everywhere(values: dict[str, tuple[int, ...]], origins: np.ndarray) -> Callable[[Call], None]:
        def change(call: Call) -> None:
            set_integers(**values)(call)
            call.operands["origins"] = origins

        return change

    return [
        *cases,
        # Legal, if unusual: they have to end, too.
        Case("huge-layout", everywhere({**large}, np.zeros((2, 3), np.int32)), None),
        Case("huge-layout-far-away", everywhere(large, far), None),
        Case("huge-window", everywhere({**large, **wide}, np.zeros((2, 3), np.int32)), None),
        Case("huge-window-far-away", everywhere({**large, **wide}, far), None),
        Case(
            "huge-dilation",
            everywhere(
                {**large, "kernel_size": ones, "stride": ones, "dilation": (INT32_MAX,) * 3}, np.zeros((2, 3), np.int32)
            ),
            None,
        ),
    ]


def result_cases(target: str) -> list[Case]:
    """Wrong rank, element type, extents and number of results."""
    cases = []
    for name, result in good_call(target).results.items():
        shape = result.shape
        cases += [
            Case(f"result-{name}-scalar", set_result(name, ()), ("natten_jax", name)),
            Case(f"result-{name}-empty", set_result(name, (0, *shape[1:])), ("natten_jax", name)),
            Case(f"result-{name}-shorter", set_result(name, (*shape[:-1], shape[-1] - 1 or 2)), ("natten_jax", name)),
            Case(f"result-{name}-batch", set_result(name, (shape[0] - 1, *shape[1:])), ("natten_jax", name)),
            Case(f"result-{name}-rank", set_result(name, (*shape, 1)), ("natten_jax", name)),
            Case(f"result-{name}-float16", set_result(name, shape, jnp.float16), ("natten_jax", name)),
            Case(f"result-{name}-int8", set_result(name, shape, jnp.int8), ("natten_jax", name)),
            Case(f"result-{name}-missing", lambda call, name=name: call.results.__delitem__(name) or None, ()),
        ]
    return [*cases, Case("result-surplus", set_result("more", (2,)), ())]


def all_cases() -> dict[str, tuple[str, Case]]:
    """By name, the target and the case."""
    cases = {}
    for target in TARGETS:
        for case in (*operand_cases(target), *attribute_cases(), *origin_cases(), *result_cases(target)):
            cases[f"{target.rsplit('_', 1)[1]}-{case.name}"] = target, case
    return cases


def run_call(target: str, call: Call) -> list[np.ndarray]:
    """Compile and run one call."""

    @jax.jit
    def run(*operands: jax.Array) -> Any:
        return jax.ffi.ffi_call(target, list(call.results.values()))(*operands, **call.attributes)

    return [np.asarray(result) for result in run(*call.operands.values())]


def main(names: list[str]) -> None:
    """Run cases, printing ``[name, null]`` before and ``[name, outcome]`` after each."""
    cases = all_cases()
    for name in names:
        print(json.dumps([name, None]), flush=True)
        target, case = cases[name]
        call = good_call(target)
        case.change(call)
        try:
            run_call(target, call)
            outcome = "ran"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        print(json.dumps([name, outcome]), flush=True)


CASES = all_cases()


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What each case led to; after a crash or a hang the next process goes on behind it."""
    found: dict[str, str] = {}
    remaining = list(CASES)
    while remaining:
        program = f"import test_ffi_handlers; test_ffi_handlers.main({remaining!r})"
        try:
            result = run_python(program, timeout=240)
            output, ending = result.stdout, f"crashed with status {result.returncode}: {result.stderr[-2000:]}"
        except subprocess.TimeoutExpired as error:
            output, ending = (error.stdout or b"").decode(), "did not end"
        for line in output.splitlines():
            name, outcome = json.loads(line)
            found[name] = ending if outcome is None else outcome
        assert output, ending
        remaining = [name for name in remaining if name not in found]
    return found


@pytest.mark.parametrize("name", CASES)
def test_malformed_call(outcomes: dict[str, str], name: str) -> None:
    _, case = CASES[name]
    outcome = outcomes[name]
    assert not outcome.startswith(("crashed", "did not end")), outcome
    if case.message is None:
        return
    assert outcome != "ran", "the call was accepted"
    assert all(part in outcome for part in case.message), outcome


@pytest.mark.parametrize("target", TARGETS)
def test_unchanged_call_runs(target: str) -> None:
    """Or else the cases would prove nothing."""
    call = good_call(target)
    results = run_call(target, call)
    assert all(np.isfinite(result).all() for result in results)
    if target.endswith("forward"):
        names = ("query", "key", "value", "additional_keys", "additional_values")
        expected = natten_jax.na3d(
            *(jnp.asarray(call.operands[name]) for name in names[:3]),
            *((2, 3, 3), (1, 2, 3), (2, 1, 2), (False, True, False), 0.3),
            *(jnp.asarray(call.operands[name]) for name in names[3:]),
            backend="flex-fna",
            return_lse=True,
        )
        for result, other in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, other, rtol=1e-5, atol=1e-5)


def test_attributes_of_real_calls_are_those_tested_here() -> None:
    query = jnp.zeros((1, 5, 1, 8))
    text = jax.jit(lambda q: natten_jax.na1d(q, q, q, 3, backend="cpu-fna")).lower(query).as_text()
    for name in good_call(TARGETS[0]).attributes:
        assert name in text
