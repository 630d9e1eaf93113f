"""Compile programs for several TPUs, with explicit, manual and automatic mesh axes."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import natten_jax
from tests.tpu.compiler import devices_of
from tests.tpu.test_compiled import KERNELS

pytest.importorskip("libtpu", reason="the compiler for TPUs is not installed: make test-tpu has it")

HEADS, TOKENS = PartitionSpec("x", None, None, "y"), PartitionSpec(None, "x", "y")


def gradient(backend: str, token_axes: tuple[str, ...] | None = None) -> Callable[[jax.Array], jax.Array]:
    def total(x: jax.Array) -> jax.Array:
        out = natten_jax.na2d(x, x, x, 7, backend=backend, token_axes=token_axes)
        return jnp.sum(out.astype(jnp.float32))

    return jax.grad(total)


def text_of(function: Callable[[jax.Array], jax.Array], mesh: Mesh, spec: PartitionSpec) -> str:
    """Return the text of the compiled program, which all devices run."""
    x = jax.ShapeDtypeStruct((2, 32, 64, 2, 64), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        text = jax.jit(function).trace(x).lower(lowering_platforms=("tpu",)).compile().as_text()
    assert text is not None
    return text


def mesh_of(kind: AxisType) -> Mesh:
    return Mesh(np.asarray(devices_of("v5e")).reshape(2, 2), ("x", "y"), axis_types=(kind,) * 2)


def kernels(text: str) -> list[bool]:
    return [re.search(rf"%{name}[.\d]* = ", text) is not None for name in KERNELS]


@pytest.mark.parametrize("spec", [HEADS, TOKENS], ids=["heads", "tokens"])
def test_explicit_axes(spec: PartitionSpec) -> None:
    text = text_of(gradient("tpu-fna"), mesh_of(AxisType.Explicit), spec)
    assert kernels(text) == [True] * 3
    assert "all-gather" not in text and ("collective-permute-start(" in text) == (spec is TOKENS)


def test_manual_axes_and_halos() -> None:
    mesh = mesh_of(AxisType.Auto)
    local = jax.shard_map(gradient("tpu-fna", ("x", "y")), mesh=mesh, in_specs=TOKENS, out_specs=TOKENS)
    text = text_of(local, mesh, TOKENS)
    assert kernels(text) == [True] * 3
    assert "all-gather" not in text and "collective-permute-start(" in text


def test_auto_axes_split_plain_jax() -> None:
    text = text_of(gradient("flex-fna"), mesh_of(AxisType.Auto), HEADS)
    assert "bf16[1,32,64,1,64]" in text and "all-gather" not in text


def test_auto_axes_do_not_split_kernels() -> None:
    with pytest.raises(ValueError, match="tpu-fna cannot be split over mesh axes of type Auto"):
        text_of(gradient("tpu-fna"), mesh_of(AxisType.Auto), HEADS)
