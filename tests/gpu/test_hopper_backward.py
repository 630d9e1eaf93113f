"""What the gradients of the Hopper kernels have to be tested for beyond ``test_operators.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from tests.support import oracle
from tests.support.families import BOUNDS

pytestmark = pytest.mark.gpu

BACKEND = "hopper-fna"


def arrays_of(
    layout: tuple[int, ...], heads: int, heads_kv: int, head_dim: int, head_dim_v: int, batch: int = 2
) -> list[jax.Array]:
    """Query, key, value and an output cotangent."""
    shapes = [(batch, *layout, n, d) for n, d in ((heads, head_dim), (heads_kv, head_dim), (heads_kv, head_dim_v))]
    keys = jax.random.split(jax.random.key(sum(layout)), 4)
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=False)]
    cotangent = 0.05 * jax.random.normal(keys[3], (batch, *layout, heads, head_dim_v))
    return [*arrays, cotangent.astype(jnp.bfloat16)]


def differentiate(rank: int, **arguments: Any) -> Callable[[list[jax.Array]], list[np.ndarray]]:
    """A compiled function of operands and an output cotangent that returns the gradients."""
    operator = getattr(natten_jax, f"na{rank}d")

    @jax.jit
    def program(operands: list[jax.Array], cotangent: jax.Array) -> Any:
        return jax.vjp(lambda *each: operator(*each, **arguments, backend=BACKEND), *operands)[1](cotangent)

    return lambda arrays: [np.asarray(gradient, np.float64) for gradient in program(arrays[:-1], arrays[-1])]


def gradients(arrays: list[jax.Array], **arguments: Any) -> list[np.ndarray]:
    return differentiate(arrays[0].ndim - 3, **arguments)(arrays)


def assert_gradients(results: list[np.ndarray], arrays: list[jax.Array], windows: dict[str, Any]) -> None:
    """Compare gradients of a few batch entries with the oracle's."""
    layout, head_dim = arrays[0].shape[1:-2], arrays[0].shape[-1]
    filled = {"stride": 1, "dilation": 1, "is_causal": False, **windows}
    per_axis = [
        value if isinstance(value, tuple) else (value,) * len(layout)
        for value in (filled[name] for name in ("kernel_size", "stride", "dilation", "is_causal"))
    ]
    query, key, value, cotangent = (np.asarray(array, np.float64) for array in arrays)
    mask = oracle.neighborhood_mask(layout, *per_axis)
    expected = oracle.reference(
        oracle.Tensors(query, key, value, None, None), mask, head_dim**-0.5, cotangent, np.zeros(cotangent.shape[:-1])
    ).gradients
    for result, reference in zip(results, expected[:3], strict=True):
        assert np.linalg.norm(result - reference) <= BOUNDS["bfloat16"] * np.linalg.norm(reference)


@pytest.mark.parametrize(
    ("layout", "windows", "q_tile", "kv_tile"),
    [
        ((301,), {"kernel_size": (70,), "stride": (9,)}, (64,), (128,)),
        ((301,), {"kernel_size": (31,), "dilation": (4,), "is_causal": (True,)}, (50,), (90,)),
        ((37, 29), {"kernel_size": (11, 7), "stride": (3, 2)}, (7, 9), (9, 13)),
        ((23, 31), {"kernel_size": (5, 9), "dilation": (3, 2), "is_causal": (False, True)}, (16, 4), (8, 16)),
        ((7, 11, 13), {"kernel_size": (3, 5, 7), "stride": (1, 2, 5)}, (2, 4, 8), (3, 5, 7)),
        ((9, 10, 11), {"kernel_size": (4, 3, 2), "dilation": (2, 3, 4)}, (1, 3, 5), (2, 8, 8)),
    ],
)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(128, 64), (8, 24), (40, 128), (64, 48), (192, 136), (64, 256)])
def test_tiles_and_windows_that_do_not_divide_the_layout(
    layout: tuple[int, ...],
    windows: dict[str, Any],
    q_tile: tuple[int, ...],
    kv_tile: tuple[int, ...],
    head_dim: int,
    head_dim_v: int,
) -> None:
    if max(head_dim, head_dim_v) > 128:  # whose kernel takes half as many keys at once
        kv_tile = (*kv_tile[:-1], kv_tile[-1] // 2)
    arrays = arrays_of(layout, 4, 2, head_dim, head_dim_v)
    results = gradients(arrays, **windows, backward_q_tile_shape=q_tile, backward_kv_tile_shape=kv_tile)
    assert_gradients(results, arrays, windows)


def test_batches_may_be_larger_than_a_grid_is_high() -> None:
    arrays = arrays_of((8,), 2, 1, 64, 64, batch=65_537)  # CUDA's grids are at most 65,535 blocks high
    results = gradients(arrays, kernel_size=(3,))
    assert_gradients([each[-2:] for each in results], [each[-2:] for each in arrays], {"kernel_size": (3,)})


def test_the_reduction_may_be_left_to_xla() -> None:
    arrays = arrays_of((40, 24), 4, 4, 64, 64)
    kernel, xla = (gradients(arrays, kernel_size=7, backward_use_xla_reduction=each) for each in (False, True))
    for one, other in zip(kernel, xla, strict=True):
        assert np.linalg.norm(one - other) <= 1e-3 * np.linalg.norm(one)


@pytest.mark.parametrize(
    ("layout", "windows"),
    [
        ((4096,), {"kernel_size": (4096,)}),
        ((4096,), {"kernel_size": (4096,), "is_causal": (True,)}),
        ((5000,), {"kernel_size": (777,), "dilation": (3,)}),
        ((96, 80), {"kernel_size": (25, 19), "stride": (2, 3)}),
        ((18, 20, 33), {"kernel_size": (7, 8, 9), "dilation": (2, 1, 3), "is_causal": (True, False, False)}),
    ],
)
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_gradients_are_the_same_in_every_run(
    layout: tuple[int, ...], windows: dict[str, Any], is_deterministic: bool
) -> None:
    arrays = arrays_of(layout, 6, 3, 128, 72)
    run = differentiate(len(layout), **windows, backward_deterministic=is_deterministic)
    first = run(arrays)
    for _ in range(19):
        # Key and value gradients are in any case.
        for one, other in list(zip(first, run(arrays), strict=True))[0 if is_deterministic else 1 :]:
            np.testing.assert_array_equal(one, other)
