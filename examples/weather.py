"""Forecast a field that winds carry around a globe, with attention windows that end at the date line or wrap.

The fields are smooth and random, on a grid of latitudes and longitudes. Winds blow eastward at a speed that depends on
the latitude, so the exact future field is known. Two models train on the same fields. The first model cuts windows at
the eastern and western ends of the map, which meet at the date line. The windows of the second model wrap from one end
to the other (``edges``). Then both models forecast several steps: each forecast is the input of the next one. The
program prints root mean square errors; the fields have a standard deviation of 1.

    python examples/weather.py --output weather.png
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from natten_jax.flax_modules.nnx import NeighborhoodAttention2D

matplotlib.use("Agg")  # there may be no display
import matplotlib.pyplot as plt  # import only after matplotlib's backend is set

GRAY = "#7d8896"  # color of text, readable on light and on dark pages
HEAD_DIM = 8
MODES = 24  # number of random waves whose sum is a field
SHORTEST = 5  # largest number of wavelengths around a circle of latitude
EDGES = {"cut": ("cut", "cut"), "wrap": ("cut", "wrap")}


class Block(nnx.Module):
    """Neighborhood attention and an MLP, each with pre-normalization and a residual connection."""

    def __init__(self, features: int, kernel_size: Sequence[int], edges: Sequence[str], rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(features, rngs=rngs)
        self.attention = NeighborhoodAttention2D(
            features,
            num_heads=features // HEAD_DIM,
            kernel_size=kernel_size,
            edges=edges,
            relative_bias=True,  # lets attention prefer a direction, such as upwind
            rngs=rngs,
        )
        self.perceptron_norm = nnx.LayerNorm(features, rngs=rngs)
        self.perceptron = nnx.Sequential(
            nnx.Linear(features, 2 * features, rngs=rngs), nnx.gelu, nnx.Linear(2 * features, features, rngs=rngs)
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        tokens = tokens + self.attention(self.attention_norm(tokens))
        return tokens + self.perceptron(self.perceptron_norm(tokens))


class Forecaster(nnx.Module):
    """Predict the next field from a field ``[batch, latitudes, longitudes]``.

    The input of a token contains its latitude but not its longitude. If windows wrap, a rotation of the input around
    the globe by whole cells therefore rotates the prediction by as many cells.
    """

    def __init__(self, options: argparse.Namespace, edges: Sequence[str], rngs: nnx.Rngs) -> None:
        self.embed = nnx.Linear(3, options.features, rngs=rngs)
        blocks = [Block(options.features, options.kernel_size, edges, rngs) for _ in range(options.depth)]
        self.blocks = nnx.List(blocks)
        self.norm = nnx.LayerNorm(options.features, rngs=rngs)
        self.head = nnx.Linear(options.features, 1, rngs=rngs)

    def __call__(self, fields: jax.Array) -> jax.Array:
        latitudes = latitudes_of(fields.shape[1])[:, None]
        inputs = [fields, jnp.sin(latitudes), jnp.cos(latitudes)]
        tokens = self.embed(jnp.stack(jnp.broadcast_arrays(*inputs), axis=-1))
        for block in self.blocks:
            tokens = block(tokens)
        return fields + self.head(self.norm(tokens))[..., 0]


def latitudes_of(count: int) -> jax.Array:
    """Return latitudes in radians, from south to north."""
    return (jnp.arange(count) + 0.5) / count * jnp.pi - jnp.pi / 2


def winds(latitudes: jax.Array, longitudes: int) -> jax.Array:
    """Return the eastward distance in radians that winds at each latitude blow per step: one to three grid cells."""
    return (2 + jnp.sin(2 * latitudes)) * 2 * jnp.pi / longitudes


def weather(key: jax.Array, count: int, steps: int, grid: Sequence[int]) -> jax.Array:
    """Return random fields at steps 0 to ``steps``: ``[steps + 1, count, latitudes, longitudes]``.

    At every point, the distribution of values has mean 0 and standard deviation 1.
    """
    latitudes, longitudes = latitudes_of(grid[0]), jnp.arange(grid[1]) / grid[1] * 2 * jnp.pi
    size_key, direction_key, phase_key, sign_key = jax.random.split(key, 4)
    around = jax.random.randint(size_key, (count, MODES), 1, SHORTEST + 1)
    upwards = jax.random.uniform(direction_key, (count, MODES), minval=0, maxval=SHORTEST)
    phases = jax.random.uniform(phase_key, (count, MODES), maxval=2 * jnp.pi)
    heights = jax.random.normal(sign_key, (count, MODES)) * (2 / MODES) ** 0.5

    def at(step: jax.Array) -> jax.Array:
        came_from = longitudes - step * winds(latitudes, grid[1])[:, None]
        angles = around[..., None, None] * came_from + upwards[..., None, None] * latitudes[:, None]
        return jnp.sum(heights[..., None, None] * jnp.cos(angles + phases[..., None, None]), axis=1)

    return jax.lax.map(at, jnp.arange(steps + 1.0))


@nnx.jit
def train_step(model: Forecaster, optimizer: nnx.Optimizer[Any], now: jax.Array, then: jax.Array) -> jax.Array:
    """Update the model in place; return the loss."""
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(now) - then) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def forecast(model: Forecaster, fields: jax.Array) -> jax.Array:
    """Predict the fields one step later."""
    return model(fields)


def trained(options: argparse.Namespace, edges: Sequence[str]) -> Forecaster:
    """Train a model on ``--steps`` batches of random fields. The batches do not depend on ``edges``."""
    model = Forecaster(options, edges, nnx.Rngs(options.seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, options.learning_rate, options.steps // 10, options.steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=1e-4), wrt=nnx.Param)
    draw = jax.jit(weather, static_argnums=(1, 2, 3))
    for key in jax.random.split(jax.random.key(options.seed), options.steps):
        now, then = draw(key, options.batch, 1, tuple(options.grid))
        train_step(model, optimizer, now, then)
    return model


def errors_of(model: Forecaster, truth: jax.Array) -> np.ndarray:
    """Forecast from the fields ``truth[0]``; return root mean square errors ``[steps, longitudes]``."""
    fields, found = truth[0], []
    for expected in truth[1:]:
        fields = forecast(model, fields)
        found.append(np.sqrt(np.mean((np.asarray(fields) - np.asarray(expected)) ** 2, axis=(0, 1))))
    return np.stack(found)


def save_picture(path: Path, errors: dict[str, np.ndarray]) -> None:
    """Plot the errors of the final forecast step against longitude."""
    figure, axis = plt.subplots(figsize=(5.5, 2.6), layout="constrained")
    for (name, found), color in zip(errors.items(), ("#e0533d", "#2f7fc1"), strict=True):
        longitudes = np.arange(found.shape[1]) / found.shape[1] * 360 - 180
        axis.plot(longitudes, found[-1], color=color, label=f'edges "{name}"')
    axis.set_xlabel("longitude", color=GRAY)
    axis.set_ylabel(f"error after {len(found)} steps", color=GRAY)
    axis.set_ylim(bottom=0)
    axis.tick_params(colors=GRAY)
    for spine in axis.spines.values():
        spine.set_color(GRAY)
    axis.legend(labelcolor=GRAY, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png", transparent=True)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train both models and compare their forecasts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--grid", type=int, nargs=2, default=[16, 32], help="latitudes and longitudes")
    parser.add_argument("--kernel-size", type=int, nargs=2, default=[3, 9])
    parser.add_argument("--features", type=int, default=32)
    parser.add_argument("--depth", type=int, default=2, help="blocks")
    parser.add_argument("--steps", type=int, default=600, help="training steps")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--forecast", type=int, default=4, help="steps of a forecast")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="file for a plot of errors by longitude")
    options = parser.parse_args(arguments)
    if options.features < HEAD_DIM or options.features % HEAD_DIM:
        parser.error(f"--features must be a multiple of {HEAD_DIM}, the width of a head, got {options.features}")
    if options.steps < 1 or options.forecast < 1:
        parser.error(f"--steps and --forecast must be at least 1, got {options.steps} and {options.forecast}")
    if min(np.subtract(options.grid, options.kernel_size)) < 0:
        parser.error(f"--kernel-size {options.kernel_size} must fit --grid {options.grid}")

    # Fields for testing, which were not used for training.
    truth = weather(jax.random.key(options.seed + 1), 64, options.forecast, options.grid)
    reach = options.forecast * options.depth * (options.kernel_size[1] // 2)
    seam = np.minimum(np.arange(options.grid[1]), np.arange(options.grid[1])[::-1]) < min(reach, options.grid[1] // 8)
    errors = {}
    print(f"{'edges':<8}{'step':>6}{'at the date line':>20}{'elsewhere':>12}")
    for name, edges in EDGES.items():
        began = time.perf_counter()
        errors[name] = errors_of(trained(options, edges), truth)
        for step, found in enumerate(errors[name], 1):
            print(f"{name:<8}{step:>6}{found[seam].mean():>20.3f}{found[~seam].mean():>12.3f}")
        print(f"Trained and tested with {name} in {time.perf_counter() - began:.1f} s")
    if options.output is not None:
        save_picture(options.output, errors)
        print(f"Saved {options.output}")


if __name__ == "__main__":
    main()
