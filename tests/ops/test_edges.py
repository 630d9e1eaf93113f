"""Windows that are cut or wrap at the ends of a dimension: equivalent problems, backend support, and memory."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax import attention, backends, na1d, na2d
from natten_jax.backends import select
from natten_jax.performance import PASSES
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Request
from natten_jax.problem import problem_of
from tests.support.families import Family

LAYOUT, WINDOW = (6, 10), (3, 6)


def tokens(dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    generator = np.random.default_rng(0)
    shapes = [(2, *LAYOUT, heads, 16) for heads in (4, 2, 2)]
    query, key, value = (jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes)
    return query, key, value


def test_edges_that_make_no_difference_are_shifted() -> None:
    query, key, value = tokens("float32")
    for window in ({"kernel_size": 1, "edges": "wrap"}, {"kernel_size": 3, "is_causal": True, "edges": "cut"}):
        problem = problem_of(LAYOUT, **window)  # type: ignore[arg-type]
        assert problem.edges == ("shift", "shift")
    # A wrapped window of the layout's size contains the whole layout.
    assert problem_of(LAYOUT, LAYOUT, edges="wrap").is_attention
    whole = na2d(query, key, value, LAYOUT, edges="wrap")
    flat = attention(*(array.reshape(2, 60, *array.shape[3:]) for array in (query, key, value)))
    np.testing.assert_array_equal(whole.reshape(flat.shape), flat)
    # A cut window of the layout's size does not contain the whole layout: the part past an end is cut off.
    assert not problem_of((8,), 8, edges="cut").is_attention


def test_problems_are_described() -> None:
    problem = problem_of((32, 64), (5, 7), edges=("cut", "wrap"))
    assert problem.describe() == "na2d 32x64 k=5x7 edges=cut,wrap"
    assert problem_of((32, 64), (5, 7), edges="shift").describe() == "na2d 32x64 k=5x7"


@pytest.mark.parametrize("edges", ["cut", "wrap"])
def test_keys_and_values_are_not_copied(edges: Any, native_family: Family) -> None:
    """The lowered program equals the program of shifted windows, except for attributes of the custom calls."""
    if edges not in native_family.capabilities.edges or native_family.needs_gpu:
        pytest.skip("kernels of the host alone are lowered here")
    arrays = tokens(native_family.dtype)

    def program(edges: Any) -> str:
        def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return jnp.sum(na2d(query, key, value, WINDOW, edges=edges, backend=native_family.fna) ** 2)

        text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays).as_text()
        text, calls = re.subn(r"axes = dense<[^>]*>", "", text)
        assert calls == 2
        return re.sub(r'natten_jax(_plan)? = "[^"]*"', "", text)

    assert program(edges) == program("shift")


def test_backends_report_their_edges() -> None:
    problem = problem_of((64, 64), (5, 5), edges=("shift", "wrap"), dtype="bfloat16")
    device = Device("cuda", (9, 0), is_present=False)
    for backend in backends.registered():
        for pass_ in PASSES:
            reason = backend.rejection(problem, device, pass_)
            if "wrap" not in backend.capabilities.edges and (
                backend.capabilities.platform is None or backend.capabilities.platform.has(device)
            ):
                assert reason == "it has windows with edges 'shift', not 'wrap'" or "'cut'" in str(reason)
    plan = select.resolve(Request(problem), device, "forward")
    assert "wrap" in backends.by_id(plan.backend).capabilities.edges


@pytest.mark.parametrize("edges", ["cut", "wrap"])
def test_large_layouts_are_lowered(edges: Any) -> None:
    """Tracing and lowering create no array with an element per token, which would be very large here."""
    array = jax.ShapeDtypeStruct((1, 1 << 22, 1, 8), "bfloat16")

    def function(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return na1d(query, key, value, 4097, stride=5, edges=edges, backend="flex-fna")

    assert jax.jit(function).lower(array, array, array).out_info.shape == array.shape
