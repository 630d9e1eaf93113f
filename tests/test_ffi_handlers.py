"""Malformed calls straight to the custom call targets: every one is an error with a sentence, never a crash.

The calls run in a process of their own (this file as a program), which reports before and after each: a crash is
the failure of one test.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import run_python

import natten_jax
from natten_jax import backends
from natten_jax.backends.base import Operands, Output
from natten_jax.problem import Problem, TileConfig

PROBLEM_OPERANDS = ("query", "key", "value", "additional_keys", "additional_values", "origins")
GRADIENTS = tuple(f"d{name}" for name in PROBLEM_OPERANDS[:5])


@dataclasses.dataclass(frozen=True)
class Target:
    """A custom call target. A new one is one more line in ``TARGETS``.

    Attributes:
        name: Its name.
        backend: The backend that calls it.
        platform: Where it runs.
        operands: Names of its operands.
        results: Names of its results but scratch memory.
        dtype: Element type of its arrays.
        head_dims: Legal ``head_dim`` and ``head_dim_v``.
        choices: Attributes of its own that select a variant, and their largest values.
        tile_tokens: The most tokens of a tile, query and key/value; ``None`` is the limit of all targets.
        scratch: Results of its own that hold nothing of use: shapes and element types.
        reads_origins: Whether the handler can check the values of the origins: those of a GPU lie in its memory.
    """

    name: str
    backend: str
    operands: tuple[str, ...] = PROBLEM_OPERANDS
    results: tuple[str, ...] = ("out", "logsumexp")
    platform: str = "cpu"
    dtype: Any = np.float32
    head_dims: tuple[int, int] = (8, 12)
    choices: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tile_tokens: tuple[int, int] | None = None
    scratch: Mapping[str, tuple[tuple[int, ...], Any]] = dataclasses.field(default_factory=dict)
    reads_origins: bool = True

    @property
    def has_problem(self) -> bool:
        """Whether it takes a problem, and not only arrays."""
        return "query" in self.operands

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """Marks of its tests."""
        return [pytest.mark.gpu] if self.platform == "cuda" else []


TARGETS = (
    Target("natten_jax_cpu_forward", "cpu-fna"),
    Target(
        "natten_jax_cpu_backward",
        "cpu-fna",
        (*PROBLEM_OPERANDS, "logsumexp", "out_cotangent", "delta"),
        GRADIENTS,
    ),
    Target(
        "natten_jax_sm90_forward",
        "hopper-fna",
        platform="cuda",
        dtype=np.float16,
        head_dims=(64, 128),
        choices={"is_ping_pong": 1, "is_persistent": 1},
        tile_tokens=(128, 128),
        scratch={"next_tile": ((1,), np.int32)},
        reads_origins=False,
    ),
    Target(
        "natten_jax_sm90_backward",
        "hopper-fna",
        (*PROBLEM_OPERANDS, "out_cotangent", "statistics"),
        GRADIENTS,
        platform="cuda",
        dtype=np.float16,
        head_dims=(64, 128),
        choices={"is_deterministic": 1},
        tile_tokens=(64, 128),
        # Sums of the query gradient, a counter, and one for each query tile: (2 x 1) x 3 x (2 x 1) a head.
        scratch={"scratch": ((2 * 2 * (4 * 5 * 6 * 64) + 1 + 2 * 2 * (2 * 3 * 2),), np.float32)},
        reads_origins=False,
    ),
    Target(
        "natten_jax_sm90_backward_statistics",
        "hopper-fna",
        ("out", "out_cotangent", "logsumexp", "logsumexp_cotangent"),
        ("statistics",),
        platform="cuda",
        dtype=np.float16,
        head_dims=(64, 128),
    ),
    Target(
        "natten_jax_sm80_forward",
        "cutlass-fna",
        platform="cuda",
        head_dims=(8, 16),
        choices={"is_accurate": 1},
        tile_tokens=(128, 128),
        reads_origins=False,
    ),
    Target(
        "natten_jax_sm80_backward",
        "cutlass-fna",
        (*PROBLEM_OPERANDS, "logsumexp", "out_cotangent", "delta"),
        GRADIENTS,
        platform="cuda",
        head_dims=(8, 16),
        choices={"is_accurate": 1, "kv_splits": 2**31 - 1},
        tile_tokens=(128, 128),
        reads_origins=False,
    ),
    Target(
        "natten_jax_sm80_delta",
        "cutlass-fna",
        ("out", "out_cotangent", "logsumexp_cotangent"),
        ("delta",),
        platform="cuda",
        head_dims=(8, 16),
    ),
)
TARGET_PARAMETERS = [pytest.param(target, id=target.name, marks=target.marks) for target in TARGETS]
EXTENTS = ("query_layout", "kv_layout", "kernel_size", "stride", "dilation", "q_tile_shape", "kv_tile_shape")
DTYPES = (np.float32, np.float16, np.int32, np.int8, np.bool_)
INT64_MAX, INT64_MIN = 2**63 - 1, -(2**63)
INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)


@dataclasses.dataclass
class Call:
    """A call of a target; cases change a good one."""

    operands: dict[str, Any]
    attributes: dict[str, Any]
    results: dict[str, Any]


def shapes_of(target: Target) -> dict[str, tuple[int, ...]]:
    """Arrays of a small problem: 2 heads over 1 head, 4 x 5 x 6 tokens, 3 additional ones."""
    tokens = (4, 5, 6)
    head_dim, head_dim_v = target.head_dims
    return {
        "query": (2, *tokens, 2, head_dim),
        "key": (2, *tokens, 1, head_dim),
        "value": (2, *tokens, 1, head_dim_v),
        "additional_keys": (2, 3, 1, head_dim),
        "additional_values": (2, 3, 1, head_dim_v),
        "origins": (2, 3),
        **dict.fromkeys(("out", "out_cotangent"), (2, *tokens, 2, head_dim_v)),
        **dict.fromkeys(("logsumexp", "logsumexp_cotangent", "delta"), (2, *tokens, 2)),
        "statistics": (2, 2, *tokens, 2),
    }


def good_call(target: Target) -> Call:
    """A call of the small problem in which nothing is wrong."""
    rng = np.random.default_rng(0)
    shapes = shapes_of(target)
    float32 = {"logsumexp", "logsumexp_cotangent", "delta", "statistics"}

    def dtype(name: str) -> Any:
        return np.float32 if name in float32 else target.dtype

    operands = {name: rng.standard_normal(shapes[name]).astype(dtype(name)) for name in target.operands}
    if "origins" in operands:
        operands["origins"] = np.zeros((2, 3), np.int32)
    # Weights and their gradients stay in the range of float16; the statistics' logarithms are to base 2.
    for name, shift in (("logsumexp", 3), ("statistics", 12)):
        if name in operands:
            operands[name] += shift
    results = {
        name: (shapes[name.removeprefix("d") if name in GRADIENTS else name], dtype(name)) for name in target.results
    } | target.scratch
    tokens = shapes["query"][1:4]
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
    of_problem = {**{name: np.asarray(value, np.int64) for name, value in attributes.items()}, "scale": np.float32(0.3)}
    return Call(
        operands,
        {
            **(of_problem if target.has_problem else {}),
            **{name: np.int64(value) for name, value in target.choices.items()},
        },
        {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in results.items()},
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


def set_result(name: str, shape: tuple[int, ...], dtype: Any) -> Callable[[Call], None]:
    return lambda call: call.results.__setitem__(name, jax.ShapeDtypeStruct(shape, dtype))


def other_dtypes(dtype: np.dtype[Any]) -> list[Any]:
    """Element types that an array must not have."""
    return [other for other in DTYPES if other is not dtype.type]


def operand_cases(target: Target) -> list[Case]:
    """Wrong rank, element type and extents of each operand."""
    good = good_call(target)
    cases = []
    for name, array in good.operands.items():
        shapes = {
            "scalar": (),
            "one-axis-less": array.shape[1:],
            "one-axis-more": (*array.shape, 1),
            "flat": (array.size,),
            **{f"longer-{i}": tuple(n + (i == j) for j, n in enumerate(array.shape)) for i in range(array.ndim)},
            **{f"empty-{i}": tuple(n * (i != j) for j, n in enumerate(array.shape)) for i in range(array.ndim)},
        }
        if name == "origins":
            del shapes["empty-0"]  # nothing is sharded
        for kind, shape in shapes.items():
            cases.append(Case(f"{name}-{kind}", set_operand(name, np.zeros(shape, array.dtype)), ("natten_jax",)))
        for dtype in other_dtypes(array.dtype):
            wrong = array.astype(dtype)
            cases.append(Case(f"{name}-{np.dtype(dtype).name}", set_operand(name, wrong), ("natten_jax", "dtype")))

    def three_heads_over_two(call: Call) -> None:
        call.operands["query"] = call.operands["query"][..., :1, :].repeat(3, axis=4)
        for name in ("key", "value"):
            call.operands[name] = call.operands[name].repeat(2, axis=4)

    def no_operand(call: Call) -> None:
        call.operands.popitem()

    def surplus_operand(call: Call) -> None:
        call.operands["more"] = np.zeros(3, np.float32)

    if target.has_problem:
        cases.append(Case("heads-not-a-multiple", three_heads_over_two, ("query has 3 heads", "multiple")))
    return [
        *cases,
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


def choice_cases(target: Target) -> list[Case]:
    """What only some targets have: choices of a variant, fewer element types, smaller tiles, steps of head_dim."""
    cases = []
    for name, largest in target.choices.items():
        message = ("natten_jax", name)
        cases += [
            Case(
                f"{name}-missing",
                lambda call, name=name: call.attributes.__delitem__(name),
                ("natten_jax", "attributes"),
            ),
            Case(f"{name}-float", set_attribute(name, np.float32(1)), message),
            Case(f"{name}-array", set_attribute(name, np.ones(1, np.int64)), message),
            *(Case(f"{name}-{value}", set_attribute(name, np.int64(value)), message) for value in (-1, largest + 1)),
        ]
    if target.tile_tokens is not None:
        for name, most in zip(("q_tile_shape", "kv_tile_shape"), target.tile_tokens, strict=True):
            for tile in ((1, 1, most + 1), (most + 1, 1, 1), (1, 3, most // 2), (8, 8, 8)):
                message = ("natten_jax", name, "at most")
                cases.append(Case(f"{name}-{tile}-too-large", set_integers(**{name: tile}), message))
    if target.dtype == np.float16:

        def float32_everywhere(call: Call) -> None:
            call.operands |= {
                name: array.astype(np.float32) for name, array in call.operands.items() if array.dtype == np.float16
            }
            call.results = {
                name: jax.ShapeDtypeStruct(result.shape, np.float32 if result.dtype == np.float16 else result.dtype)
                for name, result in call.results.items()
            }

        def narrow_heads(call: Call) -> None:
            for name in ("query", "key", "additional_keys"):
                call.operands[name] = call.operands[name][..., :60]

        cases.append(Case("float32-everywhere", float32_everywhere, ("natten_jax", "float32", "float16 or bfloat16")))
        cases.append(Case("head-dim-60", narrow_heads, ("natten_jax", "head dimension", "60", "multiple of")))
    return cases


def reduction_cases() -> list[Case]:
    """Heads that a reduction does not take, and no rows at all."""

    def resize(axis: int, extent: int) -> Callable[[Call], None]:
        def change(call: Call) -> None:
            for name in ("out", "out_cotangent"):
                shape = list(call.operands[name].shape)
                shape[axis] = extent
                call.operands[name] = np.zeros(shape, call.operands[name].dtype)

        return change

    def no_rows(call: Call) -> None:
        call.operands = {name: array[:0] for name, array in call.operands.items()}
        call.results = {name: jax.ShapeDtypeStruct((0, *r.shape[1:]), r.dtype) for name, r in call.results.items()}

    return [
        *(
            Case(f"head-dim-{n}", resize(5, n), ("natten_jax", "head_dim_v", str(n), "multiple of 8"))
            for n in (0, 60, 264, 2**20)
        ),
        Case("no-rows", no_rows, None),
    ]


def origin_cases(target: Target) -> list[Case]:
    """Places outside the layout. Keys may lie outside, where no query sees them; queries may not."""
    cases = []
    for (row, name), column, value in itertools.product(
        enumerate(("query", "key")), range(3), (-1, 1, 1000, INT32_MAX, INT32_MIN)
    ):
        origins = np.zeros((2, 3), np.int32)
        origins[row, column] = value
        message = ("natten_jax", "origins", "query") if row == 0 and target.reads_origins else None
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


def result_cases(target: Target) -> list[Case]:
    """Wrong rank, element type, extents and number of results."""
    cases = []
    results = good_call(target).results
    # XLA drops a call that has nothing to give: its handler is never asked.
    nothing_left = ["empty", "missing"] if len(results) == 1 else []
    for name, result in results.items():
        shape, dtype = result.shape, result.dtype
        shapes = {
            "scalar": (),
            "empty": (0, *shape[1:]),
            "shorter": (*shape[:-1], shape[-1] - 1 or 2),
            "batch": (shape[0] - 1, *shape[1:]),
            "rank": (*shape, 1),
        }
        cases += [
            *(
                Case(
                    f"result-{name}-{kind}",
                    set_result(name, wrong, dtype),
                    None if kind in nothing_left else ("natten_jax", name),
                )
                for kind, wrong in shapes.items()
            ),
            *(
                Case(f"result-{name}-{wrong.__name__}", set_result(name, shape, wrong), ("natten_jax", name))
                for wrong in other_dtypes(dtype)
            ),
            Case(
                f"result-{name}-missing",
                lambda call, name=name: call.results.__delitem__(name) or None,
                None if "missing" in nothing_left else (),
            ),
        ]
    return [*cases, Case("result-surplus", set_result("more", (2,), np.float32), ())]


def all_cases() -> dict[str, tuple[Target, Case]]:
    """By name, the target and the case."""
    cases = {}
    for target in TARGETS:
        of_problem = [*attribute_cases(), *choice_cases(target), *origin_cases(target)]
        own = of_problem if target.has_problem else reduction_cases()
        for case in (*operand_cases(target), *own, *result_cases(target)):
            cases[f"{target.name.removeprefix('natten_jax_')}-{case.name}"] = target, case
    return cases


def run_call(target: Target, call: Call) -> list[np.ndarray]:
    """Compile and run one call."""

    @jax.jit
    def run(*operands: jax.Array) -> Any:
        return jax.ffi.ffi_call(target.name, list(call.results.values()))(*operands, **call.attributes)

    return [np.asarray(result) for result in run(*call.operands.values())]


def main(names: list[str]) -> None:
    """Run cases, printing ``[name, null]`` before and ``[name, outcome]`` after each."""
    for name in names:
        print(json.dumps([name, None]), flush=True)
        target, case = CASES[name]
        call = good_call(target)
        case.change(call)
        try:
            run_call(target, call)
            outcome = "ran"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        print(json.dumps([name, outcome]), flush=True)


CASES = all_cases()


@functools.cache
def outcomes(platform: str) -> dict[str, str]:
    """What each case of a platform led to; after a crash or a hang the next process goes on behind it."""
    found: dict[str, str] = {}
    remaining = [name for name, (target, _) in CASES.items() if target.platform == platform]
    environment = {"JAX_PLATFORMS": platform, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    while remaining:
        program = f"import test_ffi_handlers; test_ffi_handlers.main({remaining!r})"
        try:
            result = run_python(program, timeout=240, environment=environment)
            output, ending = result.stdout, f"crashed with status {result.returncode}: {result.stderr[-2000:]}"
        except subprocess.TimeoutExpired as error:
            output, ending = (error.stdout or b"").decode(), "did not end"
        for line in output.splitlines():
            name, outcome = json.loads(line)
            found[name] = ending if outcome is None else outcome
        assert output, ending
        remaining = [name for name in remaining if name not in found]
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, id=name, marks=target.marks) for name, (target, _) in CASES.items()]
)
def test_malformed_call(name: str) -> None:
    target, case = CASES[name]
    outcome = outcomes(target.platform)[name]
    # An error of the device itself outlives the call that led to it.
    assert not outcome.startswith(("crashed", "did not end")) and "CUDA_ERROR" not in outcome, outcome
    if case.message is None:
        return
    assert outcome != "ran", "the call was accepted"
    assert all(part in outcome for part in case.message), outcome


@pytest.mark.parametrize("origins", [2, 0])
@pytest.mark.parametrize("target", TARGET_PARAMETERS)
def test_unchanged_call_runs(target: Target, origins: int) -> None:
    """Or else the cases would prove nothing."""
    if jax.default_backend() != {"cuda": "gpu"}.get(target.platform, target.platform):
        pytest.skip(f"runs with JAX_PLATFORMS={target.platform}")
    call = good_call(target)
    if target.has_problem:
        call.operands["origins"] = call.operands["origins"][:origins]
    results = [
        result for name, result in zip(call.results, run_call(target, call), strict=True) if name not in target.scratch
    ]
    assert all(np.isfinite(result).all() for result in results)
    if "out" in target.results:
        names = PROBLEM_OPERANDS[:5]
        expected = natten_jax.na3d(
            *(jnp.asarray(call.operands[name], jnp.float32) for name in names[:3]),
            *((2, 3, 3), (1, 2, 3), (2, 1, 2), (False, True, False), 0.3),
            *(jnp.asarray(call.operands[name], jnp.float32) for name in names[3:]),
            backend="flex-fna",
            return_lse=True,
        )
        tolerance = 1e-5 if target.dtype == np.float32 else 5e-3
        for result, other in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_real_calls_are_those_tested_here(target: Target) -> None:
    """As backends trace them, which needs none of their devices."""
    good = good_call(target)
    (expected,) = (good_call(each) for each in TARGETS if (each.backend, each.results) == (target.backend, GRADIENTS))
    values = {name: array.tolist() for name, array in expected.attributes.items()}
    problem = Problem(
        operator="fna",
        batch=2,
        **{name: tuple(values[name]) for name in ("query_layout", "kv_layout", "kernel_size", "stride", "dilation")},
        is_causal=tuple(map(bool, values["is_causal"])),
        heads=2,
        heads_kv=1,
        head_dim=target.head_dims[0],
        head_dim_v=target.head_dims[1],
        additional_kv=3,
        scale=values["scale"],
        dtype=np.dtype(target.dtype).name,
    )
    tiles = TileConfig(
        backward_q_tile_shape=tuple(values["q_tile_shape"]),
        backward_kv_tile_shape=tuple(values["kv_tile_shape"]),
        backward_deterministic=True,
    )
    backend = backends.find(target.backend, "fna")

    def both_passes(operands: Operands) -> Any:
        output = backend.forward(problem, tiles, operands)
        return backend.backward(problem, tiles, operands, Output(*output), *output)

    operands = Operands(*(expected.operands[name] for name in PROBLEM_OPERANDS))
    (call,) = (
        equation
        for equation in jax.make_jaxpr(both_passes)(operands).jaxpr.eqns
        if equation.params.get("target_name") == target.name
    )

    def types(arrays: Any) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        return [(array.shape, np.dtype(array.dtype)) for array in arrays]

    assert types(variable.aval for variable in call.invars) == types(good.operands.values())
    assert types(variable.aval for variable in call.outvars) == types(good.results.values())
    assert dict(call.params["attributes"]).keys() == good.attributes.keys()
