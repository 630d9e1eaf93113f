"""Train a video transformer with neighborhood attention on several devices: data and tensor parallel.

The devices form a mesh with the axes `data` and `model`. The clips of a batch are sharded over `data`. Attention heads
and the hidden features of the MLP are sharded over `model`. The code shards only the parameters and the batch; the
compiler derives all other shardings. The attention operator needs no communication.

The clips pan over the two photographs that come with scikit-learn, so nothing is downloaded. The model predicts each
frame from the frames before it, so attention is causal along time. A CPU can act as several devices. A run on a CPU
can show that the losses of sharded training agree with those of a single device, but cannot show a speed-up.

    python examples/train_sharded.py --devices 8 --model-parallel 2 --compare
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from natten_jax.flax_modules.nnx import NeighborhoodAttention3D
from sklearn.datasets import load_sample_images

CHANNELS = 3
LINES = 10  # largest number of table rows with losses
PICTURE_SIZE = 427, 640  # height and width


def over(*axes: str | None) -> dict[str, Any]:
    """Return metadata for a parameter whose dimensions are sharded over these mesh axes (``None``: not sharded)."""
    return {"out_sharding": axes}


class Block(nnx.Module):
    """Neighborhood attention and an MLP, each with pre-normalization and a residual connection.

    Attention heads and the MLP's hidden features are sharded over `model`. Only the output projection of the attention
    and the last layer of the MLP sum over this mesh axis.
    """

    def __init__(self, features: int, options: argparse.Namespace, rngs: nnx.Rngs) -> None:
        dtype = jnp.dtype(options.dtype)
        self.attention_norm = nnx.LayerNorm(features, dtype=dtype, rngs=rngs)
        self.attention = NeighborhoodAttention3D(
            features,
            num_heads=options.heads,
            kernel_size=tuple(options.window),
            is_causal=(True, False, False),
            kernel_metadata=over(None, "model", None),  # [features, heads, head_dim]
            bias_metadata=over("model", None),
            out_kernel_metadata=over("model", None, None),  # [heads, head_dim, features]
            out_bias_metadata={},
            backend=options.backend,
            dtype=dtype,
            rngs=rngs,
        )
        self.perceptron_norm = nnx.LayerNorm(features, dtype=dtype, rngs=rngs)
        self.expand = nnx.Linear(
            features,
            4 * features,
            kernel_metadata=over(None, "model"),
            bias_metadata=over("model"),
            dtype=dtype,
            rngs=rngs,
        )
        self.contract = nnx.Linear(4 * features, features, kernel_metadata=over("model", None), dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        tokens = tokens + self.attention(self.attention_norm(tokens))
        return tokens + self.contract(nnx.gelu(self.expand(self.perceptron_norm(tokens))))


class Predictor(nnx.Module):
    """Predict the frame that follows each frame. A token is a patch of a frame."""

    def __init__(self, options: argparse.Namespace) -> None:
        rngs = nnx.Rngs(options.seed)
        features, pixels = options.heads * options.head_dim, CHANNELS * options.patch**2
        self.embed = nnx.Linear(pixels, features, rngs=rngs)
        # Position embedding of a token: the sum of three vectors, for its frame, its row and its column.
        self.frame, self.row, self.column = (
            nnx.Param(0.02 * jax.random.normal(rngs.params(), (length, features))) for length in options.tokens
        )
        self.blocks = nnx.List([Block(features, options, rngs) for _ in range(options.depth)])
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        # Zero weights, so that the untrained model predicts no motion: it returns its input.
        self.head = nnx.Linear(features, pixels, kernel_init=nnx.initializers.zeros_init(), rngs=rngs)

    def __call__(self, frames: jax.Array) -> jax.Array:
        """Return predicted patches ``[batch, *tokens, pixels]`` of the frame that follows each frame."""
        tokens = self.embed(frames) + (self.frame[:, None, None] + self.row[:, None] + self.column[...])
        for block in self.blocks:
            tokens = block(tokens)
        return frames + self.head(self.norm(tokens))


@nnx.jit
def train_step(model: Predictor, optimizer: nnx.Optimizer[Any], frames: jax.Array, following: jax.Array) -> jax.Array:
    """Update the model in place and return the loss.

    The loss is the mean squared error, divided by the mean squared error of predicting no motion.
    """

    def loss_of(model: Predictor) -> jax.Array:
        return jnp.square(model(frames) - following).mean() / jnp.square(frames - following).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


class Run:
    """The training of one model on the devices of a mesh."""

    def __init__(self, options: argparse.Namespace, mesh: Mesh) -> None:
        @nnx.jit  # creates sharded parameters, without first creating the whole model on one device
        def create() -> tuple[Predictor, nnx.Optimizer[Any]]:
            model = Predictor(options)
            schedule = optax.warmup_cosine_decay_schedule(
                0.0, options.learning_rate, options.steps // 10, options.steps
            )
            return model, nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)

        self.mesh = mesh
        with jax.set_mesh(mesh):
            self.model, self.optimizer = create()
        # Traverse the model and the optimizer once, not at every step.
        self.train_step = nnx.cached_partial(train_step, self.model, self.optimizer)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def __str__(self) -> str:
        return " x ".join(f"{size} {name}" for name, size in self.mesh.shape.items())

    def place(self, clips: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Copy input frames and target frames to the devices. A tuned loop would do this during the previous step."""
        batch = NamedSharding(self.mesh, PartitionSpec("data"))
        return jax.block_until_ready(jax.device_put((clips[:, :-1], clips[:, 1:]), batch))

    def launch(self, frames: jax.Array, following: jax.Array) -> jax.Array:
        """Start a training step asynchronously; return its loss."""
        with jax.set_mesh(self.mesh):
            return self.train_step(frames, following)

    def step(self, clips: np.ndarray) -> None:
        """Run a training step; append its loss to `losses` and its duration to `seconds`."""
        placed = self.place(clips)
        started = time.perf_counter()
        self.losses.append(float(self.launch(*placed)))
        self.seconds.append(time.perf_counter() - started)

    @property
    def seconds_per_step(self) -> float:
        """Median duration of a step in seconds. The first step is excluded, because it includes compilation."""
        return float(np.median(self.seconds[1:] or self.seconds))


class Data:
    """Random clips, each of which pans over a photograph."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.pictures = (np.stack(load_sample_images().images) / 127.5 - 1.0).astype(np.float32)
        self.options = options

    def batch(self, step: int) -> np.ndarray:
        """Return patches ``[batch, frames + 1, height, width, pixels]`` of random clips. ``step`` selects the clips."""
        random = np.random.default_rng((self.options.seed, step))
        return np.stack([self._clip(random) for _ in range(self.options.batch_size)])

    def _clip(self, random: np.random.Generator) -> np.ndarray:
        patch, (frames, *tokens) = self.options.patch, self.options.tokens
        size = np.array(tokens) * patch
        last_corner = np.array(PICTURE_SIZE) - size
        # The clip moves in a straight line until it reaches an edge of the picture. From frame to frame, it moves by at
        # most the size of a patch in each dimension.
        pan = random.integers(-patch, patch, 2, endpoint=True) * np.arange(frames + 1)[:, None]
        corners = np.clip(random.integers(0, last_corner, endpoint=True) + pan, 0, last_corner)
        picture = self.pictures[random.integers(len(self.pictures))]
        clip = np.stack([picture[y : y + size[0], x : x + size[1]] for y, x in corners])
        patches = clip.reshape(frames + 1, tokens[0], patch, tokens[1], patch, CHANNELS).swapaxes(2, 3)
        return patches.reshape(frames + 1, *tokens, -1)


def print_line(label: str, cells: Sequence[str]) -> None:
    """Print a table row: its label, then a cell for each run."""
    print(f"{label:>6}", *(f"{cell:>20}" for cell in cells), flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a video transformer with neighborhood attention, data and tensor parallel.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--devices", type=int, help="devices to use; without accelerators, the machine acts as that many (default: all)"
    )
    parser.add_argument(
        "--model-parallel", type=int, default=1, help="devices that share the heads; must divide --devices and --heads"
    )
    parser.add_argument("--compare", action="store_true", help="train a second model, on one device")
    parser.add_argument("--steps", type=int, default=100, help="steps of training")
    parser.add_argument("--batch-size", type=int, default=8, help="clips per step, over all devices")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument(
        "--tokens", type=int, nargs=3, default=[4, 8, 8], help="tokens of a clip: frames, height, width"
    )
    parser.add_argument("--patch", type=int, default=4, help="height and width of a token in pixels")
    parser.add_argument("--depth", type=int, default=2, help="blocks")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--head-dim", type=int, default=16, help="features per head")
    parser.add_argument("--window", type=int, nargs=3, default=[2, 5, 5], help="attention window in tokens")
    parser.add_argument("--dtype", default="float32", help="dtype of the blocks; parameters are float32")
    parser.add_argument("--backend", default=None, help="such as cpu-fna or flex-fna (default: automatic)")
    parser.add_argument("--seed", type=int, default=0, help="seed of parameters and clips")
    options = parser.parse_args(arguments)
    for name in ("model_parallel", "steps", "batch_size", "patch", "depth", "heads", "head_dim"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.devices is not None and options.devices < 1:
        parser.error(f"--devices must be at least 1, got {options.devices}")
    if min(options.tokens) < 1:
        parser.error(f"--tokens must be at least 1, got {options.tokens}")
    for tokens, pixels in zip(options.tokens[1:], PICTURE_SIZE, strict=True):
        if tokens * options.patch > pixels:
            parser.error(f"--tokens {tokens} of --patch {options.patch} do not fit the pictures' {pixels} pixels")
    if options.heads % options.model_parallel:
        parser.error(f"--heads {options.heads} cannot be split over --model-parallel {options.model_parallel}")
    return options


def device_mesh(options: argparse.Namespace) -> Mesh:
    """Create a `data` x `model` mesh of ``--devices`` devices, by default of all devices.

    Raises:
        SystemExit: There are fewer devices than requested, ``--model-parallel`` does not divide the number of devices,
            or the size of `data` does not divide the batch size.
    """
    if options.devices is not None:
        # This changes only the number of CPU devices, and only if JAX has not initialized its devices yet.
        jax.config.update("jax_num_cpu_devices", options.devices)
    devices = jax.devices()
    count = options.devices or len(devices)
    if count > len(devices):
        raise SystemExit(f"--devices {count}, but there are {len(devices)} ({devices[0].device_kind})")
    if count % options.model_parallel:
        raise SystemExit(f"--model-parallel {options.model_parallel} does not divide {count} devices")
    shape = count // options.model_parallel, options.model_parallel
    if options.batch_size % shape[0]:
        raise SystemExit(f"--batch-size {options.batch_size} cannot be split over {shape[0]} devices")
    return mesh_of(devices[:count], shape)


def mesh_of(devices: Sequence[jax.Device], shape: tuple[int, int]) -> Mesh:
    """Create a mesh with axes of type ``Auto``: the compiler derives all shardings that are not annotated."""
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto), devices=devices)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print losses and seconds per step.

    With ``--compare``, also train on a single device, and print the largest relative difference of the losses.
    """
    options = parse(arguments)
    mesh = device_mesh(options)
    data = Data(options)
    runs = [Run(options, mesh)]
    if options.compare:
        runs.append(Run(options, mesh_of(mesh.devices.flat[:1].tolist(), (1, 1))))

    tokens, window = ("x".join(map(str, sizes)) for sizes in (options.tokens, options.window))
    heads, kind = f"{options.heads} heads of {options.head_dim}", mesh.devices.flat[0].device_kind
    print(
        f"{tokens} tokens, window {window}, {heads}, {options.batch_size} clips per step, {mesh.size} devices ({kind})"
    )
    print("Mean loss since the previous line; 1 for the prediction that nothing moves")
    print_line("step", [str(run) for run in runs])
    interval = -(-options.steps // LINES)
    for step in range(1, options.steps + 1):
        clips = data.batch(step)
        for run in runs:
            run.step(clips)
        if step % interval == 0 or step == options.steps:
            first = (step - 1) // interval * interval
            print_line(str(step), [f"{np.mean(run.losses[first:]):.6f}" for run in runs])
    print_line("s/step", [f"{run.seconds_per_step:.4f}" for run in runs])
    if options.compare:
        losses, expected = (np.array(run.losses) for run in runs)
        print(f"Largest relative difference of a step's losses: {np.max(np.abs(losses - expected) / expected):.1e}")


if __name__ == "__main__":
    main()
