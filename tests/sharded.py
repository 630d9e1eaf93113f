"""Operators on arrays that are split over a mesh of eight devices, in a process of its own.

``python -c "import sharded; sharded.main()" MODE WHAT`` prints a line of JSON for each split and function: the
collectives of the compiled program, how the results are split, and how far they are from one device's.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from problems import QUICK_COMPILATION

import natten_jax

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
    """How a call's arrays are split over the mesh axes ``x`` (four devices) and ``y`` (two)."""

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
#: Inside ``jax.shard_map`` callers split key/value heads as query heads.
LOCAL_SPLITS = ("batch", "batch over both axes", "heads", "both", "both, axes exchanged", "groups", "nothing")


def operators(what: str) -> dict[str, Callable[..., Any]]:
    """The functions of ``[batch, tokens, heads, head_dim]`` arrays to try; each returns output and logsumexp."""
    if what == "merge":
        return {"merge": lambda q, k, v: natten_jax.merge_attentions([q, 2 * q], [q[..., 0], q[..., 1]])}
    if what.startswith("attention"):
        backend = what.partition(" ")[2]
        tiles = {"q_tile_size": 16, "kv_tile_size": 16} if backend.startswith("cpu") else {}
        operator = functools.partial(natten_jax.attention, backend=backend, return_lse=True, **tiles)
        return {"attention": operator}
    tiles = {"q_tile_shape": (2, 4), "kv_tile_shape": (4, 6)} if what.startswith("cpu") else {}

    def neighborhood(query: Any, key: Any, value: Any) -> Any:
        arrays = [array.reshape(array.shape[0], 5, 6, *array.shape[2:]) for array in (query, key, value)]
        extra = key[:, :3], value[:, :3]
        out, lse = natten_jax.na2d(
            *arrays, (3, 4), stride=(1, 2), is_causal=(True, False), additional_keys=extra[0],
            additional_values=extra[1], backend=what, return_lse=True, **tiles,
        )  # fmt: skip
        return out.reshape((*query.shape[:-1], out.shape[-1])), lse.reshape(query.shape[:-1])

    return {"neighborhood": neighborhood}


def functions(operator: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """What is done with an operator."""

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


def collectives(compiled: jax.stages.Compiled) -> dict[str, int]:
    """How many there are of each kind in a program."""
    text = compiled.as_text() or ""
    counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in COLLECTIVES}
    return {kind: count for kind, count in counts.items() if count}


def wrapped(mode: str, mesh: Any, split: Split, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as users of the mode write it."""
    if "Manual" not in mode:
        return function
    names = {"x"} if mode == "Auto+Manual" else {"x", "y"}

    def manual(spec: P) -> P:
        kept = [tuple(name for name in axis if name in names) if isinstance(axis, tuple) else axis for axis in spec]
        return P(*(axis if isinstance(axis, tuple) or axis in names else None for axis in kept))

    query, key = manual(split.query()), manual(split.key())
    shapes = jax.eval_shape(function, *arrays_of(split))
    leaves = jax.tree.leaves(shapes)
    mapped = leaves[0].ndim == 5

    def out(shape: Any, position: int) -> P:
        spec = (key if position else query) if len(shapes) == 3 else query
        spec = P(*(None,) * mapped, *spec)
        return P(*tuple(spec)[: shape.ndim])

    specs = [out(leaf, position) for position, leaf in enumerate(leaves)]
    out_specs = jax.tree.unflatten(jax.tree.structure(shapes), specs)
    return jax.shard_map(function, mesh=mesh, in_specs=(query, key, key), out_specs=out_specs, axis_names=names)


def check(mode: str, mesh: Any, name: str, what: str) -> None:
    """Run everything on one split and print what was found."""
    split = SPLITS[name]
    arrays = arrays_of(split)
    specs = [split.query(), split.key(), split.key()]
    placed = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs, strict=True)]
    for operator in operators(what).values():
        for kind, function in functions(operator).items():
            expected = jax.jit(function, compiler_options=QUICK_COMPILATION)(*arrays)
            compiled = (
                jax.jit(wrapped(mode, mesh, split, function)).lower(*placed).compile(compiler_options=QUICK_COMPILATION)
            )
            found = compiled(*placed)
            distances = [
                float(np.max(np.abs(np.asarray(one) - np.asarray(other))))
                for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
            ]
            shards = [list(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(found)]
            print(
                json.dumps(
                    {
                        "split": name, "kind": kind, "distances": distances, "collectives": collectives(compiled),
                        "shards": shards,
                    }
                ),
                flush=True,
            )  # fmt: skip
            jax.clear_caches()


def main() -> None:
    mode, what = sys.argv[1:3]
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=TYPES[mode])
    names = LOCAL_SPLITS if "Manual" in mode else SPLITS
    for name in names:
        if "Explicit" in mode or name == "nothing":
            with jax.set_mesh(mesh):
                check(mode, mesh, name, what)
        else:
            check(mode, mesh, name, what)
