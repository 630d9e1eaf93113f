"""Calls of the custom call targets in which something is wrong, and a program that makes them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from tests.support.ffi_calls import (
    AXIS_FIELDS,
    BIASES,
    TARGETS,
    Call,
    Target,
    axes_of,
    axis_fields,
    good_call,
    run_call,
)

TILES = ("q_tile_shape", "kv_tile_shape")
DTYPES = (np.float32, np.float16, np.int32, np.int8, np.bool_)
INT64_MAX, INT64_MIN = 2**63 - 1, -(2**63)
INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)
#: In messages about errors of the GPU, which every later call of the process reports, too.
DEVICE_ERROR = "CUDA_ERROR"


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


def delete_attribute(name: str) -> Callable[[Call], None]:
    return lambda call: call.attributes.__delitem__(name)


def set_integers(**values: tuple[int, ...]) -> Callable[[Call], None]:
    return lambda call: call.attributes.update({k: np.asarray(v, np.int64) for k, v in values.items()})


def set_axes(**fields: tuple[int, ...]) -> Callable[[Call], None]:
    """Changes fields of the token dimensions."""

    def change(call: Call) -> None:
        call.attributes["axes"] = axes_of(axis_fields(call.attributes["axes"]) | fields)

    return change


def set_result(name: str, shape: tuple[int, ...], dtype: Any) -> Callable[[Call], None]:
    return lambda call: call.results.__setitem__(name, jax.ShapeDtypeStruct(shape, dtype))


def delete_result(name: str) -> Callable[[Call], None]:
    return lambda call: call.results.__delitem__(name)


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
        if name == "layouts":
            del shapes["empty-0"]  # batch entries are alike
        if name in ("scales", "relative_bias", "key_bias") and array.size == 0:
            del shapes["empty-0"]  # all heads have the same, or none
        if name == "sinks":
            del shapes["longer-0"]  # each batch entry has its own
        if name == "remainder":
            shapes["nearly-empty"] = (0, 1)
        if array.ndim == 1:
            del shapes["flat"]  # it is
        for kind, shape in shapes.items():
            cases.append(Case(f"{name}-{kind}", set_operand(name, np.zeros(shape, array.dtype)), ("natten_jax",)))
        for dtype in other_dtypes(array.dtype):
            with np.errstate(invalid="ignore"):  # a logsumexp of nothing is no integer
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

    if target.is_backward:
        scales = np.ones((2, 2, 2), np.float32)
        cases.append(Case("scales-of-shared-heads", set_operand("scales", scales), ("natten_jax", "2 heads", "scales")))
    if target.has_problem:
        cases.append(Case("heads-not-a-multiple", three_heads_over_two, ("query has 3 heads", "multiple")))
    return [
        *cases,
        Case("operand-missing", no_operand, ()),
        Case("operand-surplus", surplus_operand, ()),
    ]


def attribute_cases(target: Target) -> list[Case]:
    """Wrong type, length and values of each attribute."""
    cases = []
    extents = (*TILES, "queries") if target.replaces else TILES
    for name, length in {"axes": 18, **dict.fromkeys(extents, 3)}.items():
        ones = np.ones(length)
        cases += [
            # What only some targets have is counted first.
            Case(
                f"{name}-missing", delete_attribute(name), ("natten_jax", "attributes" if name == "queries" else name)
            ),
            Case(f"{name}-scalar", set_attribute(name, np.int64(2)), ("natten_jax", name)),
            Case(f"{name}-float", set_attribute(name, ones.astype(np.float32)), ("natten_jax", name)),
            Case(f"{name}-int32", set_attribute(name, ones.astype(np.int32)), ("natten_jax", name)),
            Case(f"{name}-text", set_attribute(name, "3 3 3"), ("natten_jax", name)),
            *(
                Case(f"{name}-length-{n}", set_integers(**{name: (1,) * n}), ("natten_jax", name, f"{length} values"))
                for n in (0, 1, 2, length - 1, length + 1, 1000)
            ),
        ]
    for name in (*AXIS_FIELDS, *extents):
        set_values = set_integers if name in extents else set_axes
        bad: tuple[int, ...] = (-1, 4, INT32_MAX, INT64_MAX, INT64_MIN)
        if name != "ends":
            bad = (0, -1, INT32_MIN, INT32_MAX + 1, 2**62, INT64_MAX, INT64_MIN)
        for value, position in itertools.product(bad, range(3)):
            values = tuple(value if i == position else 1 for i in range(3))
            cases.append(Case(f"{name}-{value}-at-{position}", set_values(**{name: values}), ("natten_jax", name)))
    huge = (INT32_MAX,) * 3
    return [
        *cases,
        Case("scale-missing", delete_attribute("scale"), ("natten_jax", "scale")),
        *(
            Case(f"scale-{name}", set_attribute("scale", value), ("natten_jax", "scale"))
            for name, value in (
                ("nan", np.float32("nan")),
                ("infinite", np.float32("inf")),
                ("zero", np.float32(0)),
                ("negative", np.float32(-0.3)),
                ("float64", np.float64(1)),
                ("integer", np.int64(1)),
                ("array", np.ones(1, np.float32)),
            )
        ),
        Case("attribute-surplus", set_integers(window=(1, 1, 1)), ("natten_jax", "attributes")),
        Case("no-attributes", lambda call: call.attributes.clear(), ("natten_jax",)),
        Case("stride-exceeds-window", set_axes(stride=(1, 4, 3)), ("natten_jax", "stride", "kernel_size")),
        Case("window-exceeds-layout", set_axes(kernel_size=(2, 6, 3)), ("natten_jax", "kernel_size", "kv_extent")),
        Case("dilated-window", set_axes(dilation=(2, 2, 2)), ("natten_jax", "dilation")),
        Case("dilated-window-overflows", set_axes(kernel_size=huge, dilation=huge), ("natten_jax",)),
        # Fields of a layout of 4 x 5 x 6 tokens.
        Case(
            "wrap-dilation",
            set_axes(ends=(0, 1, 3), dilation=(1, 1, 4), kernel_size=(2, 3, 1), stride=(1, 2, 1)),
            ("natten_jax", "ends", "dilation", "kv_extent"),
        ),
        Case("layouts-differ", set_axes(query_extent=(4, 5, 7)), ("natten_jax", "query_extent", "kv_extent")),
        Case("layout-below-extent", set_axes(query_extent=(4, 5, 5), kv_extent=(4, 5, 5)), ("natten_jax",)),
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
                delete_attribute(name),
                ("natten_jax", "attributes"),
            ),
            Case(f"{name}-float", set_attribute(name, np.float32(1)), message),
            Case(f"{name}-array", set_attribute(name, np.ones(1, np.int64)), message),
            *(Case(f"{name}-{value}", set_attribute(name, np.int64(value)), message) for value in (-1, largest + 1)),
        ]
    if target.tile_tokens is not None:
        for name, most in zip(("q_tile_shape", "kv_tile_shape"), target.tile_tokens, strict=True):
            for tile in ((1, 1, most + 1), (most + 1, 1, 1), (1, 3, most // 2), (8, 8, 8)):
                too_large = set_integers(**{name: tile})
                cases.append(Case(f"{name}-{tile}-too-large", too_large, ("natten_jax", name, "at most")))
    if target.is_small:
        for name in TILES:
            for tile in ((1, 1, 4), (1, 1, 15), (4, 4, 2), (1, 32, 1)):
                wrong = set_integers(**{name: tile})
                cases.append(Case(f"{name}-{tile}-of-small-windows", wrong, ("natten_jax", "16 and 8 tokens")))
        cube = set_integers(
            **{name: tile if math.prod(tile) > 8 else (2, 2, 2) for name, tile in zip(TILES, target.tiles, strict=True)}
        )
        cases.append(Case("group-of-three-dimensions", cube, ("natten_jax", "8 columns", "two dimensions")))
    if target.dtype == np.float16:

        def float32_everywhere(call: Call) -> None:
            call.operands |= {
                name: array.astype(np.float32) for name, array in call.operands.items() if array.dtype == np.float16
            }
            call.results = {
                name: jax.ShapeDtypeStruct(result.shape, np.float32 if result.dtype == np.float16 else result.dtype)
                for name, result in call.results.items()
            }

        cases.append(Case("float32-everywhere", float32_everywhere, ("natten_jax", "float32", "float16 or bfloat16")))
    if target.platform == "cuda":
        head_dim = target.head_dims[0] - 4

        def narrow_heads(call: Call) -> None:
            for name in ("query", "key", "additional_keys"):
                call.operands[name] = call.operands[name][..., :head_dim]
            for name in call.results.keys() & {"dquery", "dkey", "dadditional_keys"}:
                result = call.results[name]
                call.results[name] = jax.ShapeDtypeStruct((*result.shape[:-1], head_dim), result.dtype)

        words = ("natten_jax", "head dimension", str(head_dim), "multiple of")
        cases.append(Case(f"head-dim-{head_dim}", narrow_heads, words))
    return cases


def box_cases() -> list[Case]:
    """Boxes of queries that are larger than the layout, or lie outside of it, where there is nothing to do."""
    far = [(i, value) for i in range(3) for value in (-1, 3, 1000, INT32_MAX, INT32_MIN)]
    return [
        Case("queries-exceed-layout", set_integers(queries=(4, 6, 6)), ("natten_jax", "queries", "5 tokens")),
        *(
            Case(
                f"first-query-{i}-{value}",
                set_operand("first_query", np.array([value if i == j else 0 for j in range(3)], np.int32)),
                None,
            )
            for i, value in far
        ),
    ]


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
    large = {"query_extent": (INT32_MAX,) * 3, "kv_extent": (INT32_MAX,) * 3}
    ones = (1, 1, 1)
    wide = {"kernel_size": (INT32_MAX,) * 3, "stride": (INT32_MAX,) * 3, "dilation": ones}
    far = np.full((2, 3), INT32_MAX - 6, np.int32)
    # Their product is 2^64, and they leave tiles whose last tokens would have coordinates of more than 32 bits.
    dilated = {"kernel_size": ones, "stride": ones, "dilation": (2**22, 2**21, 2**21)}

    def everywhere(values: Mapping[str, tuple[int, ...]], origins: np.ndarray) -> Callable[[Call], None]:
        def change(call: Call) -> None:
            set_axes(**values)(call)
            call.operands["origins"] = origins

        return change

    return [
        *cases,
        # Legal, if unusual: they have to end, too.
        Case("huge-layout", everywhere({**large}, np.zeros((2, 3), np.int32)), None),
        Case("huge-layout-far-away", everywhere(large, far), None),
        Case("huge-dilations", everywhere({**large, **dilated}, np.zeros((2, 3), np.int32)), None),
        Case("huge-dilations-far-away", everywhere({**large, **dilated}, far), None),
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
    is_only = len(results) == 1
    for name, result in results.items():
        shape, dtype = result.shape, result.dtype
        shapes = {
            "scalar": (),
            "empty": (0, *shape[1:]),
            "shorter": (*shape[:-1], shape[-1] - 1 or 2),
            "batch": (shape[0] - 1, *shape[1:]),
            "rank": (*shape, 1),
        }
        if shape[0] == 0:
            shapes = {"scalar": (), "longer": (1, *shape[1:]), "rank": (*shape, 1)}
        cases += [
            *(
                Case(
                    f"result-{name}-{kind}",
                    set_result(name, wrong, dtype),
                    None if is_only and kind == "empty" else ("natten_jax", name),
                )
                for kind, wrong in shapes.items()
            ),
            *(
                Case(f"result-{name}-{wrong.__name__}", set_result(name, shape, wrong), ("natten_jax", name))
                for wrong in other_dtypes(dtype)
            ),
            Case(
                f"result-{name}-missing",
                delete_result(name),
                None if is_only else (),
            ),
        ]
    return [*cases, Case("result-surplus", set_result("more", (2,), np.float32), ())]


def table_cases() -> list[Case]:
    """Relative biases that kernels for small windows do not add."""
    table = np.zeros((2, 2, 3 * 5 * 5), np.float32)

    def wide(call: Call) -> None:
        call.operands |= {name: call.operands[name][:, :0] for name in ("additional_keys", "additional_values")}
        call.operands["relative_bias"] = table

    return [
        Case("relative-bias-additional", set_operand("relative_bias", table), ("natten_jax", "additional")),
        Case("relative-bias-wide-heads", wide, ("natten_jax",)),
        Case("relative-bias-too-short", set_operand("relative_bias", table[..., 1:]), ("natten_jax", "relative_bias")),
    ]


def layout_cases(target: Target) -> list[Case]:
    """Batch entries with layouts of their own that are none of the problem's."""
    tokens = (4, 5, 6)

    def case(name: str, place: tuple[int, int, int] | None, value: int, words: tuple[str, ...] | None) -> Case:
        layouts = np.array([[(0, 0, 0), tokens, tokens]] * 2, np.int32)
        if place is not None:
            layouts[place] = value

        def change(call: Call) -> None:
            call.operands["layouts"] = layouts
            call.operands["origins"] = np.zeros((0, 3), np.int32)

        return Case(f"layouts-{name}", change, words)

    wrong = itertools.product(enumerate(("origin", "queries", "keys")), range(2), (-1, 7, 1000, INT32_MAX, INT32_MIN))
    cases = [
        case(f"{name}-{entry}-{value}", (entry, row, 2), value, ("natten_jax", "layouts", f"entry {entry}"))
        for (row, name), entry, value in wrong
    ]
    whole = np.array([[(0, 0, 0), tokens, tokens]] * 2, np.int32)
    both = Case("layouts-and-origins", set_operand("layouts", whole), ("natten_jax", "origins and layouts"))
    if not target.reads_origins:
        return [both, case("without-maps", None, 0, None if "entry_maps" not in target.scratch else ("entry_maps",))]
    return [
        both,
        *cases,
        case("whole", None, 0, None),
        case("fewer-keys", (1, 2, 1), 0, None),
        case("padded-beside-additional-tokens", (1, 1, 1), 4, ("natten_jax", "layouts", "additional")),
    ]


def bias_cases(target: Target) -> list[Case]:
    """Tables that no window has, and results that are not as large as what they are the gradients of."""
    ones = (1, 1, 1)
    whole = set_axes(query_extent=(5, 5, 6), kernel_size=(4, 5, 6), stride=ones, dilation=ones, ends=(0, 0, 0))
    wide = {"query_extent": (4096,) * 3, "kv_extent": (4096,) * 3, "kernel_size": (4096,) * 3, "dilation": ones}
    cases = [
        Case("relative-bias-of-other-queries", whole, ("natten_jax", "relative_bias", "query_extent is 5")),
        Case("relative-bias-of-wide-windows", set_axes(**wide), ("natten_jax", "relative_bias", "at most")),
    ]
    for name in BIASES if target.is_backward else ():
        nothing = set_operand(name, np.zeros((0,), np.float32))
        cases.append(Case(f"{name}-has-a-gradient-alone", nothing, ("natten_jax", f"d{name}")))
    return cases


def all_cases() -> dict[str, tuple[Target, Case]]:
    """By name, the target and the case."""
    cases = {}
    for target in TARGETS:
        of_problem = choice_cases(target)
        if not target.variant:  # of which the other line with its name has what does not depend on arrays
            of_problem += attribute_cases(target) + origin_cases(target)
            if "layouts" in target.operands:
                of_problem += layout_cases(target)
        if target.replaces:
            of_problem += box_cases()
        if target.has_biases:
            of_problem += bias_cases(target)
        if target.is_small:
            of_problem += table_cases()
        own = of_problem if target.has_problem else reduction_cases()
        for case in (*operand_cases(target), *own, *result_cases(target)):
            cases[f"{target.label}-{case.name}"] = target, case
    return cases


CASES = all_cases()


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
        if DEVICE_ERROR in outcome:
            return  # later calls would fail for it
