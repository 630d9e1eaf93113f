"""Forward passes on parts of the keys.

Their results are merged, or a pass continues an earlier pass with further keys, such as the keys of a halo.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax.arrays.boxes import QueryBox
from natten_jax.arrays.operands import Inputs, Operands, Saved
from natten_jax.execution import custom_vjp
from natten_jax.execution.strips import merged
from natten_jax.halo import halo_of
from natten_jax.performance import Performance
from natten_jax.plan.plan import Request
from natten_jax.problem import Problem, problem_of
from natten_jax.windows import Axis
from tests.support import oracle
from tests.support.problems import Case

# Merged results of two forward passes, each on a part of the keys, equal the results of a pass on all keys. The
# logsumexp is as precise as backward passes require.


TOKENS, HEADS, WIDTH = 24, 2, 8


def saved(backend: str, query: jax.Array, key: jax.Array, value: jax.Array) -> Saved:
    """Run a forward pass with all keys in ``key``, and return the results that are saved for the backward pass."""
    problem = problem_of((TOKENS,), TOKENS, heads=HEADS, head_dim=WIDTH, dtype=query.dtype.name)
    keys = key.shape[1]
    problem = dataclasses.replace(problem, axes=(Axis(TOKENS, keys, keys),))
    return custom_vjp.run(custom_vjp.SAVING, Request(problem, backend=backend), Operands(Inputs(query, key, value)))


def base2(each: Saved) -> np.ndarray:
    """Return the logsumexp in base 2 as float64: the saved float32 number plus its remainder."""
    assert each.remainder is not None
    rounded = np.float32(each.logsumexp) * np.float32(1 / np.log(2))
    return np.asarray(rounded, np.float64) + np.asarray(each.remainder, np.float64)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("backend", "dtype", "bound"),
    [
        ("cpu-fna", "float32", 2e-6),
        pytest.param("hopper-fna", "bfloat16", 2e-2, marks=pytest.mark.gpu),
        pytest.param("cutlass-fna", "bfloat16", 2e-2, marks=pytest.mark.gpu),
        pytest.param("cutlass-fna", "float32", 2e-6, marks=pytest.mark.gpu),
    ],
)
def test_of_two_parts(backend: str, dtype: str, bound: float, jit: bool, size: float) -> None:
    keys = jax.random.split(jax.random.key(int(size)), 3)
    query, key, value = (jax.random.normal(each, (1, TOKENS, HEADS, WIDTH), dtype) for each in keys)
    query = query * jnp.asarray(size, dtype)

    def merge_parts(query: jax.Array, key: jax.Array, value: jax.Array) -> Saved:
        halves = [saved(backend, query, key[:, part], value[:, part]) for part in (slice(10), slice(10, None))]
        return merged(*halves)

    found = (jax.jit(merge_parts) if jit else merge_parts)(query, key, value)
    expected = saved(backend, query, key, value)
    np.testing.assert_allclose(np.float32(found.out), np.float32(expected.out), atol=bound)
    np.testing.assert_allclose(found.logsumexp, expected.logsumexp, rtol=3e-7)
    # For logits of a million, the rounding error of float32 without the remainder would be 0.06.
    np.testing.assert_allclose(base2(found), base2(expected), atol=3e-6)


def test_of_parts_that_are_not_seen() -> None:
    out = jnp.array([1.0, 0.0])[:, None, None] * jnp.ones((2, 1, 4))
    one = Saved(out, jnp.array([[0.5], [-jnp.inf]]), jnp.zeros((2, 1)))
    nothing = Saved(jnp.zeros_like(out), jnp.full((2, 1), -jnp.inf), jnp.zeros((2, 1)))
    for found in (merged(one, nothing), merged(nothing, one)):
        np.testing.assert_array_equal(found.out, out)
        np.testing.assert_allclose(found.logsumexp, one.logsumexp, rtol=1e-7)
        assert found.remainder is not None and bool(jnp.isfinite(found.remainder).all())


# A forward pass on the keys of a device is continued with the keys of its halos. The results equal the results of a
# pass on all keys.


BACKENDS = [
    ("cpu-fna", "float32"),
    pytest.param("hopper-fna", "bfloat16", marks=pytest.mark.gpu),
    pytest.param("hopper-fna", "float16", marks=pytest.mark.gpu),
    pytest.param("cutlass-fna", "bfloat16", marks=pytest.mark.gpu),
]


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a problem that is split into equal parts along one dimension.

    Attributes:
        case: The whole problem.
        dtype: Element type of the arrays.
        dimension: Index of the split dimension.
        parts: Number of parts.
        place: Index of this part.
        performance: Performance options of the passes.
        size: Factor by which the queries are multiplied.
    """

    case: Case
    dtype: str
    dimension: int
    parts: int
    place: int
    performance: Performance
    size: float

    @classmethod
    def draw(cls, source: random.Random, dtype: str) -> Part:
        while True:
            rank = source.choice([1, 2, 3])
            parts, dimension = source.choice([2, 3, 4]), source.randrange(rank)
            layout = [source.randint(2, {1: 150, 2: 20, 3: 9}[rank]) for _ in range(rank)]
            layout[dimension] = parts * source.randint(1, {1: 120, 2: 12, 3: 6}[rank])
            dilation = [source.choice([1, 1, 2, 3]) for _ in layout]
            most = [extent // d for extent, d in zip(layout, dilation, strict=True)]
            if min(most) < 1:
                continue
            kernel = [source.randint(1, each) for each in most]
            stride, causal = [source.randint(1, each) for each in kernel], [source.random() < 0.3 for _ in layout]
            heads, heads_kv = source.choice([(1, 1), (2, 2), (3, 1)])
            window: Any = {"stride": tuple(stride), "dilation": tuple(dilation), "is_causal": tuple(causal)}
            case = Case(
                tuple(layout),
                tuple(kernel),
                **window,
                batch=source.choice([1, 2]),
                heads=heads,
                heads_kv=heads_kv,
                head_dim=source.choice([32, 64, 128, 192]),
                head_dim_v=source.choice([40, 64, 128]),
            )
            tiles = [tuple(source.randint(1, {1: 64, 2: 8, 3: 4}[rank]) for _ in layout) for _ in range(2)]
            schedule = source.choice(["pp", "coop", "non"]) if dtype != "float32" else None
            performance = (
                Performance(tiles[0], tiles[1], kernel_schedule=schedule) if source.random() < 0.5 else Performance()
            )
            size = source.choice([1.0, 1.0, 1e3])
            part = cls(case, dtype, dimension, parts, source.randrange(parts), performance, size)
            if not part.problem.is_attention:
                return part

    @property
    def problem(self) -> Problem:
        case = self.case
        shapes = {name: getattr(case, name) for name in ("batch", "heads", "heads_kv", "head_dim", "head_dim_v")}
        return problem_of(case.layout, **case.window_arguments, **shapes, dtype=self.dtype)

    def operands(self, seed: int) -> oracle.Tensors:
        operands = self.case.operands(self.dtype, seed)
        return operands._replace(query=operands.query * jnp.asarray(self.size, self.dtype))

    def found(self, backend: str, query: jax.Array, key: jax.Array, value: jax.Array) -> Saved:
        """Run a pass on the keys of this part, and continue it with each slab of the halo.

        A slab contains keys of another part. Keys and values beyond the layout are large numbers, which would change
        results if a query saw them.
        """
        axis = self.dimension + 1
        halo = halo_of(self.problem.axes[self.dimension], self.parts)
        first = self.place * halo.part
        layout = [each.query_extent for each in self.problem.axes]
        layout[self.dimension] = halo.part
        schedule = self.performance.kernel_schedule if backend.startswith("hopper") else None
        request = Request(self.problem, dataclasses.replace(self.performance, kernel_schedule=schedule), backend)

        def tokens(array: jax.Array, begin: int, count: int) -> jax.Array:
            room = [(halo.extent, halo.extent, 0) if i == axis else (0, 0, 0) for i in range(array.ndim)]
            padded = jax.lax.pad(array, jnp.asarray(100, array.dtype), room)
            return jax.lax.slice_in_dim(padded, begin + halo.extent, begin + halo.extent + count, axis=axis)

        def operands(first_key: int, keys: int) -> Operands:
            origins = np.zeros((2, 3), np.int32)
            origins[:, 3 - len(layout) + self.dimension] = first, first_key
            held = tokens(key, first_key, keys), tokens(value, first_key, keys)
            return Operands(Inputs(tokens(query, first, halo.part), *held), jnp.asarray(origins))

        saved = custom_vjp.run(custom_vjp.SAVING, request, operands(first, halo.part))
        for slab in halo.seen_slabs(self.problem.axes[self.dimension]):
            assert slab.is_front is not None or self.parts == 2
            is_front = self.place != 0 if slab.is_front is None else slab.is_front
            first_query, first_key = slab.starts(halo.part, is_front)
            starts, extents = [0] * len(layout), list(layout)
            starts[self.dimension], extents[self.dimension] = first_query, slab.queries
            seeing = QueryBox(jnp.asarray(starts, jnp.int32), tuple(extents))
            saved = custom_vjp.run(custom_vjp.CONTINUED, request, operands(first + first_key, slab.keys), saved, seeing)
        return saved

    def expected(self, operands: oracle.Tensors) -> oracle.Forward:
        whole = oracle.forward(operands, self.case.mask(), self.case.actual_scale)
        part = self.case.layout[self.dimension] // self.parts
        own = (slice(None),) * (self.dimension + 1) + (slice(self.place * part, (self.place + 1) * part),)
        return oracle.Forward(*(array[own] for array in whole))


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_all_keys_are_attended_to_once(backend: str, dtype: str, seed: int) -> None:
    part = Part.draw(random.Random(seed), dtype)
    operands = part.operands(seed)
    found, expected = jax.jit(part.found, static_argnums=0)(backend, *operands[:3]), part.expected(operands)
    bound = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 6e-3}[dtype]
    # Logits are float32 sums, whose rounding errors are proportional to ``size``. These errors also change the weights.
    logit_bound = 2e-6 * part.size
    np.testing.assert_allclose(np.float32(found.out), expected.out, atol=bound + logit_bound)
    np.testing.assert_allclose(found.logsumexp, expected.lse, rtol=1e-6, atol=2e-5 + logit_bound)
