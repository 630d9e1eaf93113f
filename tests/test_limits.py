"""Limits of the native kernels: what the native module exports, and what the Python backends compute with."""

from __future__ import annotations

from typing import Any

import pytest

from natten_jax import native
from natten_jax.backends import cpu, cutlass, hopper, hopper_backward
from natten_jax.cost import calibration
from natten_jax.devices import Device
from natten_jax.problem import problem_of


@pytest.fixture
def limits() -> dict[str, Any]:
    assert native.load_error is None, native.load_error
    from natten_jax import _native

    exported: dict[str, Any] = _native.limits()
    return exported


def test_every_build_has_all_limits(limits: dict[str, Any]) -> None:
    assert limits.keys() == {"cpu", "sm80", "sm90"}


def test_cpu_tiles(limits: dict[str, Any]) -> None:
    assert limits["cpu"] == {"tile_tokens": cpu._LARGEST_TILE}


def test_hopper_heads(limits: dict[str, Any]) -> None:
    assert limits["sm90"]["forward_head_dim_step"] == hopper.HopperBackend.head_dim_step
    assert limits["sm90"]["backward_head_dim_step"] == hopper._HEAD_DIM_CHUNK
    assert limits["sm90"]["largest_head_dim"] == hopper.HopperBackend.largest_head_dim


def test_hopper_tiles(limits: dict[str, Any]) -> None:
    forms: dict[int, set[tuple[int, int]]] = {}
    for form in limits["sm90"]["forward"]:
        forms.setdefault(form["head_dim"], set()).add((form["q_tile_tokens"], form["kv_tile_tokens"]))
    assert forms == {head_dim: set(tiles) for head_dim, tiles in hopper._FORWARD_TILES.items()}
    for form in limits["sm90"]["backward"]:
        tiles = form["q_tile_tokens"], form["kv_tile_tokens"]
        assert hopper_backward.tile_tokens(form["head_dim"]) == tiles


def test_hopper_rounds(limits: dict[str, Any]) -> None:
    assert limits["sm90"]["tiles_worth_counting"] == calibration._COUNTED_ROUNDS


def test_cutlass_heads(limits: dict[str, Any]) -> None:
    assert limits["sm80"]["head_dim_step"] == cutlass.CutlassBackend.head_dim_step
    assert limits["sm80"]["largest_head_dim"] == cutlass.CutlassBackend.largest_head_dim
    assert limits["sm80"]["wide_form_capabilities"] == list(cutlass._WIDE_FORM_CAPABILITIES)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cutlass_tiles(limits: dict[str, Any], dtype: str, capability: tuple[int, int]) -> None:
    table = limits["sm80"]
    is_wide = capability[0] in table["wide_form_capabilities"]
    for head_dim in (8, 64, 72, 128, 136, 256):
        of_dtype = [form for form in table["forward"] if form["element_bytes"] == (4 if dtype == "float32" else 2)]
        narrowest = min(form["head_dim"] for form in of_dtype if form["head_dim"] >= head_dim)
        most_queries = max(
            form["q_tile_tokens"]
            for form in of_dtype
            if form["head_dim"] == narrowest and (is_wide or form["shared_memory"] <= table["least_shared_memory"])
        )
        device = Device("cuda", capability, is_present=False)
        assert cutlass._q_tile_tokens(problem_of((64,), 8, head_dim=head_dim, dtype=dtype), device) == most_queries
    assert {form["kv_tile_tokens"] for form in table["forward"]} == {cutlass._LARGEST_TILE}


def test_cutlass_backward_tiles(limits: dict[str, Any]) -> None:
    tiles = {(form["q_tile_tokens"], form["kv_tile_tokens"]) for form in limits["sm80"]["backward"]}
    assert tiles == {(cutlass._LARGEST_TILE, cutlass._LARGEST_TILE)}
