"""Published image classifiers of neighborhood attention, from their weights: NAT, DiNAT and DiNAT_s of every size.

A checkpoint is the ``state_dict`` of the authors' PyTorch model, or that of the one in Hugging Face's transformers.
Widths, depths, heads, windows and classes are those of its arrays; dilations are not among them, and are named. Nothing
is downloaded: a ``.pth`` file needs PyTorch to be read, a ``.safetensors`` file the package of that name. Without a
checkpoint weights are random, and what is printed is how long they take.

    python examples/nat_weights.py --checkpoint dinat_mini_in1k_224.pth --image photo.png
    python examples/nat_weights.py --size mini --batch 64 --dtype bf16

The models are those of https://arxiv.org/abs/2204.07143 and https://arxiv.org/abs/2209.15001.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import image as files
from timed_steps import TimedSteps

from natten_jax import na2d

#: Dilation of every other block by stage: of the models for images of 224 x 224 and of 384 x 384 pixels.
DILATIONS = {"nat": (1, 1, 1, 1), "dinat": (8, 4, 2, 1), "dinat-384": (13, 6, 3, 1)}
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
#: Statistics of ImageNet by color channel, which the models expect pixels to have.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

IMAGE_SIZE = 224
CLASSES = 1000


class Size(NamedTuple):
    """A model: features and heads of the first stage, blocks per stage, and how much wider perceptrons are."""

    width: int
    heads: int
    depths: tuple[int, ...]
    mlp_ratio: int


SIZES = {
    "mini": Size(64, 2, (3, 4, 6, 5), 3),
    "tiny": Size(64, 2, (3, 4, 18, 5), 3),
    "small": Size(96, 3, (3, 4, 18, 5), 2),
    "base": Size(128, 4, (3, 4, 18, 5), 2),
    "large": Size(192, 6, (3, 4, 18, 5), 2),
}

#: Hugging Face's names, and what they are called here.
_NAMES = (
    (r"^(di)?nat\.", ""),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.norm\.", "patch_embed.norm."),
    (r"^encoder\.levels\.(\d+)\.layers\.", r"levels.\1.blocks."),
    (r"^encoder\.levels\.", "levels."),
    (r"^layers\.", "levels."),  # DiNAT_s
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.self\.", ".attn."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head."),
)

Parameters = dict[str, jax.Array]


class Model(NamedTuple):
    """A classifier.

    Attributes:
        parameters: By the authors' names.
        depths: Blocks of each stage.
        dilations: Dilation of every other block of a stage, by stage.
    """

    parameters: Parameters
    depths: tuple[int, ...]
    dilations: tuple[int, ...]


def load(state_dict: Mapping[str, Any], dilations: str | Sequence[int]) -> Model:
    """A model from its checkpoint.

    Args:
        state_dict: Arrays, or PyTorch's tensors, by the authors' names or by Hugging Face's.
        dilations: A key of ``DILATIONS``, or the dilation of every other block of each stage.

    Raises:
        ValueError: The weights are not those of such a model.
    """
    named = {_name(name): np.asarray(array) for name, array in state_dict.items()}
    for name in [name for name in named if name.endswith(".layer_scale_parameters")]:
        prefix = name.removesuffix("layer_scale_parameters")
        named[prefix + "gamma1"], named[prefix + "gamma2"] = named.pop(name)
    for name in [name for name in named if ".attn.query." in name]:
        parts = [named.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        named[name.replace("query", "qkv")] = np.concatenate(parts)
    blocks = {
        tuple(map(int, found)) for name in named for found in re.findall(r"^levels\.(\d+)\.blocks\.(\d+)\.", name)
    }
    depths = tuple(1 + max(block for of, block in blocks if of == stage) for stage in sorted({of for of, _ in blocks}))
    for name in ("patch_embed.norm.weight", "levels.0.blocks.0.attn.rpb", "norm.weight", "head.weight"):
        if name not in named:
            raise ValueError(f"the checkpoint has no {name}: it is none of NAT, DiNAT or DiNAT_s for classification")
    steps = DILATIONS[dilations] if isinstance(dilations, str) else tuple(dilations)
    if len(steps) != len(depths):
        raise ValueError(f"dilations {steps} are of {len(steps)} stages, but the checkpoint has {len(depths)}")
    return Model({name: jnp.asarray(array) for name, array in named.items()}, depths, steps)


def _depths(names: Iterable[str]) -> tuple[int, ...]:
    """Blocks of each stage."""
    found = [re.match(r"levels\.(\d+)\.blocks\.(\d+)\.", name) for name in names]
    blocks = [tuple(map(int, each.groups())) for each in found if each]
    last: dict[int, int] = {}
    for stage, block in sorted(blocks):
        last[stage] = block
    return tuple(1 + block for block in last.values())


def _name(name: str) -> str:
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def classify(model: Model, images: jax.Array, *, backend: str | None = None) -> jax.Array:
    """Logits ``[batch, classes]`` of images ``[batch, height, width, 3]``, computed in the parameters' type.

    Args:
        model: The classifier.
        images: With the mean and deviation of ImageNet's taken out.
        backend: The backend of the attention.
    """
    parameters = model.parameters
    tokens = _tokens(parameters, images.astype(parameters["head.weight"].dtype))
    for stage, (depth, dilation) in enumerate(zip(model.depths, model.dilations, strict=True)):
        for number in range(depth):
            block = _under(parameters, f"levels.{stage}.blocks.{number}.")
            tokens = _block(block, tokens, dilation if number % 2 else 1, backend)
        tokens = _downsampled(_under(parameters, f"levels.{stage}.downsample."), tokens)
    return _linear(parameters, "head", _normalized(parameters, "norm", tokens).mean((1, 2)))


def _under(parameters: Parameters, prefix: str) -> Parameters:
    return {name.removeprefix(prefix): array for name, array in parameters.items() if name.startswith(prefix)}


def _tokens(parameters: Parameters, images: jax.Array) -> jax.Array:
    """Two convolutions of stride 2, or one of stride 4 over images that are padded to a multiple of it (DiNAT_s)."""
    if "patch_embed.proj.weight" in parameters:
        padding = [(0, -extent % 4) for extent in images.shape[1:3]]
        images = jnp.pad(images, [(0, 0), *padding, (0, 0)])
        images = _convolved(parameters, "patch_embed.proj", images, 4, 0)
    else:
        for number in range(2):
            images = _convolved(parameters, f"patch_embed.proj.{number}", images, 2, 1)
    return _normalized(parameters, "patch_embed.norm", images)


def _block(parameters: Parameters, tokens: jax.Array, dilation: int, backend: str | None) -> jax.Array:
    """Attention and a perceptron, each behind a normalization, with a factor for each feature in larger models."""
    change = _attention(_under(parameters, "attn."), _normalized(parameters, "norm1", tokens), dilation, backend)
    tokens = tokens + parameters.get("gamma1", 1) * change
    hidden = jax.nn.gelu(_linear(parameters, "mlp.fc1", _normalized(parameters, "norm2", tokens)), approximate=False)
    return tokens + parameters.get("gamma2", 1) * _linear(parameters, "mlp.fc2", hidden)


def _attention(parameters: Parameters, tokens: jax.Array, dilation: int, backend: str | None) -> jax.Array:
    """Layouts that are smaller than the dilated window are padded with zeros, which are attended to, as in training."""
    heads, places, _ = parameters["rpb"].shape
    kernel_size = (places + 1) // 2
    _, height, width, features = tokens.shape
    padding = [(0, max(kernel_size * dilation - extent, 0)) for extent in (height, width)]
    padded = jnp.pad(tokens, [(0, 0), *padding, (0, 0)])
    qkv = _linear(parameters, "qkv", padded).reshape(*padded.shape[:-1], 3, heads, features // heads)
    query, key, value = (qkv[..., part, :, :] for part in range(3))
    out = na2d(query, key, value, kernel_size, dilation=dilation, relative_bias=parameters["rpb"], backend=backend)
    return _linear(parameters, "proj", out[:, :height, :width].reshape(tokens.shape))


def _downsampled(parameters: Parameters, tokens: jax.Array) -> jax.Array:
    """Half as many rows and columns, twice as many features; of the last stage, the tokens as they are."""
    if not parameters:
        return tokens
    if parameters["reduction.weight"].ndim == 4:
        return _normalized(parameters, "norm", _convolved(parameters, "reduction", tokens, 2, 1))
    padding = [(0, extent % 2) for extent in tokens.shape[1:3]]  # DiNAT_s merges 2 x 2 tokens
    tokens = jnp.pad(tokens, [(0, 0), *padding, (0, 0)])
    corners = [tokens[:, row::2, column::2] for column in range(2) for row in range(2)]
    return _linear(parameters, "reduction", _normalized(parameters, "norm", jnp.concatenate(corners, axis=-1)))


def _linear(parameters: Parameters, name: str, array: jax.Array) -> jax.Array:
    return array @ parameters[f"{name}.weight"].T + parameters.get(f"{name}.bias", 0)


def _normalized(parameters: Parameters, name: str, array: jax.Array) -> jax.Array:
    wide = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    deviation = jnp.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    normalized = ((wide - wide.mean(-1, keepdims=True)) / deviation).astype(array.dtype)
    return normalized * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]


def _convolved(parameters: Parameters, name: str, array: jax.Array, stride: int, padding: int) -> jax.Array:
    layouts = ("NHWC", "OIHW", "NHWC")
    kernel = parameters[f"{name}.weight"]
    sides = [(padding, padding)] * 2
    out = jax.lax.conv_general_dilated(array, kernel, (stride, stride), sides, dimension_numbers=layouts)
    return out + parameters.get(f"{name}.bias", 0)


def random_weights(size: Size, kernel_size: int = 7, seed: int = 0) -> dict[str, np.ndarray]:
    """A checkpoint of NAT or DiNAT by the authors' names, of random numbers."""
    rng = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}

    def put(name: str, *shape: int, deviation: float = 0.02, mean: float = 0.0) -> None:
        weights[name] = (mean + deviation * rng.standard_normal(shape)).astype(np.float32)

    def put_linear(name: str, features_in: int, features: int) -> None:
        put(f"{name}.weight", features, features_in, deviation=features_in**-0.5)
        put(f"{name}.bias", features)

    def put_norm(name: str, features: int) -> None:
        put(f"{name}.weight", features, mean=1.0)
        put(f"{name}.bias", features)

    def put_convolution(name: str, features_in: int, features: int, *, bias: bool = True) -> None:
        put(f"{name}.weight", features, features_in, 3, 3, deviation=(9 * features_in) ** -0.5)
        if bias:
            put(f"{name}.bias", features)

    width = size.width
    put_convolution("patch_embed.proj.0", 3, width // 2)
    put_convolution("patch_embed.proj.1", width // 2, width)
    put_norm("patch_embed.norm", width)
    for stage, depth in enumerate(size.depths):
        if stage:
            put_convolution(f"levels.{stage - 1}.downsample.reduction", width, 2 * width, bias=False)
            width *= 2
            put_norm(f"levels.{stage - 1}.downsample.norm", width)
        for number in range(depth):
            block = f"levels.{stage}.blocks.{number}."
            put_norm(f"{block}norm1", width)
            put_linear(f"{block}attn.qkv", width, 3 * width)
            put(f"{block}attn.rpb", size.heads * 2**stage, *(2 * kernel_size - 1,) * 2)
            put_linear(f"{block}attn.proj", width, width)
            put_norm(f"{block}norm2", width)
            put_linear(f"{block}mlp.fc1", width, size.mlp_ratio * width)
            put_linear(f"{block}mlp.fc2", size.mlp_ratio * width, width)
    put_norm("norm", width)
    put_linear("head", width, CLASSES)
    return weights


def read(path: Path) -> Mapping[str, Any]:
    """The arrays of a file."""
    if path.suffix == ".npz":
        return dict(np.load(path))
    if path.suffix == ".safetensors":
        from safetensors.numpy import load_file

        return load_file(path)
    import torch

    found = torch.load(path, map_location="cpu", weights_only=True)
    return found.get("model", found.get("state_dict", found))


def pixels(path: Path) -> jax.Array:
    """The middle of an image as the models expect it, ``[1, size, size, 3]``."""
    image = np.asarray(files.imread(path))
    image = image / 255 if image.dtype == np.uint8 else image
    image = np.repeat(image[..., None], 3, axis=-1) if image.ndim == 2 else image[..., :3]
    side = min(image.shape[:2])
    top, left = ((extent - side) // 2 for extent in image.shape[:2])
    square = jnp.asarray(image[top : top + side, left : left + side], jnp.float32)
    square = jax.image.resize(square, (IMAGE_SIZE, IMAGE_SIZE, 3), "bicubic")
    return ((square - jnp.array(MEAN)) / jnp.array(DEVIATION))[None]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Classify images with NAT, DiNAT or DiNAT_s, from published weights.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, help=".pth, .safetensors or .npz file; random weights if not given")
    parser.add_argument("--image", type=Path, help="what to classify; random pixels if not given")
    parser.add_argument("--size", default="mini", choices=SIZES, help="of the model with random weights")
    parser.add_argument("--dilations", default="dinat", choices=DILATIONS, help="kind of the model")
    parser.add_argument("--batch", type=int, default=1, help="random images")
    parser.add_argument("--dtype", default="fp32", choices=DTYPES, help="type that is computed in")
    parser.add_argument("--backend", default=None, help="such as cpu-fna or flex-fna; the best one if not given")
    parser.add_argument("--profile", action="store_true", help="tell how much of the time is attention")
    options = parser.parse_args(arguments)
    if options.batch < 1:
        parser.error(f"--batch must be at least 1, got {options.batch}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the five most likely classes of an image, or how long random ones take."""
    options = parse(arguments)
    weights = random_weights(SIZES[options.size]) if options.checkpoint is None else read(options.checkpoint)
    model = load(weights, options.dilations)
    model = model._replace(
        parameters={name: each.astype(DTYPES[options.dtype]) for name, each in model.parameters.items()}
    )
    count = sum(array.size for array in model.parameters.values())
    print(f"{count / 1e6:.2f} M parameters, blocks {model.depths}, {options.dtype}, {jax.devices()[0].device_kind}")
    if options.image is not None:
        probabilities = jax.nn.softmax(classify(model, pixels(options.image), backend=options.backend)[0])
        for label in np.argsort(probabilities)[::-1][:5]:
            print(f"class {label:>4}: {probabilities[label]:.1%}")
        return
    images = jax.random.normal(jax.random.key(0), (options.batch, IMAGE_SIZE, IMAGE_SIZE, 3))

    def step(parameters: Parameters, images: jax.Array) -> tuple[Parameters, jax.Array]:
        return parameters, classify(model._replace(parameters=parameters), images, backend=options.backend).sum()

    steps = TimedSteps(step, model.parameters)
    steps.repeat(10, images)
    print(f"{options.batch} images of {IMAGE_SIZE} x {IMAGE_SIZE}: {steps.median_seconds * 1e3:.2f} ms")
    if options.profile:
        print(steps.profile(images))


if __name__ == "__main__":
    main()
