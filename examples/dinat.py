"""Train a hierarchical image classifier with neighborhood attention: NAT, or its dilated form DiNAT.

The model has four stages of blocks. Each stage has half as many rows and columns of tokens as the previous stage, and
twice as many features. Each token attends to a window of 7 x 7 tokens. In DiNAT, every other block dilates its windows
as much as the layout allows. Except for ``toy``, the presets have the published widths, depths and numbers of heads.
For images of 224 x 224 pixels, these presets also have the published dilations. Stochastic depth, layer scale and
relative position biases are left out.

Nothing is downloaded: the images are generated or, with ``--data digits``, scikit-learn's handwritten digits, enlarged.

    python examples/dinat.py
    python examples/dinat.py --preset tiny --image-size 224 --batch 64 --dtype bf16 --profile
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from natten_jax.flax_modules.nnx import NeighborhoodAttention2D
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from timed_steps import TimedSteps

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
HEAD_DIM = 32
# Number of orientations of the generated gratings, and their frequencies in periods per image.
ORIENTATIONS, FREQUENCIES = 8, (4.0, 8.0)
SMALLEST_IMAGE = 32  # the layout of the last stage then has one token
TEST_IMAGES = 256


class Preset(NamedTuple):
    """Size of a model: features of the first stage, blocks per stage, and the width ratio of MLPs.

    The width ratio is the number of hidden features, divided by the number of input features.
    """

    width: int
    depths: tuple[int, ...]
    mlp_ratio: int


PRESETS = {
    "toy": Preset(32, (1, 2, 2, 1), 2),  # small enough for a CPU
    "mini": Preset(64, (3, 4, 6, 5), 3),
    "tiny": Preset(64, (3, 4, 18, 5), 3),
    "small": Preset(96, (3, 4, 18, 5), 2),
    "base": Preset(128, (3, 4, 18, 5), 2),
}


class Settings(NamedTuple):
    """Settings shared by all blocks of a model."""

    kernel_size: int
    dilated: bool
    mlp_ratio: int
    dtype: Any
    backend: str | None


def window(layout: int, kernel_size: int, dilated: bool) -> tuple[int, int]:
    """Return the window size and the dilation of a block. The window size is limited to the extent of the layout."""
    kernel_size = min(kernel_size, layout)
    return kernel_size, layout // kernel_size if dilated else 1


class Block(nnx.Module):
    """Neighborhood attention and an MLP, each with pre-normalization and a residual connection."""

    def __init__(self, features: int, layout: int, dilated: bool, settings: Settings, rngs: nnx.Rngs) -> None:
        types: dict[str, Any] = {"dtype": settings.dtype, "rngs": rngs}
        kernel_size, dilation = window(layout, settings.kernel_size, dilated)
        self.attention_norm = nnx.LayerNorm(features, **types)
        self.attention = NeighborhoodAttention2D(
            features,
            num_heads=features // HEAD_DIM,
            kernel_size=kernel_size,
            dilation=dilation,
            backend=settings.backend,
            **types,
        )
        self.perceptron_norm = nnx.LayerNorm(features, **types)
        self.expand = nnx.Linear(features, settings.mlp_ratio * features, **types)
        self.contract = nnx.Linear(settings.mlp_ratio * features, features, **types)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        tokens = tokens + self.attention(self.attention_norm(tokens))
        hidden = nnx.gelu(self.expand(self.perceptron_norm(tokens)), approximate=False)
        return tokens + self.contract(hidden)


class Classifier(nnx.Module):
    """NAT or DiNAT for square images. Parameters are always float32."""

    def __init__(
        self, preset: Preset, image_size: int, classes: int, settings: Settings, *, channels: int = 3, rngs: nnx.Rngs
    ) -> None:
        self.dtype = settings.dtype
        types: dict[str, Any] = {"dtype": settings.dtype, "rngs": rngs}

        def halving(in_features: int, features: int, *, use_bias: bool = True) -> nnx.Conv:
            # Pad both sides, like the published models. For even sizes, JAX's "SAME" would pad only one side.
            return nnx.Conv(in_features, features, (3, 3), strides=2, padding=1, use_bias=use_bias, **types)

        features, layout = preset.width, halved(halved(image_size))
        self.tokenizer = nnx.Sequential(
            halving(channels, features // 2), halving(features // 2, features), nnx.LayerNorm(features, **types)
        )
        stages, downsamplers = [], []
        for stage, depth in enumerate(preset.depths):
            if stage:
                halve = halving(features, 2 * features, use_bias=False)
                features, layout = 2 * features, halved(layout)
                downsamplers.append(nnx.Sequential(halve, nnx.LayerNorm(features, **types)))
            dilated = [settings.dilated and number % 2 == 1 for number in range(depth)]
            stages.append(nnx.List([Block(features, layout, each, settings, rngs) for each in dilated]))
        self.stages, self.downsamplers = nnx.List(stages), nnx.List(downsamplers)
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.head = nnx.Linear(features, classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Return float32 logits ``[batch, classes]`` for images ``[batch, size, size, channels]``."""
        tokens = self.tokenizer(images.astype(self.dtype))
        for number, stage in enumerate(self.stages):
            if number:
                tokens = self.downsamplers[number - 1](tokens)
            for block in stage:
                tokens = block(tokens)
        return self.head(self.norm(tokens.astype(jnp.float32)).mean(axis=(1, 2)))


def halved(extent: int) -> int:
    """Return the number of rows or columns after a convolution of stride 2."""
    return -(-extent // 2)


class Data(NamedTuple):
    """Data set of images ``[n, size, size, 3]`` with values of about -1 to 1, and of labels ``[n]``.

    Attributes:
        classes: Number of classes.
        batch: Function that returns the training batch of a step, given the number of the step.
        test: Test set.
    """

    classes: int
    batch: Callable[[int], tuple[jax.Array, jax.Array]]
    test: tuple[jax.Array, jax.Array]


def gratings(options: argparse.Namespace) -> Data:
    """Return a data set of noisy gratings with random phases and colors.

    Each combination of an orientation and a frequency is a class.
    """
    size, classes = options.image_size, ORIENTATIONS * len(FREQUENCIES)

    def draw(key: jax.Array, label: jax.Array) -> jax.Array:
        at_phase, at_color, at_noise = jax.random.split(key, 3)
        angle = jnp.pi / ORIENTATIONS * (label % ORIENTATIONS)
        frequency = jnp.array(FREQUENCIES)[label // ORIENTATIONS]
        row, column = jnp.meshgrid(*2 * [jnp.arange(size) / size], indexing="ij")
        along = row * jnp.sin(angle) + column * jnp.cos(angle)
        wave = jnp.sin(2 * jnp.pi * (frequency * along + jax.random.uniform(at_phase)))
        color = jax.random.uniform(at_color, (3,), minval=0.3)
        return wave[..., None] * color + 0.5 * jax.random.normal(at_noise, (size, size, 3))

    def images(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        at_labels, at_images = jax.random.split(key)
        labels = jax.random.randint(at_labels, (count,), 0, classes)
        return jax.vmap(draw)(jax.random.split(at_images, count), labels), labels

    make = jax.jit(images, static_argnums=1)
    key = jax.random.key(options.seed)
    return Data(classes, lambda step: make(jax.random.fold_in(key, step), options.batch), make(key, TEST_IMAGES))


def digits(options: argparse.Namespace) -> Data:
    """Return scikit-learn's handwritten digits, enlarged from 8 x 8 pixels."""
    known = load_digits()
    pixels = (known.images / 8.0 - 1.0).astype(np.float32)
    train_pixels, test_pixels, train_labels, test_labels = train_test_split(
        pixels, known.target, test_size=TEST_IMAGES, stratify=known.target, random_state=options.seed
    )

    @jax.jit
    def enlarge(pixels: jax.Array) -> jax.Array:
        size = len(pixels), options.image_size, options.image_size
        return jnp.repeat(jax.image.resize(pixels, size, "bilinear")[..., None], 3, axis=-1)

    def batch(step: int) -> tuple[jax.Array, jax.Array]:
        chosen = np.random.default_rng((options.seed, step)).integers(len(train_labels), size=options.batch)
        return enlarge(train_pixels[chosen]), jnp.asarray(train_labels[chosen])

    return Data(len(known.target_names), batch, (enlarge(test_pixels), jnp.asarray(test_labels)))


def step_of(graph: nnx.GraphDef[Classifier], optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Build a training step.

    The step maps a state, images and labels to the next state and the loss. A state consists of the parameters and the
    optimizer's state.
    """

    def step(state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        parameters, optimizer_state = state

        def loss_of(parameters: Any) -> jax.Array:
            logits = nnx.merge(graph, parameters)(images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
        return (optax.apply_updates(parameters, updates), optimizer_state), loss

    return step


def accuracy(graph: nnx.GraphDef[Classifier], parameters: Any, data: Data, batch: int) -> float:
    """Return the fraction of test images that are classified correctly."""
    predict = jax.jit(lambda parameters, images: nnx.merge(graph, parameters)(images).argmax(-1))
    images, labels = data.test
    parts = [predict(parameters, images[first : first + batch]) for first in range(0, len(images), batch)]
    return float((jnp.concatenate(parts) == labels).mean())


def count_parameters(parameters: Any) -> int:
    """Return the number of learned values. The leaves of ``parameters`` need only shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(parameters))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train NAT or DiNAT, a hierarchical image classifier of neighborhood attention.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--preset", default="toy", choices=PRESETS, help="size of the model")
    parser.add_argument("--data", default="generated", choices=["generated", "digits"], help="images to classify")
    parser.add_argument("--image-size", type=int, default=64, help="height and width in pixels")
    parser.add_argument("--batch", type=int, default=32, help="images per step")
    parser.add_argument("--steps", type=int, default=100, help="steps of training")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--kernel-size", type=int, default=7, help="height and width of windows in tokens")
    parser.add_argument(
        "--dilated", action=argparse.BooleanOptionalAction, default=True, help="train DiNAT instead of NAT"
    )
    parser.add_argument("--dtype", default="fp32", choices=DTYPES, help="dtype of the blocks")
    parser.add_argument("--backend", default=None, help="such as cpu-fna or flex-fna (default: automatic)")
    parser.add_argument("--seed", type=int, default=0, help="seed of parameters and images")
    parser.add_argument("--profile", action="store_true", help="print the share of attention in a step")
    options = parser.parse_args(arguments)
    for name, least in (("batch", 1), ("steps", 1), ("kernel_size", 2), ("image_size", SMALLEST_IMAGE)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a model; print losses, the time of a step and the accuracy.

    If requested, also print the share of attention in the device time of a step.
    """
    options = parse(arguments)
    data = {"generated": gratings, "digits": digits}[options.data](options)
    preset = PRESETS[options.preset]
    settings = Settings(options.kernel_size, options.dilated, preset.mlp_ratio, DTYPES[options.dtype], options.backend)
    model = Classifier(preset, options.image_size, data.classes, settings, rngs=nnx.Rngs(options.seed))
    graph, parameters = nnx.split(model)
    schedule = optax.warmup_cosine_decay_schedule(0.0, options.learning_rate, options.steps // 10, options.steps)
    optimizer = optax.adamw(schedule, weight_decay=0.05)

    name = f"{'DiNAT' if options.dilated else 'NAT'} {options.preset}"
    size, device = f"{count_parameters(parameters) / 1e6:.2f} M parameters", jax.devices()[0].device_kind
    images = f"{options.batch} images of {options.image_size} x {options.image_size} per step"
    print(f"{name}, {size}, {data.classes} classes, {images}, {options.dtype}, {device}")

    steps = TimedSteps(step_of(graph, optimizer), (parameters, optimizer.init(parameters)))
    steps.train(data.batch, options.steps)
    print(f"Test accuracy: {accuracy(graph, steps.state[0], data, options.batch):.2%}")
    if options.profile:
        print(steps.profile(*data.batch(options.steps)))


if __name__ == "__main__":
    main()
