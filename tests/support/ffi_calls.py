"""The custom call targets, and a small valid FFI call of each target."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

import natten_jax  # noqa: F401  # registers the targets

PROBLEM_OPERANDS = ("query", "key", "value", "additional_keys", "additional_values", "origins", "scales")
#: Arrays that the CPU kernels add to the logits.
BIASES = ("relative_bias", "key_bias")
#: Fields of the attribute ``axes``, in order. Each of the three token dimensions has all these fields.
AXIS_FIELDS = ("query_extent", "kv_extent", "kernel_size", "stride", "dilation", "ends")
GRADIENTS = tuple(f"d{name}" for name in PROBLEM_OPERANDS[:5])
SCALE = 0.3
#: Arrays that are float32 for every element type of the problem.
FLOAT32 = {
    *("logsumexp", "remainder", "logsumexp_cotangent", "delta", "statistics"),
    *("earlier_logsumexp", "earlier_remainder", "scales", "sinks"),
    *BIASES,
    *(f"d{name}" for name in BIASES),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A custom call target. To test a new target, add it to ``TARGETS``.

    Attributes:
        name: Name of the target.
        operands: Names of its operands.
        results: Names of its results, without scratch memory. The result ``remainder`` may also be an empty array.
        dtype: Element type of its arrays.
        head_dims: Valid ``head_dim`` and ``head_dim_v``.
        choices: Largest valid value of each target-specific attribute. These attributes select a variant of the kernel.
        tile_tokens: Largest number of tokens of a query tile and of a key/value tile. ``None`` if the target has only
            the limit that all targets share.
        tiles: Query and key/value tile shapes of the call.
        scratch: Shape and element type of each target-specific result. Tests do not check the content of these results.
        replaces: Maps each result that reuses the memory of an operand to this operand. A target with such results
            continues the computation of another target, and has an attribute ``queries`` with the extents of the query
            box.
        variant: Suffix that distinguishes entries with the same name.
    """

    name: str
    operands: tuple[str, ...] = PROBLEM_OPERANDS
    results: tuple[str, ...] = ("out", "logsumexp", "remainder")
    dtype: Any = np.float32
    head_dims: tuple[int, int] = (8, 12)
    choices: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tile_tokens: tuple[int, int] | None = None
    tiles: tuple[tuple[int, int, int], tuple[int, int, int]] = ((2, 2, 4), (2, 4, 4))
    scratch: Mapping[str, tuple[tuple[int, ...], Any]] = dataclasses.field(default_factory=dict)
    replaces: Mapping[str, str] = dataclasses.field(default_factory=dict)
    variant: str = ""

    @property
    def label(self) -> str:
        """Name in test ids, without the common prefix."""
        return "-".join(filter(None, (self.name.removeprefix("natten_jax_"), self.variant)))

    @property
    def platform(self) -> str:
        """Platform of the target. Only CPU handlers check the values of origins and layouts."""
        return "cpu" if "_cpu_" in self.name else "cuda"

    @property
    def is_small(self) -> bool:
        """True for kernels for small windows. One of their tiles has 16 tokens, the other has 8."""
        return "_small_" in self.name

    @property
    def has_problem(self) -> bool:
        """True if the target takes an attention problem, False if it takes only arrays."""
        return "query" in self.operands

    @property
    def is_backward(self) -> bool:
        """True if the target computes the gradients of a problem's arrays."""
        return self.results[: len(GRADIENTS)] == GRADIENTS

    @property
    def has_biases(self) -> bool:
        """True if the target adds both relative biases and key biases to the logits."""
        return set(BIASES) <= set(self.operands) and not self.is_small

    @property
    def has_key_bias(self) -> bool:
        """True if the target adds key biases to the logits. GPU kernels support this only for 16-bit arrays."""
        return "key_bias" in self.operands and not self.is_small and (self.platform, self.dtype) != ("cuda", np.float32)

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """Pytest marks of the target's tests."""
        return [pytest.mark.gpu] if self.platform == "cuda" else []


#: Scratch result that holds TMA tensor maps if batch entries have separate layouts. It is empty here, because the calls
#: have one layout for all batch entries.
_ENTRY_MAPS = ((0, 128), np.uint8)
_NO_TABLE = ((0,), np.float32)
_LAID_OUT = (*PROBLEM_OPERANDS, "layouts")

_SM90_FORWARD = Target(
    "natten_jax_sm90_forward",
    (*_LAID_OUT, "key_bias"),
    dtype=np.float16,
    head_dims=(64, 128),
    choices={"is_ping_pong": 1, "is_persistent": 1},
    tile_tokens=(128, 128),
    scratch={"next_tile": ((1,), np.int32), "entry_maps": _ENTRY_MAPS},
)
_SM80_FORWARD = Target(
    "natten_jax_sm80_forward",
    (*_LAID_OUT, "key_bias"),
    dtype=np.float16,
    head_dims=(8, 16),
    choices={"is_accurate": 1},
    tile_tokens=(128, 128),
)
_SM80_BACKWARD = Target(
    "natten_jax_sm80_backward",
    (*_LAID_OUT, "key_bias", "logsumexp", "remainder", "out_cotangent", "delta"),
    GRADIENTS,
    dtype=np.float16,
    head_dims=(8, 16),
    choices={"is_accurate": 1, "kv_splits": 2**31 - 1},
    tile_tokens=(128, 128),
    scratch={
        "dkey_bias": ((2, 4, 5, 6, 2), np.float32),
        "scratch": ((2 * 2 * (4 * 5 * 6 * 8),), np.float32),  # query gradient accumulators
    },
)
TARGETS = (
    Target("natten_jax_cpu_forward", (*PROBLEM_OPERANDS, "layouts", *BIASES)),
    Target(
        "natten_jax_cpu_backward",
        (*PROBLEM_OPERANDS, "layouts", *BIASES, "logsumexp", "remainder", "out_cotangent", "delta"),
        (*GRADIENTS, *(f"d{name}" for name in BIASES)),
    ),
    _SM90_FORWARD,
    dataclasses.replace(
        _SM90_FORWARD,
        name="natten_jax_sm90_forward_continued",
        scratch={"next_tile": _SM90_FORWARD.scratch["next_tile"]},
        operands=(*PROBLEM_OPERANDS, "first_query", *(f"earlier_{name}" for name in _SM90_FORWARD.results)),
        replaces={name: f"earlier_{name}" for name in _SM90_FORWARD.results},
    ),
    Target(
        "natten_jax_sm90_backward",
        (*_LAID_OUT, "key_bias", "out_cotangent", "statistics", "remainder"),
        GRADIENTS,
        dtype=np.float16,
        head_dims=(64, 128),
        choices={"is_deterministic": 1},
        tile_tokens=(64, 128),
        # The scratch array consists of accumulators of the query gradient, one counter, and one counter per query tile.
        # Each head has (2 x 1) x 3 x (2 x 1) query tiles. A factor in parentheses is the number of dilation groups
        # times the number of tiles per group.
        scratch={
            "scratch": ((2 * 2 * (4 * 5 * 6 * 64) + 1 + 2 * 2 * (2 * 3 * 2),), np.float32),
            "dkey_bias": ((2, 4, 5, 6, 2), np.float32),
            "entry_maps": _ENTRY_MAPS,
        },
    ),
    Target(
        "natten_jax_sm90_backward_statistics",
        ("out", "out_cotangent", "logsumexp", "logsumexp_cotangent", "layouts"),
        ("statistics",),
        dtype=np.float16,
        head_dims=(64, 128),
    ),
    _SM80_FORWARD,
    dataclasses.replace(_SM80_FORWARD, variant="float32", dtype=np.float32),
    _SM80_BACKWARD,
    dataclasses.replace(_SM80_BACKWARD, variant="float32", dtype=np.float32, scratch={"dkey_bias": _NO_TABLE}),
    Target("natten_jax_sm80_delta", ("out", "out_cotangent", "logsumexp_cotangent"), ("delta",), head_dims=(8, 16)),
    Target(
        "natten_jax_sm80_small_forward",
        operands=(*_LAID_OUT, *BIASES, "sinks"),
        dtype=np.float16,
        head_dims=(64, 128),
        tiles=((2, 2, 4), (1, 2, 4)),
        scratch={"table_products": _NO_TABLE, "entry_maps": _ENTRY_MAPS},
    ),
    Target(
        "natten_jax_sm80_small_backward",
        (*_LAID_OUT, *BIASES, "sinks", "logsumexp", "remainder", "out", "out_cotangent", "logsumexp_cotangent"),
        GRADIENTS,
        dtype=np.float16,
        head_dims=(64, 128),
        tiles=((1, 2, 4), (2, 2, 4)),
        # ``statistics`` has four numbers per query and head. ``additional_sums`` has the gradients of additional
        # tokens, summed over queries.
        scratch={
            "statistics": ((2, 4 * 5 * 6, 2, 4), np.float32),
            "additional_sums": ((1, 2, 3, 1, 64 + 128), np.float32),
            **dict.fromkeys(
                ("table_products", "table_records", "table_sums", "drelative_bias", "dkey_bias"), _NO_TABLE
            ),
            "sinks_parts": ((1024,), np.float32),
            "dsinks": ((1, 2, 1), np.float32),
            "entry_maps": _ENTRY_MAPS,
        },
    ),
)


@dataclasses.dataclass
class Call:
    """A call of a target. Test cases start from a valid call and modify it."""

    operands: dict[str, Any]
    attributes: dict[str, Any]
    results: dict[str, Any]


def axes_of(fields: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    """Return the attribute ``axes``: one row of fields per token dimension, flattened."""
    return np.array([fields[name] for name in AXIS_FIELDS], np.int64).T.flatten()


def axis_fields(axes: np.ndarray) -> dict[str, tuple[int, ...]]:
    """Return the fields of an attribute ``axes`` by name. Each field has one value per token dimension."""
    return dict(zip(AXIS_FIELDS, map(tuple, axes.reshape(3, -1).T.tolist()), strict=True))


def shapes_of(target: Target) -> dict[str, tuple[int, ...]]:
    """Return array shapes of a small problem.

    It has 2 query heads, 1 key/value head, 4 x 5 x 6 tokens and 3 additional tokens.
    """
    tokens = (4, 5, 6)
    head_dim, head_dim_v = target.head_dims
    return {
        "query": (2, *tokens, 2, head_dim),
        "key": (2, *tokens, 1, head_dim),
        "value": (2, *tokens, 1, head_dim_v),
        "additional_keys": (2, 3, 1, head_dim),
        "additional_values": (2, 3, 1, head_dim_v),
        "origins": (2, 3),
        "layouts": (0, 3, 3),
        "first_query": (3,),
        **dict.fromkeys(("out", "out_cotangent", "earlier_out"), (2, *tokens, 2, head_dim_v)),
        **dict.fromkeys(FLOAT32 - {"statistics", "scales"}, (2, *tokens, 2)),
        "statistics": (2, 2, *tokens, 2),
        # Backward targets reject per-head scales if query heads share a key/value head, which is the case here.
        "scales": (0,) if target.is_backward else (2, 2, 2),
        # This table is for windows of 2 x 3 x 3 tokens. The kernels for small windows get no table: with a head
        # dimension of 128, they do not support a relative bias.
        "relative_bias": (0,) if target.is_small else (2, 2, 3 * 5 * 5),
        "key_bias": (2, *tokens, 2) if target.has_key_bias else (0,),
        "sinks": (1, 2, 1),
    }


def good_call(target: Target) -> Call:
    """Return a valid call of the small problem."""
    rng = np.random.default_rng(0)
    shapes = shapes_of(target)

    def dtype(name: str) -> Any:
        return np.float32 if name in FLOAT32 else target.dtype

    operands = {name: rng.standard_normal(shapes[name]).astype(dtype(name)) for name in target.operands}
    if "origins" in operands:
        operands["origins"] = np.zeros((2, 3), np.int32)
        operands["scales"][...] = SCALE
    if "layouts" in operands:
        operands["layouts"] = np.zeros((0, 3, 3), np.int32)
    if target.has_biases:
        operands["relative_bias"][1] = operands["relative_bias"][0]  # operators repeat the table for each batch entry
    if target.replaces:
        # The earlier call processed no keys: its output is 0 and its logsumexp is -inf.
        operands["first_query"] = np.zeros(3, np.int32)
        for name, value in (("out", 0), ("logsumexp", -np.inf), ("remainder", 0)):
            operands[f"earlier_{name}"][...] = value
    # These shifts of random numbers keep weights and their gradients in the range of float16. The logarithms in
    # ``statistics`` have base 2.
    for name, shift in (("logsumexp", 3), ("statistics", 12)):
        if name in operands:
            operands[name] += shift
    results = {
        name: (shapes[name.removeprefix("d") if target.is_backward else name], dtype(name)) for name in target.results
    } | dict(target.scratch)
    tokens = shapes["query"][1:4]
    fields = {
        "query_extent": tokens,
        "kv_extent": tokens,
        "kernel_size": (2, 3, 3),
        "stride": (1, 2, 3),
        "dilation": (2, 1, 2),
        "ends": (0, 1, 0),
    }
    problem_attributes = {
        "axes": axes_of(fields),
        "q_tile_shape": np.array(target.tiles[0], np.int64),
        "kv_tile_shape": np.array(target.tiles[1], np.int64),
        "scale": np.float32(SCALE),
    }
    return Call(
        operands,
        {
            **(problem_attributes if target.has_problem else {}),
            **({"queries": np.array(tokens, np.int64)} if target.replaces else {}),
            **{name: np.int64(value) for name, value in target.choices.items()},
        },
        {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in results.items()},
    )


def run_call(target: Target, call: Call) -> list[np.ndarray]:
    """Compile and run one call."""

    types = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in call.operands.items()}

    @jax.jit
    def run(*operands: jax.Array) -> Any:
        in_place = {
            list(call.operands).index(operand): list(call.results).index(result)
            for result, operand in target.replaces.items()
            if result in call.results and types.get(operand) == call.results[result]
        }
        function = jax.ffi.ffi_call(target.name, list(call.results.values()), input_output_aliases=in_place)
        return function(*operands, **call.attributes)

    return [np.asarray(result) for result in run(*call.operands.values())]
