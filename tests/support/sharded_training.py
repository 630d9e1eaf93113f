"""Training of two layers of attention, in nnx and in linen: on one device, or split over a mesh.

They are annotated for a mesh with an axis ``model``, over which heads are split. The second layer has fewer key and
value heads than that axis has devices, so these are on every device.
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
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from natten_jax.flax_modules import linen, nnx

from tests.support.problems import QUICK_COMPILATION

FEATURES, HEADS, KV_HEADS = 16, 4, (2, 1)
SHAPE = (8, 12, FEATURES)  # [batch, seqlen, features]
STEPS = 2

#: Names of mesh axes of all annotated parameters.
KERNEL, BIAS, OUT_KERNEL = (None, "model", None), ("model", None), ("model", None, None)

kernel_init = flax_linen.initializers.lecun_normal()
# Biases that are not zero, so that they matter.
bias_init = flax_linen.initializers.normal(0.1)

Place = Callable[[np.ndarray], jax.Array]


@dataclasses.dataclass(frozen=True)
class Trained:
    """What training came to: a loss per step, parameters by name, and the compiled step."""

    losses: list[float]
    params: dict[str, jax.Array]
    program: str

    def collectives(self) -> set[str]:
        """What devices exchange in a step."""
        kinds = "all-gather", "all-reduce", "all-to-all", "collective-permute", "collective-broadcast", "reduce-scatter"
        return set(re.findall(rf" ({'|'.join(kinds)})(?:-start)?\(", self.program))


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs and targets of every step."""
    random = np.random.default_rng(0)
    return [tuple(random.standard_normal((2, *SHAPE)).astype(np.float32)) for _ in range(STEPS)]


def placed_on(mesh: Mesh | None) -> Place:
    """What puts a batch on the mesh's devices."""
    return jnp.asarray if mesh is None else functools.partial(jax.device_put, device=_over_data(mesh))


def placed_by_processes(mesh: Mesh) -> Place:
    """The same where every process has only its own part of a batch."""

    def place(array: np.ndarray) -> jax.Array:
        own = np.split(array, jax.process_count())[jax.process_index()]
        return jax.make_array_from_process_local_data(_over_data(mesh), own)

    return place


def _over_data(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec("data"))


def on(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def train(
    step: Callable[..., tuple[jax.Array, Any]], state: Any, place: Place, named: Callable[[Any], dict[str, jax.Array]]
) -> Trained:
    """Run all steps of ``step(state, inputs, targets) -> loss, state``."""
    compiled, losses = None, []
    for inputs, targets in batches():
        arguments = state, place(inputs), place(targets)
        if compiled is None:
            compiled = jax.jit(step, compiler_options=QUICK_COMPILATION).lower(*arguments).compile()
        loss, state = compiled(*arguments)
        losses.append(float(loss))
    assert compiled is not None
    return Trained(losses, named(state), compiled.as_text() or "")


def optimizer() -> optax.GradientTransformation:
    return optax.sgd(0.1, momentum=0.9)


def nnx_layer(kv_heads: int, sharded: bool, rngs: flax_nnx.Rngs, settings: dict[str, Any]) -> Any:
    """A layer for ``flax.nnx``; ``sharded`` annotates its parameters."""

    def named(*names: str | None) -> dict[str, Any]:
        return {"out_sharding": names} if sharded else {}

    whole: dict[str, Any] = {} if kv_heads == KV_HEADS[0] else {"kv_kernel_metadata": {}, "kv_bias_metadata": {}}
    return nnx.NeighborhoodAttention1D(
        FEATURES,
        num_heads=HEADS,
        num_kv_heads=kv_heads,
        kernel_metadata=named(*KERNEL),
        bias_metadata=named(*BIAS),
        out_kernel_metadata=named(*OUT_KERNEL),
        out_bias_metadata={},
        bias_init=bias_init,
        rngs=rngs,
        **whole,
        **settings,
    )


class NnxStack(flax_nnx.Module):
    def __init__(self, layers: int, sharded: bool, settings: dict[str, Any]) -> None:
        rngs = flax_nnx.Rngs(0)
        self.layers = flax_nnx.List([nnx_layer(heads, sharded, rngs, settings) for heads in KV_HEADS[:layers]])

    def __call__(self, tokens: jax.Array, out_sharding: Any = None) -> jax.Array:
        for layer in self.layers:
            tokens = tokens + layer(tokens, out_sharding=out_sharding)
        return tokens


def train_nnx(
    mesh: Mesh | None = None, place: Place | None = None, layers: int = len(KV_HEADS), **settings: Any
) -> Trained:
    """Train with ``flax.nnx``; without a mesh, on one device and with no annotation."""
    is_explicit = mesh is not None and mesh.are_all_axes_explicit
    out_sharding = PartitionSpec("data", None, None) if is_explicit else None

    def create() -> tuple[NnxStack, flax_nnx.Optimizer[Any]]:
        sharded = mesh is not None and "model" in mesh.axis_names
        model = NnxStack(layers, sharded, {"kernel_size": 5, **settings})
        return model, flax_nnx.Optimizer(model, optimizer(), wrt=flax_nnx.Param)

    with on(mesh):
        graph = flax_nnx.graphdef(flax_nnx.eval_shape(create))
        state = jax.jit(lambda: flax_nnx.state(create()), compiler_options=QUICK_COMPILATION)()

        def step(state: Any, inputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, Any]:
            def loss_of(model: NnxStack) -> jax.Array:
                return jnp.square(model(inputs, out_sharding) - targets).mean()

            model, optimizer = flax_nnx.merge(graph, state)
            loss, gradients = flax_nnx.value_and_grad(loss_of)(model)
            optimizer.update(model, gradients)
            return loss, flax_nnx.state((model, optimizer))

        def named(state: Any) -> dict[str, jax.Array]:
            return by_name(flax_nnx.to_pure_dict(state[0]))

        return train(step, state, place or placed_on(mesh), named)


class LinenStack(flax_linen.Module):
    """The same layers for ``flax.linen``."""

    sharded: bool
    settings: tuple[tuple[str, Any], ...]

    @flax_linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        def named(initializer: Any, *names: str | None) -> Any:
            return flax_linen.with_partitioning(initializer, names) if self.sharded else initializer

        for number, kv_heads in enumerate(KV_HEADS):
            is_whole = kv_heads != KV_HEADS[0]
            layer = linen.NeighborhoodAttention1D(
                num_heads=HEADS,
                num_kv_heads=kv_heads,
                kernel_init=named(kernel_init, *KERNEL),
                bias_init=named(bias_init, *BIAS),
                kv_kernel_init=kernel_init if is_whole else None,
                kv_bias_init=bias_init if is_whole else None,
                out_kernel_init=named(kernel_init, *OUT_KERNEL),
                out_bias_init=bias_init,
                name=f"layer_{number}",
                **dict(self.settings),
            )
            tokens = tokens + layer(tokens)
        return tokens


def train_linen(mesh: Mesh | None = None, place: Place | None = None, **settings: Any) -> Trained:
    """Train with ``flax.linen``; without a mesh, on one device and with no annotation."""
    model = LinenStack(mesh is not None, tuple({"kernel_size": 5, **settings}.items()))

    def initialize(key: jax.Array, inputs: jax.Array) -> tuple[Any, Any]:
        variables = model.init(key, inputs)
        return variables, optimizer().init(variables)

    def step(state: Any, inputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, Any]:
        def loss_of(variables: Any) -> jax.Array:
            outputs: Any = model.apply(variables, inputs)
            return jnp.square(outputs - targets).mean()

        variables, momentum = state
        loss, gradients = jax.value_and_grad(loss_of)(variables)
        updates, momentum = optimizer().update(gradients, momentum)
        return loss, (optax.apply_updates(variables, updates), momentum)

    with on(mesh):
        arguments = jax.random.key(0), jnp.ones(SHAPE)
        shardings = None
        if mesh is not None:
            specs = flax_linen.get_partition_spec(jax.eval_shape(initialize, *arguments))
            shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
        state = jax.jit(initialize, out_shardings=shardings, compiler_options=QUICK_COMPILATION)(*arguments)
        return train(step, state, place or placed_on(mesh), lambda state: by_name(flax_linen.unbox(state[0])))


def by_name(params: Any) -> dict[str, jax.Array]:
    """Leaves by the names that lead to them."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {".".join(str(getattr(key, "key", key)) for key in path): leaf for path, leaf in leaves}
