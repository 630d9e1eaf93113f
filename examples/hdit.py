"""Train an hourglass diffusion transformer (HDiT, Crowson et al. 2024) on handwritten digits, and sample from it.

The tokens are patches of an image. In the first half of the hourglass, each level merges 2 x 2 tokens of the previous
level into one. The second half splits the tokens again. A learned weight interpolates between the split tokens and the
skip connection. The outer levels have neighborhood attention, and the innermost level has global attention. If the
innermost level has a constant number of tokens, the cost of a step is therefore linear in the number of pixels, not
quadratic. Queries and keys are normalized (cosine similarity), scaled by a learned factor per head, and rotated by
position (RoPE). The noise level and the class determine the scales of the normalizations before attention and MLP.

The objective is rectified flow. The model receives a linear mixture of an image and noise, and estimates the velocity
from the image to the noise. Sampling starts from noise, and integrates the velocity backwards with Euler steps.

    python examples/hdit.py --output samples.png
    python examples/hdit.py --data blobs --widths 128 256 512 --depths 2 2 4 --image-size 128 --patch 2 \\
        --learning-rate 5e-4 --dtype bf16
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from timed_steps import TimedSteps

from natten_jax import attention, backends, na2d
from natten_jax.rotary import apply_rotary, rotary_angles

matplotlib.use("Agg")  # does not need a display
import matplotlib.pyplot as plt  # must be imported after the backend is selected

BLOBS = 3  # number of blobs per generated picture
CLASSES = 10  # digits
CONDITION = 256  # number of features of the embedded noise level and class
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
GRAY = "#7d8896"  # text color that is legible on light and on dark pages
EPSILON = 1e-6  # added to a sum or mean of squares before a division by its square root
HEAD_DIM = 64
MLP_RATIO = 3
MAPPING_DEPTH = 2


class Settings(NamedTuple):
    """Settings shared by all blocks of a model."""

    kernel_size: int
    dtype: Any
    backend: str | None


def linear(in_features: int, features: int, dtype: Any, rngs: nnx.Rngs, *, is_zero: bool = False) -> nnx.Linear:
    """Create a projection without bias.

    If ``is_zero``, the weights start at zero. A residual branch that ends with such a projection is zero at first.
    """
    initializer = nnx.initializers.zeros_init() if is_zero else nnx.initializers.lecun_normal()
    return nnx.Linear(in_features, features, use_bias=False, kernel_init=initializer, dtype=dtype, rngs=rngs)


class GatedPerceptron(nnx.Module):
    """GEGLU MLP: one half of the hidden features gates the other half."""

    def __init__(self, features: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.expand = linear(features, 2 * MLP_RATIO * features, dtype, rngs)
        self.contract = linear(MLP_RATIO * features, features, dtype, rngs, is_zero=True)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        hidden, gate = jnp.split(self.expand(tokens), 2, axis=-1)
        return self.contract(hidden * nnx.gelu(gate))


class AdaptiveNorm(nnx.Module):
    """RMS normalization whose scale depends on the noise level and the class."""

    def __init__(self, features: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(features, epsilon=EPSILON, use_scale=False, dtype=jnp.float32, rngs=rngs)
        self.scale = linear(CONDITION, features, dtype, rngs, is_zero=True)

    def __call__(self, tokens: jax.Array, condition: jax.Array) -> jax.Array:
        # Add 1 in float32: with eight bits of precision, bfloat16 cannot represent scales that differ slightly from 1.
        scale = 1 + self.scale(condition).astype(jnp.float32)
        return (self.norm(tokens) * scale[:, None, None]).astype(tokens.dtype)


class Attention(nnx.Module):
    """Cosine-similarity attention of tokens ``[batch, height, width, features]``, over windows or over all tokens."""

    def __init__(self, features: int, is_global: bool, settings: Settings, rngs: nnx.Rngs) -> None:
        self.settings, self.is_global = settings, is_global
        heads = features // HEAD_DIM
        self.project = linear(features, 3 * features, settings.dtype, rngs)
        self.scale = nnx.Param(jnp.full((heads, 1), 10.0, jnp.float32))
        self.out = linear(features, features, settings.dtype, rngs, is_zero=True)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        split = self.project(tokens).reshape(*tokens.shape[:-1], 3, -1, HEAD_DIM)
        query, key, value = (split[..., number, :, :] for number in range(3))
        angles = axial_angles(tokens.shape[1:3])
        # The operators take one scale for all heads, so each head's queries are multiplied by the head's own scale.
        query = apply_rotary(normalized(query) * self.scale[...], angles).astype(value.dtype)
        key = apply_rotary(normalized(key), angles).astype(value.dtype)
        attended = self._all(query, key, value) if self.is_global else self._windows(query, key, value)
        return self.out(attended.reshape(tokens.shape))

    def _windows(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        kernel_size = [min(self.settings.kernel_size, extent) for extent in query.shape[1:3]]
        return na2d(query, key, value, kernel_size, scale=1.0, backend=self.settings.backend)

    def _all(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        query, key, value = (array.reshape(len(array), -1, *array.shape[3:]) for array in (query, key, value))
        return attention(query, key, value, scale=1.0, backend=backends.counterpart(self.settings.backend))


def normalized(heads: jax.Array) -> jax.Array:
    """Normalize queries or keys to length 1, in float32."""
    wide = heads.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.square(wide).sum(-1, keepdims=True) + EPSILON)


def axial_angles(layout: tuple[int, ...]) -> jax.Array:
    """Return rotary angles ``[height, width, pairs]`` for half of the features of a head.

    A quarter of the features is rotated by the row of the token, and another quarter by the column.
    Positions range from -1 to 1 for any number of tokens, so that all levels have the same coordinates. Frequencies
    range from 0.5 to about 3.7 rotations per unit of position.
    """
    positions = [np.pi * (2 * np.arange(extent) + 1 - extent) / extent for extent in layout]
    return rotary_angles(layout, HEAD_DIM, features=2 * [HEAD_DIM // 4], positions=positions, theta=0.1)


class Block(nnx.Module):
    """Attention and an MLP, each with pre-normalization and a residual connection."""

    def __init__(self, features: int, is_global: bool, settings: Settings, rngs: nnx.Rngs) -> None:
        self.attention_norm = AdaptiveNorm(features, settings.dtype, rngs)
        self.attention = Attention(features, is_global, settings, rngs)
        self.perceptron_norm = AdaptiveNorm(features, settings.dtype, rngs)
        self.perceptron = GatedPerceptron(features, settings.dtype, rngs)

    def __call__(self, tokens: jax.Array, condition: jax.Array) -> jax.Array:
        tokens = tokens + self.attention(self.attention_norm(tokens, condition))
        return tokens + self.perceptron(self.perceptron_norm(tokens, condition))


def merged(pixels: jax.Array, size: int) -> jax.Array:
    """Merge each square of tokens of ``[batch, height, width, features]`` into one token with all their features."""
    batch, height, width, features = pixels.shape
    squares = pixels.reshape(batch, height // size, size, width // size, size, features)
    return squares.swapaxes(2, 3).reshape(batch, height // size, width // size, size * size * features)


def split(tokens: jax.Array, size: int) -> jax.Array:
    """Invert :func:`merged`."""
    batch, height, width, features = tokens.shape
    squares = tokens.reshape(batch, height, width, size, size, features // size**2)
    return squares.swapaxes(2, 3).reshape(batch, height * size, width * size, features // size**2)


class Level(nnx.Module):
    """A level of the hourglass: blocks, the next level with a quarter of the tokens, and more blocks.

    The innermost level has only the first blocks.
    """

    def __init__(self, widths: Sequence[int], depths: Sequence[int], settings: Settings, rngs: nnx.Rngs) -> None:
        features, *inner = widths

        def blocks() -> nnx.List[Block]:
            return nnx.List([Block(features, not inner, settings, rngs) for _ in range(depths[0])])

        self.before = blocks()
        self.inner = Level(inner, depths[1:], settings, rngs) if inner else None
        if inner:
            self.merge = linear(4 * features, inner[0], settings.dtype, rngs)
            self.split = linear(inner[0], 4 * features, settings.dtype, rngs)
            self.share = nnx.Param(jnp.array(0.5, jnp.float32))
            self.after = blocks()

    def __call__(self, tokens: jax.Array, condition: jax.Array) -> jax.Array:
        for block in self.before:
            tokens = block(tokens, condition)
        if self.inner is None:
            return tokens
        found = split(self.split(self.inner(self.merge(merged(tokens, 2)), condition)), 2)
        tokens = tokens + (found - tokens) * self.share[...].astype(tokens.dtype)
        for block in self.after:
            tokens = block(tokens, condition)
        return tokens


class Mapping(nnx.Module):
    """Network that embeds noise levels and classes, both ``[batch]``, into the condition of the normalizations.

    Noise levels are from 0 to 1.
    """

    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        self.dtype = dtype
        self.embed = linear(CONDITION, CONDITION, dtype, rngs)
        # The initial class embeddings are as large as the embeddings of noise levels. With smaller class embeddings,
        # the noise levels would dominate.
        as_long = nnx.initializers.normal(1.0)
        self.classes = nnx.Embed(CLASSES, CONDITION, dtype=dtype, embedding_init=as_long, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(CONDITION, dtype=dtype, rngs=rngs) for _ in range(MAPPING_DEPTH + 1)])
        self.perceptrons = nnx.List([GatedPerceptron(CONDITION, dtype, rngs) for _ in range(MAPPING_DEPTH)])

    def __call__(self, noise_levels: jax.Array, classes: jax.Array) -> jax.Array:
        angles = noise_levels[:, None] * np.geomspace(1.0, 1000.0, CONDITION // 2, dtype=np.float32)
        waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
        condition = self.embed(waves.astype(self.dtype)) + self.classes(classes)
        for norm, perceptron in zip(self.norms[:-1], self.perceptrons, strict=True):
            condition = condition + perceptron(norm(condition))
        return self.norms[-1](condition)


class Hourglass(nnx.Module):
    """The diffusion transformer. Parameters are always float32."""

    def __init__(
        self, widths: Sequence[int], depths: Sequence[int], patch: int, settings: Settings, *, rngs: nnx.Rngs
    ) -> None:
        self.patch, self.dtype = patch, settings.dtype
        self.mapping = Mapping(settings.dtype, rngs)
        self.embed = linear(3 * patch**2, widths[0], settings.dtype, rngs)
        self.levels = Level(widths, depths, settings, rngs)
        self.norm = nnx.RMSNorm(widths[0], epsilon=EPSILON, dtype=settings.dtype, rngs=rngs)
        self.head = linear(widths[0], 3 * patch**2, settings.dtype, rngs, is_zero=True)

    def __call__(self, images: jax.Array, noise_levels: jax.Array, classes: jax.Array) -> jax.Array:
        """Estimate the velocities of noisy images ``[batch, size, size, 3]``, in float32.

        Noise levels and classes have the shape ``[batch]``.
        """
        tokens = self.embed(merged(images.astype(self.dtype), self.patch))
        tokens = self.levels(tokens, self.mapping(noise_levels, classes))
        return split(self.head(self.norm(tokens)), self.patch).astype(jnp.float32)


class Digits:
    """Scikit-learn's handwritten digits, enlarged from 8 x 8 pixels, with values in [-1, 1]."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.key = jax.random.key(options.seed)
        size = options.image_size
        digits = load_digits()
        small = jnp.asarray(digits.images[..., None] / 8 - 1, jnp.float32)
        large = jax.image.resize(small, (len(small), size, size, 3), "cubic")
        self._images, self._classes = jnp.clip(large, -1, 1), jnp.asarray(digits.target)
        self._batch_size = options.batch

    def batch(self, step: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return pictures ``[batch, size, size, 3]``, classes, and a random key for noise.

        Calls with the same step number return the same batch.
        """
        at_pictures, at_noise = jax.random.split(jax.random.fold_in(self.key, step))
        chosen = jax.random.choice(at_pictures, len(self._images), (self._batch_size,), replace=False)
        return self._images[chosen], self._classes[chosen], at_noise


class Blobs:
    """Generated pictures with values in [-1, 1]: round colored blobs on a background of another color."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.key = jax.random.key(options.seed)
        self.size = options.image_size
        self._draw = jax.jit(jax.vmap(self._picture))
        self._batch_size = options.batch

    def batch(self, step: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return pictures ``[batch, size, size, 3]``, classes, and a random key for noise.

        Calls with the same step number return the same batch.
        """
        at_pictures, at_noise = jax.random.split(jax.random.fold_in(self.key, step))
        images = self._draw(jax.random.split(at_pictures, self._batch_size))
        return images, jnp.zeros(self._batch_size, int), at_noise

    def _picture(self, key: jax.Array) -> jax.Array:
        at_colors, at_centers, at_radii = jax.random.split(key, 3)
        background, *colors = jax.random.uniform(at_colors, (BLOBS + 1, 3), minval=-1.0)
        centers = jax.random.uniform(at_centers, (BLOBS, 2))
        radii = jax.random.uniform(at_radii, (BLOBS,), minval=0.1, maxval=0.25)
        position = jnp.stack(jnp.meshgrid(*2 * [(jnp.arange(self.size) + 0.5) / self.size], indexing="ij"), axis=-1)
        picture = jnp.broadcast_to(background, (self.size, self.size, 3))
        for color, center, radius in zip(colors, centers, radii, strict=True):
            distance = jnp.sqrt(jnp.square(position - center).sum(-1, keepdims=True))
            cover = jax.nn.sigmoid((radius - distance) * 50)  # soft edge, about a fiftieth of the picture wide
            picture = picture + cover * (color - picture)
        return picture


DATA: dict[str, type[Digits] | type[Blobs]] = {"digits": Digits, "blobs": Blobs}


def step_of(graph: nnx.GraphDef[Hourglass], optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Build a training step.

    The step maps a state, images, classes and a random key to the next state and the loss. A state consists of the
    parameters and the optimizer's state.
    """

    def step(state: Any, images: jax.Array, classes: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
        parameters, optimizer_state = state
        at_levels, at_noise = jax.random.split(key)
        levels = jax.random.uniform(at_levels, (len(images),))
        noise = jax.random.normal(at_noise, images.shape)
        mixed = images + levels[:, None, None, None] * (noise - images)

        def loss_of(parameters: Any) -> jax.Array:
            return jnp.square(nnx.merge(graph, parameters)(mixed, levels, classes) - (noise - images)).mean()

        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
        return (optax.apply_updates(parameters, updates), optimizer_state), loss

    return step


def sample(
    graph: nnx.GraphDef[Hourglass], parameters: Any, noise: jax.Array, classes: jax.Array, steps: int
) -> jax.Array:
    """Sample images of the given classes. ``noise`` has the shape of the images."""

    @jax.jit
    def follow(parameters: Any, noise: jax.Array) -> jax.Array:
        def euler(step: int | jax.Array, images: jax.Array) -> jax.Array:
            level = jnp.full(len(images), 1 - step / steps)
            return images - nnx.merge(graph, parameters)(images, level, classes) / steps

        return jax.lax.fori_loop(0, steps, euler, noise)

    return follow(parameters, noise)


def save_pictures(path: Path, rows: dict[str, tuple[jax.Array, jax.Array]], *, is_labelled: bool) -> None:
    """Save images as a PNG file.

    Args:
        path: File to write.
        rows: A pair for each row of the picture, by the row's title: images ``[n, size, size, 3]`` with values in
            [-1, 1], and the classes of the images.
        is_labelled: Write the class above each image.
    """
    columns = max(len(images) for images, _ in rows.values())
    figure = plt.figure(figsize=(0.65 * columns, 1.25 * len(rows)), layout="constrained")
    for part, (name, (images, classes)) in zip(
        figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows.items(), strict=True
    ):
        part.suptitle(name, fontsize="large", color=GRAY)
        places = part.subplots(1, columns, squeeze=False)[0]
        for axes, image, class_ in zip(places, np.asarray(images), np.asarray(classes), strict=False):
            axes.imshow(np.clip(image / 2 + 0.5, 0, 1), interpolation="nearest")
            axes.set_axis_off()
            if is_labelled:
                axes.set_title(str(class_), fontsize="large", color=GRAY)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, format="png", transparent=True)
    plt.close(figure)


def statistics_of(images: jax.Array) -> str:
    return f"mean {float(images.mean()):.3f}, standard deviation {float(images.std()):.3f}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train an hourglass diffusion transformer on digits or generated pictures, and sample from it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", default="digits", choices=DATA, help="training images")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 64], help="features per level, multiples of 64")
    parser.add_argument(
        "--depths", type=int, nargs="+", default=[1, 2], help="blocks per level; outer levels have them twice"
    )
    parser.add_argument(
        "--patch", type=int, default=1, help="height and width in pixels of a token of the outermost level"
    )
    parser.add_argument("--image-size", type=int, default=8, help="height and width of an image in pixels")
    parser.add_argument("--batch", type=int, default=32, help="images per step")
    parser.add_argument("--steps", type=int, default=800, help="steps of training")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--kernel-size", type=int, default=7, help="height and width of windows in tokens")
    parser.add_argument("--dtype", default="fp32", choices=DTYPES, help="dtype of the blocks")
    parser.add_argument("--backend", default=None, help="such as cpu-fna or flex-fna (default: automatic)")
    parser.add_argument("--seed", type=int, default=0, help="seed of parameters, pictures and noise")
    parser.add_argument("--sampling-steps", type=int, default=40, help="Euler steps from noise to an image")
    parser.add_argument("--samples", type=int, default=10, help="images to sample")
    parser.add_argument(
        "--output", type=Path, help="picture file: training images in the first row, samples in the second"
    )
    parser.add_argument("--profile", action="store_true", help="print the share of attention in a step")
    options = parser.parse_args(arguments)
    for name in ("patch", "image_size", "batch", "steps", "sampling_steps", "samples"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.kernel_size < 2:
        parser.error(f"--kernel-size must be at least 2, got {options.kernel_size}")
    if len(options.widths) != len(options.depths):
        parser.error(f"--widths {options.widths} and --depths {options.depths} must have the same number of levels")
    for name, least in (("widths", HEAD_DIM), ("depths", 1)):
        for each in getattr(options, name):
            if each < least or each % least:
                parser.error(f"--{name} must be multiples of {least}, got {each}")
    coarsest = options.patch * 2 ** (len(options.widths) - 1)
    if options.image_size % coarsest:
        parser.error(f"--image-size must be a multiple of {coarsest}, an innermost token, got {options.image_size}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a model and sample images; print losses and the time of a step.

    If requested, also print the share of attention in the device time of a step.
    """
    options = parse(arguments)
    settings = Settings(options.kernel_size, DTYPES[options.dtype], options.backend)
    pictures = DATA[options.data](options)
    model = Hourglass(options.widths, options.depths, options.patch, settings, rngs=nnx.Rngs(options.seed))
    graph, parameters = nnx.split(model)
    schedule = optax.warmup_cosine_decay_schedule(0.0, options.learning_rate, options.steps // 10, options.steps)
    optimizer = optax.adamw(schedule, b2=0.95)

    count = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    extents = [options.image_size // options.patch >> level for level in range(len(options.widths))]
    size, device = f"{options.image_size} x {options.image_size}", jax.devices()[0].device_kind
    print(f"{count / 1e6:.2f} M parameters, {options.batch} images of {size} per step, {options.dtype}, {device}")
    print(f"Tokens per level: {', '.join(f'{extent}x{extent}' for extent in extents)}")

    steps = TimedSteps(step_of(graph, optimizer), (parameters, optimizer.init(parameters)))
    steps.train(pictures.batch, options.steps)
    if options.profile:
        print(steps.profile(*pictures.batch(options.steps)))

    real, classes, key = pictures.batch(0)
    noise = jax.random.normal(key, (options.samples, *real.shape[1:]))
    asked = jnp.arange(options.samples) % CLASSES if options.data == "digits" else jnp.zeros(options.samples, int)
    samples = sample(graph, steps.state[0], noise, asked, options.sampling_steps)
    print(f"Samples after {options.sampling_steps} steps: {statistics_of(samples)}")
    print(f"Pictures: {statistics_of(real)}")
    if options.output is not None:
        rows = {"data": (real[: options.samples], classes), f"samples after {options.steps} steps": (samples, asked)}
        save_pictures(options.output, rows, is_labelled=options.data == "digits")


if __name__ == "__main__":
    main()
