"""Windows that are cut at the ends of a dimension or wrap: beside padding and dense masks, and what they cost."""

from __future__ import annotations

import functools
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
from tests.support.problems import BOUNDS

LAYOUT, WINDOW = (6, 10), (3, 6)
LEFT, RIGHT = (WINDOW[0] // 2, WINDOW[1] // 2), ((WINDOW[0] - 1) // 2, (WINDOW[1] - 1) // 2)


def tokens(dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    generator = np.random.default_rng(0)
    shapes = [(2, *LAYOUT, heads, 16) for heads in (4, 2, 2)]
    query, key, value = (jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes)
    return query, key, value


def padded(query: jax.Array, key: jax.Array, value: jax.Array, *, mode: str = "constant") -> jax.Array:
    """A dense mask over keys that are padded on all sides: query ``i`` sees those of ``[i, i + window)`` that exist."""
    with jax.default_matmul_precision("highest"):
        pad = [(0, 0), *zip(LEFT, RIGHT, strict=True), (0, 0), (0, 0)]
        key, value = (jnp.pad(array.astype("float32"), pad, mode=mode).repeat(2, axis=3) for array in (key, value))
        exists = jnp.pad(jnp.ones(LAYOUT, bool), pad[1:3], mode=mode)
        x, y = np.ogrid[: LAYOUT[0], : LAYOUT[1]]
        kx, ky = np.ogrid[: exists.shape[0], : exists.shape[1]]
        x, y = x[..., None, None], y[..., None, None]
        mask = (x <= kx) & (kx < x + WINDOW[0]) & (y <= ky) & (ky < y + WINDOW[1]) & exists
        logits = jnp.einsum("bxyhd,bijhd->bhxyij", query.astype("float32"), key) / 4
        weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=(-2, -1))
        return jnp.einsum("bhxyij,bijhd->bxyhd", weights, value)


@pytest.mark.parametrize(("edges", "mode"), [("cut", "constant"), ("wrap", "wrap")])
def test_edges_are_those_of_padded_keys(family: Family, edges: Any, mode: str) -> None:
    if edges not in family.capabilities.edges:
        pytest.skip(f"{family.name} has no such windows")
    arrays = tokens(family.dtype)

    def own(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return na2d(query, key, value, WINDOW, edges=edges, backend=family.fna)

    cotangent = jnp.sin(jnp.arange(arrays[0].size, dtype="float32")).reshape(arrays[0].shape)
    out, pullback = jax.vjp(own, *arrays)
    expected, expected_pullback = jax.vjp(functools.partial(padded, mode=mode), *(a.astype("float32") for a in arrays))
    pairs = zip((out, *pullback(cotangent.astype(out.dtype))), (expected, *expected_pullback(cotangent)), strict=True)
    for found, reference in pairs:
        distance = np.linalg.norm(np.asarray(found, np.float64) - np.asarray(reference, np.float64))
        assert distance <= 2 * BOUNDS[family.dtype] * np.linalg.norm(np.asarray(reference, np.float64))


def test_edges_that_make_no_difference_are_shifted() -> None:
    query, key, value = tokens("float32")
    for window in (
        {"kernel_size": 1, "edges": "wrap"},
        {"kernel_size": 3, "is_causal": True, "edges": "cut"},
    ):
        problem = problem_of(LAYOUT, **window)  # type: ignore[arg-type]
        assert problem.edges == ("shift", "shift")
    # Windows that go around the whole layout see all of it.
    assert problem_of(LAYOUT, LAYOUT, edges="wrap").is_attention
    whole = na2d(query, key, value, LAYOUT, edges="wrap")
    flat = attention(*(array.reshape(2, 60, *array.shape[3:]) for array in (query, key, value)))
    np.testing.assert_array_equal(whole.reshape(flat.shape), flat)
    # As large as the layout, a window that is cut is not all of it.
    assert not problem_of((8,), 8, edges="cut").is_attention


def test_problems_are_described() -> None:
    problem = problem_of((32, 64), (5, 7), edges=("cut", "wrap"))
    assert problem.describe() == "na2d 32x64 k=5x7 edges=cut,wrap"
    assert problem_of((32, 64), (5, 7), edges="shift").describe() == "na2d 32x64 k=5x7"


@pytest.mark.parametrize("edges", ["cut", "wrap"])
def test_keys_and_values_are_not_copied(edges: Any, native_family: Family) -> None:
    """The program is that of shifted windows, with another number in the attributes of its calls."""
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


def test_backends_say_which_edges_they_have() -> None:
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
    assert "wrap" in backends.of(plan.backend).capabilities.edges


@pytest.mark.parametrize("edges", ["cut", "wrap"])
def test_large_layouts_are_lowered(edges: Any) -> None:
    """Nothing that tracing and lowering compute is as long as the layout."""
    array = jax.ShapeDtypeStruct((1, 1 << 22, 1, 8), "bfloat16")

    def function(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return na1d(query, key, value, 4097, stride=5, edges=edges, backend="flex-fna")

    assert jax.jit(function).lower(array, array, array).out_info.shape == array.shape
