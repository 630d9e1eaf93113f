"""Operators on sharded arrays: no array is gathered, and results are sharded and equal the results on one device."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import natten_jax
from natten_jax.native import module as native
from tests.support.meshes import put
from tests.support.problems import QUICK_COMPILATION

OPERATORS = ("cpu-fna", "cpu-fmha", "flex-fna", "flex-fmha", "merge")
#: Plain attention is tested in fewer modes, because it uses the code path of neighborhood attention.
ATTENTION_MODES = ("Auto", "Explicit", "Auto+Manual")
#: Splits in which several devices use the same key/value head. The head's gradients are summed over these devices.
REDUCING = ("groups that are split", "groups across parts", "one key/value head")
COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter")
BATCH = 8
TYPES = {
    "Auto": (AxisType.Auto, AxisType.Auto),
    "Explicit": (AxisType.Explicit, AxisType.Explicit),
    "Manual": (AxisType.Auto, AxisType.Auto),
    "Auto+Manual": (AxisType.Auto, AxisType.Auto),
    "Explicit+Auto": (AxisType.Explicit, AxisType.Auto),
    "Auto+Explicit": (AxisType.Auto, AxisType.Explicit),
}


class Split(NamedTuple):
    """Head counts of a call, and the mesh axes over which its batch and heads are split.

    Mesh axis ``x`` has four devices, ``y`` has two.
    """

    batch: Any
    heads: Any
    num_heads: int
    heads_kv: int
    heads_kv_axes: Any = None

    def query(self) -> P:
        return P(self.batch, None, self.heads, None)

    def key(self) -> P:
        return P(self.batch, None, self.heads_kv_axes, None)


SPLITS = {
    "batch": Split("x", None, 2, 2),
    "batch over both axes": Split(("x", "y"), None, 2, 1),
    "heads": Split(None, "x", 4, 4, "x"),
    "both": Split("x", "y", 4, 4, "y"),
    "both, axes exchanged": Split("y", "x", 4, 4, "x"),
    "groups": Split("x", "y", 8, 2, "y"),
    "groups that are split": Split("y", "x", 8, 2),
    "groups across parts": Split(None, ("x", "y"), 24, 12),
    "one key/value head": Split("y", "x", 4, 1),
    "nothing": Split(None, None, 4, 2),
}
#: FEW contains the splits that are tested with plain JAX, which XLA compiles slowly. THOROUGH contains the splits that
#: are tested with all functions of plain JAX.
FEW = ("both", "groups", "groups that are split")
THOROUGH = ("both", "groups that are split")
THOROUGH_MODES = ("Auto", "Explicit", "Manual", "Auto+Manual")
#: Functions that return gradients of query, key and value.
GRADIENTS = ("gradient", "vmap", "remat")


def splits_of(mode: str, what: str) -> list[str]:
    """Return the names of the splits to test for an operator in a mode."""
    if what.startswith("flex"):
        return [name for name in splits_of(mode, what.replace("flex", "cpu")) if name in FEW]
    if what == "merge":
        return ["both", "one key/value head", "nothing"] if "Manual" not in mode else ["both", "nothing"]
    if "Manual" in mode:  # inside shard_map, heads and key/value heads have the same split
        return [name for name, split in SPLITS.items() if split.heads in (None, split.heads_kv_axes)]
    if mode == "Auto+Explicit":  # array types list y (explicit) before x (automatic)
        return [name for name, split in SPLITS.items() if not isinstance(split.batch or split.heads, tuple)]
    return list(SPLITS)


def operator_of(what: str, backend: str) -> Callable[..., Any]:
    """Return a function of ``[batch, tokens, heads, head_dim]`` arrays that returns output and logsumexp."""
    if what == "merge":
        return lambda q, k, v: natten_jax.merge_attentions([q, 2 * q], [q[..., 0], q[..., 1]])
    if what.endswith("fmha"):
        # The default tiles depend on the batch size.
        tiles = {"q_tile_size": 16, "kv_tile_size": 16} if what.startswith("cpu") else {}
        return functools.partial(natten_jax.attention, backend=backend, return_lse=True, **tiles)
    if what.startswith("flex"):
        return lambda q, k, v: natten_jax.na1d(q, k, v, 5, stride=2, backend=backend, return_lse=True)

    def neighborhood(query: Any, key: Any, value: Any) -> Any:
        q, k, v = (array.reshape(array.shape[0], 5, 6, *array.shape[2:]) for array in (query, key, value))
        out, lse = natten_jax.na2d(
            q, k, v, (3, 4), stride=(1, 2), is_causal=(True, False), additional_keys=key[:, :3],
            additional_values=value[:, :3], backend=backend, return_lse=True,
            q_tile_shape=(2, 4), kv_tile_shape=(4, 6),
        )  # fmt: skip
        return out.reshape(*query.shape[:-1], -1), lse.reshape(query.shape[:-1])

    return neighborhood


def functions(operator: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Return the functions to test by name: the operator itself, its gradient, and transformations of both."""

    def loss(query: Any, key: Any, value: Any) -> Any:
        out, lse = operator(query, key, value)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

    gradient = jax.grad(loss, argnums=(0, 1, 2))

    def scanned(query: Any, key: Any, value: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (operator(carry, key, value)[0], None), query, length=2)[0]

    def mapped(*arrays: Any) -> Any:
        return jax.vmap(gradient)(*(jnp.stack([array, array + 1]) for array in arrays))

    return {
        "forward": operator,
        "gradient": gradient,
        "vmap": mapped,
        "remat": jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2)),
        "scan": scanned,
    }


def arrays_of(split: Split) -> list[jax.Array]:
    generator = np.random.default_rng(0)
    shapes = [(BATCH, 30, heads, 8) for heads in (split.num_heads, split.heads_kv, split.heads_kv)]
    return [jnp.asarray(generator.standard_normal(shape), "float32") for shape in shapes]


def collectives(compiled: jax.stages.Compiled) -> set[str]:
    """Return the kinds of collectives that a program contains."""
    text = compiled.as_text() or ""
    return {kind for kind in COLLECTIVES if re.search(rf" {kind}(?:-start)?\(", text)}


ALL_KINDS = ("forward", "gradient", "vmap", "remat", "scan")


def kinds_of(mode: str, name: str, what: str) -> tuple[str, ...]:
    """Return the functions to test, by name: for most splits with plain JAX, only the first two of ``ALL_KINDS``."""
    is_quick = not what.startswith("flex") or (name in THOROUGH and what == "flex-fna" and mode in THOROUGH_MODES)
    return ALL_KINDS if is_quick else ALL_KINDS[:2]


def all_of(what: str, kinds: tuple[str, ...], backend: str | None = None) -> Callable[..., dict[str, Any]]:
    """Return a function that calls the functions ``kinds`` of an operator, and returns their results by name."""
    each = functions(operator_of(what, backend or what))
    return lambda *arrays: {kind: each[kind](*arrays) for kind in kinds}


def within_shard_map(mode: str, mesh: Any, split: Split, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function in ``shard_map`` over the mesh axes that are manual in this mode."""
    names = {"x"} if mode == "Auto+Manual" else {"x", "y"}

    def manual(axis: Any) -> Any:
        kept = tuple(name for name in (axis if isinstance(axis, tuple) else (axis,)) if name in names)
        return kept or None

    query, key = (P(*map(manual, spec)) for spec in (split.query(), split.key()))
    shapes = jax.eval_shape(function, *arrays_of(split))

    def out(kind: str, position: int, shape: Any) -> P:
        is_key = kind in GRADIENTS and position > 0
        mapped = (None,) if kind == "vmap" else ()
        return P(*(*mapped, *(key if is_key else query))[: shape.ndim])

    specs = {
        kind: jax.tree.unflatten(
            jax.tree.structure(shape), [out(kind, i, each) for i, each in enumerate(jax.tree.leaves(shape))]
        )
        for kind, shape in shapes.items()
    }
    return jax.shard_map(function, mesh=mesh, in_specs=(query, key, key), out_specs=specs, axis_names=names)


@functools.cache
def single_device_result(name: str, what: str, kinds: tuple[str, ...]) -> Any:
    """Return the results on a single device. All modes are compared with these results, so they are cached."""
    # The reference for plain JAX is the CPU kernels or, in a build without them, plain JAX on a single device.
    reference = what if native.path() is None else what.replace("flex", "cpu")
    return jax.jit(all_of(what, kinds, reference), compiler_options=QUICK_COMPILATION)(*arrays_of(SPLITS[name]))


SIZES = {"x": 4, "y": 2}


def shard_of(split: Split, shape: tuple[int, ...], is_mapped: bool, is_key: bool) -> tuple[int, ...]:
    """Return the shape of each device's shard of a result."""
    shard = list(shape)
    for dimension, axes in ((0, split.batch), (2, split.heads_kv_axes if is_key else split.heads)):
        for name in axes if isinstance(axes, tuple) else (axes,):
            shard[int(is_mapped) + dimension] //= SIZES.get(name, 1)
    return tuple(shard)


def check(mode: str, mesh: Mesh, name: str, what: str) -> None:
    """Compare an operator's functions on split arrays with their results on a single device."""
    split, kinds = SPLITS[name], kinds_of(mode, name, what)
    specs = [split.query(), split.key(), split.key()]
    placed = [put(array, mesh, *spec) for array, spec in zip(arrays_of(split), specs, strict=True)]
    function = all_of(what, kinds)
    if "Manual" in mode:
        function = within_shard_map(mode, mesh, split, function)
    compiled = jax.jit(function).lower(*placed).compile(compiler_options=QUICK_COMPILATION)
    allowed = {"all-reduce"} if name in REDUCING and what != "merge" else set()
    assert collectives(compiled) <= allowed, (mode, name)
    found, expected = compiled(*placed), single_device_result(name, what, kinds)
    for kind in found:
        pairs = zip(jax.tree.leaves(found[kind]), jax.tree.leaves(expected[kind]), strict=True)
        for position, (one, other) in enumerate(pairs):
            is_bitwise = kind in ("forward", "scan") and what.startswith("cpu")
            note = f"{mode} {name} {kind} {position}"
            np.testing.assert_allclose(one, other, rtol=0, atol=0 if is_bitwise else 2e-5, err_msg=note)
            is_key = kind in GRADIENTS and position > 0
            if not (is_key and what == "merge"):  # merging reads no keys
                assert one.sharding.shard_shape(one.shape) == shard_of(split, one.shape, kind == "vmap", is_key), note


def is_core(what: str, mode: str) -> bool:
    """Return True for the combinations that every run tests. Only a full run tests the others."""
    return (
        mode in ("Auto", "Explicit", "Auto+Manual")
        and not what.endswith("fmha")
        and (mode, what) != ("Auto+Manual", "flex-fna")
    )


@pytest.mark.parametrize(
    ("what", "mode"),
    [
        pytest.param(what, mode, marks=[] if is_core(what, mode) else pytest.mark.slow, id=f"{what}-{mode}")
        for what in OPERATORS
        for mode in TYPES
        if mode in ATTENTION_MODES or not what.endswith("fmha")
    ],
)
def test_batch_and_heads_stay_split(what: str, mode: str) -> None:
    """Test forward pass, gradients, the logsumexp's gradient, vmap, remat and scan."""
    mesh = jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=TYPES[mode])
    for name in splits_of(mode, what):
        with jax.set_mesh(mesh) if "Explicit" in mode or name == "nothing" else contextlib.nullcontext():
            check(mode, mesh, name, what)
