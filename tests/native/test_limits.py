"""Limits of the kernels that the native module reports, and tile sizes that backends offer within these limits."""

from __future__ import annotations

from typing import Any

import pytest

from natten_jax import backends, simulator
from natten_jax.native import module as native
from natten_jax.performance import PASSES, Pass
from natten_jax.plan.devices import Device

HOPPER = Device("cuda", (9, 0), is_present=False)


def most_tokens(name: str, head_dim: int, pass_: Pass, dtype: str, device: Device) -> tuple[int, int]:
    """Return the sizes in tokens of the largest query tile and the largest key/value tile that a backend offers."""
    problem = simulator.problem_of((1024,), 8, head_dim=head_dim, dtype=dtype)
    backend = backends.find(f"{name}-fna", "fna")
    assert backend.rejection(problem, device, pass_) is None

    def offered(queries: int, keys: int) -> bool:
        return backend.offers(problem, device, pass_, ((queries,), (keys,)))

    return (
        max(tokens for tokens in range(1, 1025) if offered(tokens, 1)),
        max(tokens for tokens in range(1, 1025) if offered(1, tokens)),
    )


def test_every_build_has_all_limits() -> None:
    assert native.load_error is None
    for architecture in ("cpu", "sm80", "sm90"):
        assert native.limits(architecture)
    assert native.limits("cpu") == {"tile_tokens": 4096, "table_entries": 1 << 25}


@pytest.mark.parametrize(
    ("head_dim", "forward", "backward"),
    [(8, (192, 128), (64, 128)), (64, (192, 128), (64, 128)), (72, (128, 128), (64, 128)), (128, (128, 128), (64, 128)),
     (136, (128, 96), (64, 64)), (192, (128, 96), (64, 64)), (200, (128, 64), (64, 64)), (256, (128, 64), (64, 64))],
)  # fmt: skip
def test_hopper_tiles(head_dim: int, forward: tuple[int, int], backward: tuple[int, int]) -> None:
    for pass_, expected in zip(PASSES, (forward, backward), strict=True):
        assert most_tokens("hopper", head_dim, pass_, "bfloat16", HOPPER) == expected


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "queries"),
    [("bfloat16", 64, 128), ("bfloat16", 72, None), ("float16", 128, None), ("bfloat16", 136, 64), ("float32", 64, 128),
     ("float32", 72, 64), ("float32", 256, 64)],
)  # fmt: skip
def test_portable_tiles(capability: tuple[int, int], dtype: str, head_dim: int, queries: int | None) -> None:
    """``queries`` is the size of the largest query tile.

    ``None`` means 256 if an SM has enough shared memory, otherwise 128.
    """
    device = Device("cuda", capability, is_present=False)
    queries = queries or (256 if capability[0] in (9, 10) else 128)
    assert most_tokens("cutlass", head_dim, "forward", dtype, device) == (queries, 128)
    assert most_tokens("cutlass", head_dim, "backward", dtype, device) == (128, 128)


@pytest.mark.parametrize("name", ["hopper", "cutlass"])
@pytest.mark.parametrize("head_dim", [257, 264])
def test_heads_that_no_kernel_is_compiled_for(name: str, head_dim: int) -> None:
    problem = simulator.problem_of((1024,), 8, head_dim=head_dim)
    reason = backends.find(f"{name}-fna", "fna").rejection(problem, HOPPER, "forward")
    assert reason == f"head_dim must be at most 256, not {head_dim}"


def test_the_time_model_counts_rounds_as_the_kernel_does() -> None:
    calibration: Any = simulator.calibration_for("hopper")
    assert calibration.counted_rounds == native.limits("sm90")["tiles_worth_counting"]


@pytest.mark.parametrize("name", ["hopper", "cutlass"])
@pytest.mark.parametrize("head_dims", [(512, 64), (64, 264)])
def test_heads_without_kernels_have_no_tiles(name: str, head_dims: tuple[int, int]) -> None:
    problem = simulator.problem_of((64,), 8, head_dim=head_dims[0], head_dim_v=head_dims[1], dtype="bfloat16")
    backend = backends.find(f"{name}-fna", "fna")
    rule = rf"{name} has no tiles for these heads: head_dim(_v)? must be at most 256, not {max(head_dims)}"
    for pass_ in PASSES:
        with pytest.raises(ValueError, match=rule):
            backend.capabilities.largest_tiles(problem, HOPPER, pass_)
        with pytest.raises(ValueError, match=rule):
            backend.tile_pairs(problem, HOPPER, pass_)
        with pytest.raises(ValueError, match=rule):
            backend.offers(problem, HOPPER, pass_, ((8,), (8,)))
