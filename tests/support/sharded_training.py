"""Train two attention layers with ``flax.nnx`` on one device, or sharded over a mesh.

If the mesh has an axis ``model``, parameters are annotated so that heads are split over this axis. The second layer has
only one key/value head, so its key/value parameters are replicated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx as flax_nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from natten_jax.flax_modules import nnx

from tests.support.problems import QUICK_COMPILATION

FEATURES, HEADS, KV_HEADS = 16, 4, (2, 1)
SHAPE = (8, 12, FEATURES)  # [batch, seqlen, features]
STEPS = 2

PutArrays = Callable[[np.ndarray], jax.Array]


@dataclasses.dataclass(frozen=True)
class Trained:
    """Results of training: the loss of each step, the parameters by name, and the text of the compiled step."""

    losses: list[float]
    params: dict[str, jax.Array]
    program: str

    def collectives(self) -> set[str]:
        """Return the kinds of collectives in a step."""
        kinds = "all-gather", "all-reduce", "all-to-all", "collective-permute", "collective-broadcast", "reduce-scatter"
        return set(re.findall(rf" ({'|'.join(kinds)})(?:-start)?\(", self.program))


def placed_by_processes(mesh: Mesh) -> PutArrays:
    """Return a function that puts a batch on the mesh. Each process provides only its part of the batch."""

    def place(array: np.ndarray) -> jax.Array:
        own = np.split(array, jax.process_count())[jax.process_index()]
        return jax.make_array_from_process_local_data(_over_data(mesh), own)

    return place


def _over_data(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec("data"))


class Stack(flax_nnx.Module):
    """Layers with the given numbers of key/value heads, and sharding annotations if ``is_sharded``."""

    def __init__(self, kv_heads: tuple[int, ...], is_sharded: bool) -> None:
        rngs = flax_nnx.Rngs(0)

        def named(*names: str | None) -> dict[str, Any]:
            return {"out_sharding": names} if is_sharded else {}

        def layer(kv_heads: int) -> nnx.NeighborhoodAttention1D:
            is_whole = kv_heads != KV_HEADS[0]
            return nnx.NeighborhoodAttention1D(
                FEATURES,
                num_heads=HEADS,
                num_kv_heads=kv_heads,
                kernel_size=5,
                kernel_metadata=named(None, "model", None),
                bias_metadata=named("model", None),
                out_kernel_metadata=named("model", None, None),
                out_bias_metadata={},
                bias_init=flax_nnx.initializers.normal(0.1),  # nonzero, so that biases matter
                rngs=rngs,
                **({"kv_kernel_metadata": {}, "kv_bias_metadata": {}} if is_whole else {}),
            )

        self.layers = flax_nnx.List(map(layer, kv_heads))

    def __call__(self, tokens: jax.Array, out_sharding: Any) -> jax.Array:
        for layer in self.layers:
            tokens = tokens + layer(tokens, out_sharding=out_sharding)
        return tokens


def train_nnx(mesh: Mesh | None = None, place: PutArrays | None = None, layers: int = len(KV_HEADS)) -> Trained:
    """Train the layers. Without a mesh, train on one device and without annotations."""
    is_explicit = mesh is not None and mesh.are_all_axes_explicit
    out_sharding = PartitionSpec("data", None, None) if is_explicit else None
    if place is None:
        place = jnp.asarray if mesh is None else functools.partial(jax.device_put, device=_over_data(mesh))

    def create() -> tuple[Stack, flax_nnx.Optimizer[Any]]:
        model = Stack(KV_HEADS[:layers], mesh is not None and "model" in mesh.axis_names)
        return model, flax_nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=flax_nnx.Param)

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        graph = flax_nnx.graphdef(flax_nnx.eval_shape(create))
        state = jax.jit(lambda: flax_nnx.state(create()), compiler_options=QUICK_COMPILATION)()

        def step(state: Any, inputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, Any]:
            def loss_of(model: Stack) -> jax.Array:
                return jnp.square(model(inputs, out_sharding) - targets).mean()

            model, optimizer = flax_nnx.merge(graph, state)
            loss, gradients = flax_nnx.value_and_grad(loss_of)(model)
            optimizer.update(model, gradients)
            return loss, flax_nnx.state((model, optimizer))

        rng, losses = np.random.default_rng(0), []
        batches = rng.standard_normal((STEPS, 2, *SHAPE)).astype(np.float32)
        inputs, targets = map(place, batches[0])
        compiled = jax.jit(step, compiler_options=QUICK_COMPILATION).lower(state, inputs, targets).compile()
        for batch in batches:
            loss, state = compiled(state, *map(place, batch))
            losses.append(float(loss))
    leaves = jax.tree_util.tree_leaves_with_path(flax_nnx.to_pure_dict(state[0]))
    params = {".".join(str(getattr(key, "key", key)) for key in path): leaf for path, leaf in leaves}
    return Trained(losses, params, compiled.as_text() or "")
