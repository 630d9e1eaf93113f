"""Train a small neighborhood attention classifier on handwritten digits.

The 1797 images of 8 x 8 pixels come with scikit-learn, so nothing is downloaded. A fifth of the images is the test set,
in which each digit has the same share as in all images. The accuracy on the test set is printed after every epoch. With
`--compare`, a second model is trained on the same images from the same initial parameters, but with another backend and
dtype.

    python examples/digits.py --output digits.png
    python examples/digits.py --dtype bfloat16 --compare flex-fna:float32
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from natten_jax.flax_modules.nnx import NeighborhoodAttention2D
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

matplotlib.use("Agg")  # does not need a display
import matplotlib.pyplot as plt  # must be imported after the backend is selected
from matplotlib.colors import LinearSegmentedColormap

CLASSES = 10
GRAY = "#7d8896"  # text color that is legible on light and on dark pages
DTYPES = ("float32", "float16", "bfloat16")
IMAGE_SIZE = 8


class Data(NamedTuple):
    """Images ``[n, 8, 8, 1]`` with values in [-1, 1] and their labels ``[n]``."""

    images: np.ndarray
    labels: np.ndarray


class Arithmetic(NamedTuple):
    """Backend of the attention, and the dtype in which the blocks compute."""

    backend: str | None
    dtype: str

    def __str__(self) -> str:
        return f"{self.backend or 'default'}:{self.dtype}"


class Block(nnx.Module):
    """Neighborhood attention and an MLP, each with pre-normalization and a residual connection."""

    def __init__(self, features: int, kernel_size: int, arithmetic: Arithmetic, rngs: nnx.Rngs) -> None:
        settings: dict[str, Any] = {"dtype": jnp.dtype(arithmetic.dtype), "rngs": rngs}
        self.attention_norm = nnx.LayerNorm(features, **settings)
        self.attention = NeighborhoodAttention2D(
            features, num_heads=features // 16, kernel_size=kernel_size, backend=arithmetic.backend, **settings
        )
        self.perceptron_norm = nnx.LayerNorm(features, **settings)
        self.perceptron = nnx.Sequential(
            nnx.Linear(features, 2 * features, **settings), nnx.gelu, nnx.Linear(2 * features, features, **settings)
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        tokens = tokens + self.attention(self.attention_norm(tokens))
        return tokens + self.perceptron(self.perceptron_norm(tokens))


class Classifier(nnx.Module):
    """Classifier with a token per pixel. Tokens attend to their neighborhoods; the mean of all tokens is classified."""

    def __init__(self, features: int, depth: int, kernel_size: int, arithmetic: Arithmetic, rngs: nnx.Rngs) -> None:
        self.dtype = jnp.dtype(arithmetic.dtype)
        self.embed = nnx.Conv(1, features, kernel_size=(3, 3), rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (IMAGE_SIZE, IMAGE_SIZE, features)))
        self.blocks = nnx.List([Block(features, kernel_size, arithmetic, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.head = nnx.Linear(features, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Return logits ``[batch, 10]`` for images ``[batch, 8, 8, 1]``."""
        tokens = (self.embed(images) + self.position[...]).astype(self.dtype)
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens).mean(axis=(1, 2)))


def load(seed: int) -> tuple[Data, Data]:
    """Load the training and test sets."""
    digits = load_digits()
    images = (digits.images[..., None] / 8.0 - 1.0).astype(np.float32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, digits.target, test_size=0.2, stratify=digits.target, random_state=seed
    )
    return Data(train_images, train_labels), Data(test_images, test_labels)


@nnx.jit
def train_step(model: Classifier, optimizer: nnx.Optimizer[Any], images: jax.Array, labels: jax.Array) -> jax.Array:
    """Update the model in place; return the loss."""

    def loss_of(model: Classifier) -> jax.Array:
        targets = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), alpha=0.1)
        return optax.softmax_cross_entropy(model(images), targets).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def predict(model: Classifier, images: jax.Array) -> jax.Array:
    """Return the most likely digits ``[n]``."""
    return model(images).argmax(-1)


def save_predictions(path: Path, data: Data, predictions: np.ndarray, accuracy: float) -> None:
    """Draw test images with their predictions. Images with wrong predictions come first, with red titles."""
    is_wrong = predictions != data.labels
    shown = np.argsort(~is_wrong, kind="stable")[:24]
    strokes = LinearSegmentedColormap.from_list("strokes", ["#2f7fc100", "#2f7fc1"])  # visible on pages of any color
    figure, axes = plt.subplots(3, 8, figsize=(6, 3.2), layout="constrained")
    title = f"Test accuracy {accuracy:.2%}: {is_wrong.sum()} of {len(is_wrong)} mistaken"
    figure.suptitle(title, fontsize=12, color=GRAY)
    for axis, i in zip(axes.flat, shown, strict=True):
        axis.imshow(data.images[i, ..., 0], cmap=strokes)
        axis.set_axis_off()
        text = f"{predictions[i]} for {data.labels[i]}" if is_wrong[i] else f"{predictions[i]}"
        axis.set_title(text, fontsize=11, color="#e0533d" if is_wrong[i] else GRAY)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png", transparent=True)
    plt.close(figure)


def parse_arithmetic(text: str) -> Arithmetic:
    """Parse ``backend:dtype`` for `--compare`."""
    backend, _, dtype = text.partition(":")
    if not backend or dtype not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a backend and type, such as flex-fna:float32")
    return Arithmetic(backend, dtype)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a neighborhood attention classifier on scikit-learn's handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--features", type=int, default=32, help="features per token, a multiple of 16")
    parser.add_argument("--depth", type=int, default=2, help="blocks")
    parser.add_argument("--kernel-size", type=int, default=5, help="window of the attention, at most 8")
    parser.add_argument("--seed", type=int, default=0, help="seed of split, parameters and order of images")
    parser.add_argument("--backend", default=None, help="such as cpu-fna or flex-fna (default: automatic)")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="dtype of the blocks")
    parser.add_argument(
        "--compare", type=parse_arithmetic, metavar="BACKEND:DTYPE", help="also train with this backend and dtype"
    )
    parser.add_argument("--output", type=Path, default=Path("digits.png"), help="picture of test predictions")
    options = parser.parse_args(arguments)
    if options.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {options.epochs}")
    if options.features % 16 or options.features < 16:
        parser.error(f"--features must be a multiple of 16, got {options.features}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print the accuracy after every epoch, and save the picture."""
    options = parse(arguments)
    started = time.perf_counter()
    train, test = load(options.seed)
    steps = len(train.labels) // options.batch_size
    warmup = min(2, options.epochs - 1) * steps
    schedule = optax.warmup_cosine_decay_schedule(0.0, options.learning_rate, warmup, options.epochs * steps)
    runs = [Arithmetic(options.backend, options.dtype), *([options.compare] if options.compare else [])]
    models, optimizers = [], []
    for run in runs:
        model = Classifier(options.features, options.depth, options.kernel_size, run, nnx.Rngs(options.seed))
        models.append(model)
        optimizers.append(nnx.Optimizer(model, optax.adamw(schedule, weight_decay=0.05), wrt=nnx.Param))
    curves = []  # for each epoch, the mean loss of each model
    order = np.random.default_rng(options.seed)

    columns = TextColumn("epoch {task.fields[epoch]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns) as progress:
        task = progress.add_task("", total=options.epochs * steps, epoch=1)
        for epoch in range(1, options.epochs + 1):
            progress.update(task, epoch=epoch)
            losses = []
            for batch in order.permutation(len(train.labels))[: steps * options.batch_size].reshape(steps, -1):
                images, labels = jnp.asarray(train.images[batch]), jnp.asarray(train.labels[batch])
                losses.append([train_step(*pair, images, labels) for pair in zip(models, optimizers, strict=True)])
                progress.advance(task)
            curves.append(np.mean(losses, axis=0))
            predictions = np.asarray(predict(models[0], jnp.asarray(test.images)))
            accuracy = float((predictions == test.labels).mean())
            compared = f"  loss with {runs[1]} {curves[-1][1]:.3f}" if options.compare else ""
            progress.console.print(
                f"epoch {epoch:3}  loss {curves[-1][0]:.3f}  test accuracy {accuracy:.2%}{compared}", highlight=False
            )

    save_predictions(options.output, test, predictions, accuracy)
    print(f"Test accuracy {accuracy:.2%} after {time.perf_counter() - started:.1f} s; picture: {options.output}")
    if options.compare:
        losses, expected = np.transpose(curves)
        print(f"Largest relative difference of an epoch's losses: {np.max(np.abs(losses - expected) / expected):.2%}")


if __name__ == "__main__":
    main()
