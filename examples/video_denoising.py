"""Train a neighborhood attention block to remove noise from video clips.

A clip pans over one of the two photographs that come with scikit-learn, so nothing is downloaded. Noise is added to
every pixel. The model embeds each patch linearly and estimates the noise in the patch. `--compare` trains a second
model with the given backend and dtype, from the same initial parameters and on the same clips.

    python examples/video_denoising.py --steps 300 --compare flex-fna:float32 --json curves.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from natten_jax.flax_modules.nnx import NeighborhoodAttention3D
from sklearn.datasets import load_sample_images

DTYPES = ("float32", "float16", "bfloat16")
LINES = 10  # largest number of table rows with losses
PICTURE_SIZE = 427, 640  # height and width
NOISE = 0.5  # standard deviation of the noise; pixels are in [-1, 1]
SMOOTHING = 20  # width of the moving average of losses, in steps


class Arithmetic(NamedTuple):
    """Backend of the attention, and dtype in which the model computes."""

    backend: str | None
    dtype: str

    def __str__(self) -> str:
        return f"{self.backend or 'default'}:{self.dtype}"


class Block(nnx.Module):
    """Neighborhood attention and an MLP, each with pre-normalization and a residual connection."""

    def __init__(self, features: int, attention: NeighborhoodAttention3D, dtype: Any, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(features, dtype=dtype, rngs=rngs)
        self.attention = attention
        self.perceptron_norm = nnx.LayerNorm(features, dtype=dtype, rngs=rngs)
        self.expand = nnx.Linear(features, 4 * features, dtype=dtype, rngs=rngs)
        self.contract = nnx.Linear(4 * features, features, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        tokens = tokens + self.attention(self.attention_norm(tokens))
        return tokens + self.contract(nnx.gelu(self.expand(self.perceptron_norm(tokens))))


class Denoiser(nnx.Module):
    """Denoise clips. A token is a patch of a frame. Parameters are float32 for every computation dtype."""

    def __init__(self, options: argparse.Namespace, arithmetic: Arithmetic) -> None:
        rngs = nnx.Rngs(options.seed)
        dtype = jnp.dtype(arithmetic.dtype)
        features, pixels = options.heads * options.head_dim, 3 * options.patch**2
        self.dtype = dtype
        self.embed = nnx.Linear(pixels, features, dtype=dtype, rngs=rngs)
        # Position embedding of a token: the sum of three vectors, for its frame, its row and its column.
        self.frame, self.row, self.column = (
            nnx.Param(0.02 * jax.random.normal(rngs.params(), (length, features))) for length in options.tokens
        )
        attention = NeighborhoodAttention3D(
            features,
            num_heads=options.heads,
            kernel_size=tuple(options.window),
            stride=tuple(options.stride),
            dilation=tuple(options.dilation),
            dtype=dtype,
            backend=arithmetic.backend,
            rngs=rngs,
        )
        self.block = Block(features, attention, dtype, rngs)
        self.norm = nnx.LayerNorm(features, dtype=dtype, rngs=rngs)
        # Zero weights, so that the untrained model returns its input.
        self.head = nnx.Linear(features, pixels, dtype=dtype, kernel_init=nnx.initializers.zeros_init(), rngs=rngs)

    def __call__(self, noisy: jax.Array) -> jax.Array:
        """Denoise patches ``[batch, *tokens, pixels]``, and return float32 patches of the same shape."""
        position = self.frame[:, None, None] + self.row[:, None] + self.column[...]
        tokens = self.embed(noisy) + position.astype(self.dtype)
        return noisy - self.head(self.norm(self.block(tokens)))


class Data:
    """Random clips that pan over pictures ``[n, height, width, 3]`` with values in [-1, 1]."""

    def __init__(self, pictures: np.ndarray, options: argparse.Namespace) -> None:
        self.pictures = jnp.asarray(pictures)
        self.tokens, self.patch = tuple(options.tokens), options.patch
        self.batch_size = options.batch_size
        self.key = jax.random.key(options.seed)
        self.clips = jax.jit(jax.vmap(self._clip, in_axes=(None, 0)))

    def batch(self, step: int) -> tuple[jax.Array, jax.Array]:
        """Return noisy and clean patches ``[batch, *tokens, pixels]`` of random clips. ``step`` selects the clips."""
        return self.clips(self.pictures, jax.random.split(jax.random.fold_in(self.key, step), self.batch_size))

    def _clip(self, pictures: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        frames, rows, columns = self.tokens
        size = rows * self.patch, columns * self.patch
        last_corner = np.array(pictures.shape[1:3]) - np.array(size)
        pass_, where, speed, noise = jax.random.split(key, 4)
        # The clip moves in a straight line. From frame to frame, it moves by at most the size of a patch in each
        # dimension.
        start = jax.random.uniform(where, (2,), maxval=last_corner)
        pan = jax.random.uniform(speed, (2,), minval=-1.0) * self.patch * (frames - 1)
        corners = jnp.linspace(start, jnp.clip(start + pan, 0, last_corner), frames).round().astype(int)

        picture = pictures[jax.random.randint(pass_, (), 0, len(pictures))]
        clip = jax.vmap(lambda corner: jax.lax.dynamic_slice(picture, (*corner, 0), (*size, 3)))(corners)
        clean = clip.reshape(frames, rows, self.patch, columns, self.patch, 3).swapaxes(2, 3).reshape(*self.tokens, -1)
        return clean + NOISE * jax.random.normal(noise, clean.shape), clean


def load() -> np.ndarray:
    """Load the pictures ``[n, height, width, 3]`` with values in [-1, 1]."""
    return (np.stack(load_sample_images().images) / 127.5 - 1.0).astype(np.float32)


@nnx.jit
def train_step(model: Denoiser, optimizer: nnx.Optimizer[Any], noisy: jax.Array, clean: jax.Array) -> jax.Array:
    """Update the model in place; return the loss, the mean squared error per pixel."""

    def loss_of(model: Denoiser) -> jax.Array:
        return jnp.square(model(noisy) - clean).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


class Run:
    """The training of one model."""

    def __init__(self, options: argparse.Namespace, arithmetic: Arithmetic) -> None:
        self.arithmetic = arithmetic
        self.model = Denoiser(options, arithmetic)
        warmup = options.steps // 10
        schedule = optax.warmup_cosine_decay_schedule(0.0, options.learning_rate, warmup, options.steps)
        self.optimizer = nnx.Optimizer(self.model, optax.adamw(schedule), wrt=nnx.Param)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, noisy: jax.Array, clean: jax.Array) -> None:
        """Run a training step; append its loss to `losses` and its duration to `seconds`."""
        started = time.perf_counter()
        self.losses.append(float(train_step(self.model, self.optimizer, noisy, clean)))
        self.seconds.append(time.perf_counter() - started)

    @property
    def seconds_per_step(self) -> float:
        """Median duration of a step in seconds. The first step is excluded, because it includes compilation."""
        return float(np.median(self.seconds[1:] or self.seconds))


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Smooth two loss curves with a moving average, and return their largest relative difference."""
    width = min(SMOOTHING, len(reference))
    smoothed, expected = (np.convolve(curve, np.full(width, 1 / width), "valid") for curve in (losses, reference))
    return float(np.max(np.abs(smoothed - expected) / expected))


def print_line(label: str, cells: Sequence[str]) -> None:
    """Print a table row: its label, then a cell for each run."""
    print(f"{label:>6}", *(f"{cell:>20}" for cell in cells), flush=True)


def save_curves(path: Path, options: argparse.Namespace, runs: Sequence[Run]) -> None:
    """Write the settings, and the losses and seconds of every step of each run, to a JSON file."""
    run_options = "backend", "dtype", "compare", "json"
    curves = {
        **{name: value for name, value in vars(options).items() if name not in run_options},
        "device": jax.devices()[0].device_kind,
        "runs": [{**run.arithmetic._asdict(), "seconds": run.seconds, "losses": run.losses} for run in runs],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")


def parse_arithmetic(text: str) -> Arithmetic:
    """Parse the value ``backend:dtype`` of `--compare`."""
    backend, _, dtype = text.partition(":")
    if not backend or dtype not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a backend and type, such as flex-fna:float32")
    return Arithmetic(backend, dtype)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a 3-D neighborhood attention block to remove noise from video clips.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=300, help="steps of training")
    parser.add_argument("--batch-size", type=int, default=1, help="clips per step")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument(
        "--tokens", type=int, nargs=3, default=[16, 32, 32], help="tokens of a clip: depth, height, width"
    )
    parser.add_argument("--patch", type=int, default=8, help="height and width of a token in pixels")
    parser.add_argument("--heads", type=int, default=8, help="attention heads")
    parser.add_argument("--head-dim", type=int, default=64, help="features per head")
    parser.add_argument("--window", type=int, nargs=3, default=[8, 16, 16], help="attention window in tokens")
    parser.add_argument("--stride", type=int, nargs=3, default=[1, 1, 1], help="queries that share a window")
    parser.add_argument("--dilation", type=int, nargs=3, default=[1, 1, 1], help="distance between a window's tokens")
    parser.add_argument("--backend", default=None, help="such as cpu-fna or flex-fna (default: automatic)")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="dtype of the model")
    parser.add_argument("--seed", type=int, default=0, help="seed of parameters and clips")
    parser.add_argument(
        "--compare", type=parse_arithmetic, metavar="BACKEND:DTYPE", help="also train with this backend and dtype"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for the losses of all steps")
    options = parser.parse_args(arguments)
    for name in ("steps", "batch_size", "patch", "heads", "head_dim"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if min(options.tokens) < 1:
        parser.error(f"--tokens must be at least 1, got {options.tokens}")
    for tokens, pixels in zip(options.tokens[1:], PICTURE_SIZE, strict=True):
        if tokens * options.patch > pixels:
            parser.error(f"--tokens {tokens} of --patch {options.patch} do not fit the pictures' {pixels} pixels")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print losses and seconds per step.

    With ``--compare``, also print the largest relative difference of the smoothed losses of both models.
    """
    options = parse(arguments)
    data = Data(load(), options)
    runs = [Run(options, Arithmetic(options.backend, options.dtype))]
    if options.compare is not None:
        runs.append(Run(options, options.compare))

    tokens, window = ("x".join(map(str, sizes)) for sizes in (options.tokens, options.window))
    heads, device = f"{options.heads} heads of {options.head_dim}", jax.devices()[0].device_kind
    print(f"{tokens} tokens, window {window}, {heads}, {device}")
    print(f"Mean loss since the previous line; {NOISE**2:.4f} if no noise is removed")
    print_line("step", [str(run.arithmetic) for run in runs])
    interval = -(-options.steps // LINES)
    for step in range(1, options.steps + 1):
        noisy, clean = data.batch(step)
        for run in runs:
            run.step(noisy, clean)
        if step % interval == 0 or step == options.steps:
            first = (step - 1) // interval * interval
            print_line(str(step), [f"{np.mean(run.losses[first:]):.4f}" for run in runs])
    print_line("s/step", [f"{run.seconds_per_step:.4f}" for run in runs])
    if len(runs) == 2:
        difference = largest_difference(runs[0].losses, runs[1].losses)
        print(f"Largest relative difference of losses smoothed over {SMOOTHING} steps: {difference:.2%}")
    if options.json is not None:
        save_curves(options.json, options, runs)


if __name__ == "__main__":
    main()
