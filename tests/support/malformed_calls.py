"""Invalid calls of the custom call targets, and a program that runs these calls."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
HUGE, ONES, TOKENS = (INT32_MAX,) * 3, (1, 1, 1), (4, 5, 6)
#: Text in the messages of GPU errors that persist. After such an error, all later calls in the process fail.
DEVICE_ERROR = "CUDA_ERROR"

Change = Callable[[Call], object]


class Case(NamedTuple):
    """A change of a valid call, and strings that the error message must contain: ``None`` if the call can succeed."""

    name: str
    change: Change
    message: tuple[str, ...] | None


def refused(name: str, change: Change, *words: str) -> Case:
    """Return a case that must fail. The error message contains ``words`` and the name of this package."""
    return Case(name, change, ("natten_jax", *words))


def with_operands(**values: Any) -> Change:
    return lambda call: call.operands.update(values)


def with_results(**values: tuple[tuple[int, ...], Any]) -> Change:
    results = {name: jax.ShapeDtypeStruct(*value) for name, value in values.items()}
    return lambda call: call.results.update(results)


def with_attributes(**values: Any) -> Change:
    return lambda call: call.attributes.update(values)


def with_integers(**values: tuple[int, ...]) -> Change:
    return with_attributes(**{name: np.asarray(value, np.int64) for name, value in values.items()})


def with_axes(**fields: tuple[int, ...]) -> Change:
    """Return a change that replaces fields of the attribute ``axes``."""

    def change(call: Call) -> None:
        call.attributes["axes"] = axes_of(axis_fields(call.attributes["axes"]) | fields)

    return change


def without(part: str, name: str) -> Change:
    return lambda call: getattr(call, part).pop(name)


def other_dtypes(dtype: np.dtype[Any]) -> list[Any]:
    """Return element types that are invalid for an array."""
    return [other for other in DTYPES if other is not dtype.type]


def operand_cases(target: Target) -> Iterator[Case]:
    """Yield cases with a wrong rank, element type or extent of each operand."""
    for name, array in good_call(target).operands.items():
        shapes = {
            "scalar": (),
            "one-axis-less": array.shape[1:],
            "one-axis-more": (*array.shape, 1),
            "flat": (array.size,),
            **{f"longer-{i}": tuple(n + (i == j) for j, n in enumerate(array.shape)) for i in range(array.ndim)},
            **{f"empty-{i}": tuple(n * (i != j) for j, n in enumerate(array.shape)) for i in range(array.ndim)},
        }
        # Empty origins are valid if arrays contain whole layouts. Empty layouts are valid if all batch entries have the
        # same layout. Empty scales are valid if all heads have the same scale. Empty biases are absent biases.
        if name in ("origins", "layouts") or (name in ("scales", *BIASES) and array.size == 0):
            del shapes["empty-0"]
        if name == "sinks":
            del shapes["longer-0"]  # each batch entry may have separate sinks
        if name == "remainder":
            shapes["nearly-empty"] = (0, 1)
        if array.ndim == 1:
            del shapes["flat"]  # already flat
        for kind, shape in shapes.items():
            yield refused(f"{name}-{kind}", with_operands(**{name: np.zeros(shape, array.dtype)}))
        for dtype in other_dtypes(array.dtype):
            with np.errstate(invalid="ignore"):  # -inf cannot be converted
                wrong = array.astype(dtype)
            yield refused(f"{name}-{np.dtype(dtype).name}", with_operands(**{name: wrong}), "dtype")

    def three_heads_over_two(call: Call) -> None:
        call.operands["query"] = call.operands["query"][..., :1, :].repeat(3, axis=4)
        for name in ("key", "value"):
            call.operands[name] = call.operands[name].repeat(2, axis=4)

    if target.is_backward:
        scales = with_operands(scales=np.ones((2, 2, 2), np.float32))
        yield refused("scales-of-shared-heads", scales, "2 heads", "scales")
    if target.has_problem:
        yield Case("heads-not-a-multiple", three_heads_over_two, ("query has 3 heads", "multiple"))
    yield Case("operand-missing", lambda call: call.operands.popitem(), ())
    yield Case("operand-surplus", with_operands(more=np.zeros(3, np.float32)), ())


def attribute_cases(target: Target) -> Iterator[Case]:
    """Yield cases with a wrong type, length or value of each attribute."""
    extents = (*TILES, "queries") if target.replaces else TILES
    for name, length in {"axes": 18, **dict.fromkeys(extents, 3)}.items():
        # If a target has specific attributes, its handler checks the number of attributes first.
        missing = "attributes" if name == "queries" else name
        yield refused(f"{name}-missing", without("attributes", name), missing)
        kinds: tuple[tuple[str, Any], ...] = (
            ("scalar", np.int64(2)),
            ("float", np.ones(length, np.float32)),
            ("int32", np.ones(length, np.int32)),
            ("text", "3 3 3"),
        )
        for kind, wrong in kinds:
            yield refused(f"{name}-{kind}", with_attributes(**{name: wrong}), name)
        for n in (0, 1, 2, length - 1, length + 1, 1000):
            yield refused(f"{name}-length-{n}", with_integers(**{name: (1,) * n}), name, f"{length} values")
    for name in (*AXIS_FIELDS, *extents):
        changed = with_integers if name in extents else with_axes
        bad: tuple[int, ...] = (0, -1, INT32_MIN, INT32_MAX + 1, 2**62, INT64_MAX, INT64_MIN)
        if name == "ends":
            bad = (-1, 4, INT32_MAX, INT64_MAX, INT64_MIN)
        for value, position in itertools.product(bad, range(3)):
            values = tuple(value if i == position else 1 for i in range(3))
            yield refused(f"{name}-{value}-at-{position}", changed(**{name: values}), name)
    yield refused("scale-missing", without("attributes", "scale"), "scale")
    scales: dict[str, Any] = {"nan": np.float32("nan"), "infinite": np.float32("inf"), "zero": np.float32(0)}
    scales |= {"negative": np.float32(-0.3), "float64": np.float64(1), "integer": np.int64(1)}
    for name, scale in (scales | {"array": np.ones(1, np.float32)}).items():
        yield refused(f"scale-{name}", with_attributes(scale=scale), "scale")
    yield refused("attribute-surplus", with_integers(window=ONES), "attributes")
    yield refused("no-attributes", lambda call: call.attributes.clear())
    yield refused("stride-exceeds-window", with_axes(stride=(1, 4, 3)), "stride", "kernel_size")
    yield refused("window-exceeds-layout", with_axes(kernel_size=(2, 6, 3)), "kernel_size", "kv_extent")
    yield refused("dilated-window", with_axes(dilation=(2, 2, 2)), "dilation")
    yield refused("dilated-window-overflows", with_axes(kernel_size=HUGE, dilation=HUGE))
    # The fields below are for a layout of 4 x 5 x 6 tokens.
    wrap = with_axes(ends=(0, 1, 3), dilation=(1, 1, 4), kernel_size=(2, 3, 1), stride=(1, 2, 1))
    yield refused("wrap-dilation", wrap, "ends", "dilation", "kv_extent")
    yield refused("layouts-differ", with_axes(query_extent=(4, 5, 7)), "query_extent", "kv_extent")
    yield refused("layout-below-extent", with_axes(query_extent=(4, 5, 5), kv_extent=(4, 5, 5)))
    yield refused("query-tile-too-large", with_integers(q_tile_shape=(17, 17, 17)), "q_tile_shape", "4096")
    yield refused("kv-tile-too-large", with_integers(kv_tile_shape=(1, 1, 4097)), "kv_tile_shape", "4096")
    yield refused("tile-product-overflows", with_integers(kv_tile_shape=HUGE), "kv_tile_shape")


def choice_cases(target: Target) -> Iterator[Case]:
    """Yield cases of target-specific limits: variants, element types, tile sizes and multiples of head_dim."""
    for name, largest in target.choices.items():
        yield refused(f"{name}-missing", without("attributes", name), "attributes")
        yield refused(f"{name}-float", with_attributes(**{name: np.float32(1)}), name)
        yield refused(f"{name}-array", with_attributes(**{name: np.ones(1, np.int64)}), name)
        for value in (-1, largest + 1):
            yield refused(f"{name}-{value}", with_attributes(**{name: np.int64(value)}), name)
    for name, most in zip(TILES, target.tile_tokens or (), strict=False):
        for tile in ((1, 1, most + 1), (most + 1, 1, 1), (1, 3, most // 2), (8, 8, 8)):
            yield refused(f"{name}-{tile}-too-large", with_integers(**{name: tile}), name, "at most")
    if target.is_small:
        for name, tile in itertools.product(TILES, ((1, 1, 4), (1, 1, 15), (4, 4, 2), (1, 32, 1))):
            yield refused(f"{name}-{tile}-of-small-windows", with_integers(**{name: tile}), "16 and 8 tokens")
        cube = {name: t if math.prod(t) > 8 else (2, 2, 2) for name, t in zip(TILES, target.tiles, strict=True)}
        yield refused("group-of-three-dimensions", with_integers(**cube), "8 columns", "two dimensions")
    if target.dtype == np.float16:

        def widened(dtype: Any) -> Any:
            return np.float32 if dtype == np.float16 else dtype

        def float32_everywhere(call: Call) -> None:
            call.operands = {name: array.astype(widened(array.dtype)) for name, array in call.operands.items()}
            results = {name: (result.shape, widened(result.dtype)) for name, result in call.results.items()}
            with_results(**results)(call)

        yield refused("float32-everywhere", float32_everywhere, "float32", "float16 or bfloat16")
    if target.platform == "cuda":
        head_dim = target.head_dims[0] - 4

        def narrow_heads(call: Call) -> None:
            for name in ("query", "key", "additional_keys"):
                call.operands[name] = call.operands[name][..., :head_dim]
            for name in call.results.keys() & {"dquery", "dkey", "dadditional_keys"}:
                result = call.results[name]
                with_results(**{name: ((*result.shape[:-1], head_dim), result.dtype)})(call)

        yield refused(f"head-dim-{head_dim}", narrow_heads, "head dimension", str(head_dim), "multiple of")


def box_cases() -> Iterator[Case]:
    """Yield cases with query boxes that exceed the layout, which must fail, or are outside it, which can succeed."""
    yield refused("queries-exceed-layout", with_integers(queries=(4, 6, 6)), "queries", "5 tokens")
    for i, value in itertools.product(range(3), (-1, 3, 1000, INT32_MAX, INT32_MIN)):
        first = np.array([value if i == j else 0 for j in range(3)], np.int32)
        yield Case(f"first-query-{i}-{value}", with_operands(first_query=first), None)


def reduction_cases() -> Iterator[Case]:
    """Yield cases with head dimensions that a reduction does not support, and a case with an empty batch."""

    def with_heads(width: int) -> Change:
        def change(call: Call) -> None:
            for name in ("out", "out_cotangent"):
                array = call.operands[name]
                call.operands[name] = np.zeros((*array.shape[:-1], width), array.dtype)

        return change

    def no_rows(call: Call) -> None:
        call.operands = {name: array[:0] for name, array in call.operands.items()}
        with_results(**{name: ((0, *each.shape[1:]), each.dtype) for name, each in call.results.items()})(call)

    for n in (0, 60, 264, 2**20):
        yield refused(f"head-dim-{n}", with_heads(n), "head_dim_v", str(n), "multiple of 8")
    yield Case("no-rows", no_rows, None)


def origin_cases(target: Target) -> Iterator[Case]:
    """Yield cases with origins outside the layout.

    Such origins are invalid for queries, but only CPU handlers check them. They are valid for keys: no query sees these
    keys.
    """
    for (row, name), column, value in itertools.product(
        enumerate(("query", "key")), range(3), (-1, 1, 1000, INT32_MAX, INT32_MIN)
    ):
        origins = np.zeros((2, 3), np.int32)
        origins[row, column] = value
        case = refused(f"{name}-origin-{column}-{value}", with_operands(origins=origins), "origins", "query")
        yield case if row == 0 and target.platform == "cpu" else case._replace(message=None)
    layout = {"query_extent": HUGE, "kv_extent": HUGE}
    window: dict[str, tuple[int, ...]] = {"kernel_size": HUGE, "stride": HUGE, "dilation": ONES}
    # The product of these dilations is 2^64, and the last tokens of tiles would have coordinates of more than 32 bits.
    dilations: dict[str, tuple[int, ...]] = {**window, "kernel_size": ONES, "stride": ONES}
    dilations["dilation"] = (2**22, 2**21, 2**21)
    places = {"": 0, "-far-away": INT32_MAX - 6}

    def everywhere(place: int, **values: tuple[int, ...]) -> Change:
        def change(call: Call) -> None:
            with_axes(**layout, **values)(call)
            call.operands["origins"] = np.full((2, 3), place, np.int32)

        return change

    # Valid but unusual: these calls must terminate.
    named: dict[str, dict[str, tuple[int, ...]]] = {"layout": {}, "dilations": dilations, "window": window}
    for (name, values), (suffix, place) in itertools.product(named.items(), places.items()):
        yield Case(f"huge-{name}{suffix}", everywhere(place, **values), None)
    yield Case("huge-dilation", everywhere(0, **dilations | {"dilation": HUGE}), None)


def result_cases(target: Target) -> Iterator[Case]:
    """Yield cases with a wrong rank, element type, extent or number of results."""
    results = good_call(target).results
    # XLA removes a call whose results are all empty, so its handler never runs.
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
        for kind, wrong in shapes.items():
            case = refused(f"result-{name}-{kind}", with_results(**{name: (wrong, dtype)}), name)
            yield case._replace(message=None) if is_only and kind == "empty" else case
        for other in other_dtypes(dtype):
            yield refused(f"result-{name}-{other.__name__}", with_results(**{name: (shape, other)}), name)
        yield Case(f"result-{name}-missing", without("results", name), None if is_only else ())
    yield Case("result-surplus", with_results(more=((2,), np.float32)), ())


def table_cases() -> Iterator[Case]:
    """Yield cases of kernels for small windows with relative biases that these kernels do not support."""
    table = np.zeros((2, 2, 3 * 5 * 5), np.float32)

    def wide(call: Call) -> None:
        call.operands |= {name: call.operands[name][:, :0] for name in ("additional_keys", "additional_values")}
        call.operands["relative_bias"] = table

    yield refused("relative-bias-additional", with_operands(relative_bias=table), "additional")
    yield refused("relative-bias-wide-heads", wide)
    yield refused("relative-bias-too-short", with_operands(relative_bias=table[..., 1:]), "relative_bias")


def layout_cases(target: Target) -> Iterator[Case]:
    """Yield cases with per-entry layouts that do not fit the problem."""
    whole = np.array([[(0, 0, 0), TOKENS, TOKENS]] * 2, np.int32)

    def change(place: tuple[int, int, int], value: int) -> Change:
        layouts = whole.copy()
        layouts[place] = value
        return with_operands(layouts=layouts, origins=np.zeros((0, 3), np.int32))

    yield refused("layouts-and-origins", with_operands(layouts=whole), "origins and layouts")
    unchanged = change((0, 0, 0), 0)
    if target.platform != "cpu":
        maps = refused("layouts-without-maps", unchanged)
        yield maps._replace(message=("entry_maps",) if "entry_maps" in target.scratch else None)
        return
    rows = enumerate(("origin", "queries", "keys"))
    for (row, name), entry, value in itertools.product(rows, range(2), (-1, 7, 1000, INT32_MAX, INT32_MIN)):
        yield refused(f"layouts-{name}-{entry}-{value}", change((entry, row, 2), value), "layouts", f"entry {entry}")
    yield Case("layouts-whole", unchanged, None)
    yield Case("layouts-fewer-keys", change((1, 2, 1), 0), None)
    padded = "layouts-padded-beside-additional-tokens"
    yield refused(padded, change((1, 1, 1), 4), "layouts", "additional")


def bias_cases(target: Target) -> Iterator[Case]:
    """Yield cases with relative bias tables that match no window, and cases with a bias gradient but no bias."""
    whole = with_axes(query_extent=(5, 5, 6), kernel_size=TOKENS, stride=ONES, dilation=ONES, ends=(0, 0, 0))
    extents = dict.fromkeys(("query_extent", "kv_extent", "kernel_size"), (4096,) * 3)
    yield refused("relative-bias-of-other-queries", whole, "relative_bias", "query_extent is 5")
    yield refused("relative-bias-of-wide-windows", with_axes(**extents, dilation=ONES), "relative_bias", "at most")
    for name in BIASES if target.is_backward else ():
        nothing = with_operands(**{name: np.zeros((0,), np.float32)})
        yield refused(f"{name}-has-a-gradient-alone", nothing, f"d{name}")


def cases_of(target: Target) -> Iterator[Case]:
    yield from operand_cases(target)
    yield from result_cases(target)
    if not target.has_problem:
        yield from reduction_cases()
        return
    yield from choice_cases(target)
    if not target.variant:  # variants skip cases that do not depend on arrays
        yield from (*attribute_cases(target), *origin_cases(target))
        yield from layout_cases(target) if "layouts" in target.operands else ()
    yield from box_cases() if target.replaces else ()
    yield from bias_cases(target) if target.has_biases else ()
    yield from table_cases() if target.is_small else ()


CASES = {f"{target.label}-{case.name}": (target, case) for target in TARGETS for case in cases_of(target)}


def main(names: list[str]) -> None:
    """Run cases. Print ``[name, null]`` before each case and ``[name, outcome]`` after it."""
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
            return  # the error persists, so later calls would also fail
