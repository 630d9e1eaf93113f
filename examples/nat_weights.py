"""Run image classifiers with neighborhood attention from their published weights: NAT, DiNAT and DiNAT_s of any size.

A checkpoint is the ``state_dict`` of the authors' PyTorch model or of a model in Hugging Face's transformers. These
models of transformers are supported: ``ForImageClassification``, ``Model`` and ``Backbone``. The names and shapes of
the arrays determine the widths, depths, heads, windows and classes. The dilations, the activation and the epsilon of
the normalizations are read from Hugging Face's ``config.json`` in the folder of the weights. Without this file, the
activation is GELU, and the epsilon is 1e-5. The dilations must then be given with ``--dilations``, unless the names of
the arrays begin with ``nat.``. Unsupported features raise an error.

Nothing is downloaded. Reading a ``.pth`` or ``.bin`` file needs PyTorch, and reading a ``.safetensors`` file needs the
package ``safetensors``. Without ``--checkpoint``, the weights are random. Without ``--image``, the time of a batch of
random images is printed.

    python examples/nat_weights.py --checkpoint dinat-mini/model.safetensors --image photo.png
    python examples/nat_weights.py --checkpoint dinat_mini_in1k_224.pth --dilations dinat --image photo.png
    python examples/nat_weights.py --size mini --batch 64 --dtype bf16

The models are described in https://arxiv.org/abs/2204.07143 and https://arxiv.org/abs/2209.15001.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import image as files
from timed_steps import TimedSteps

from natten_jax import na2d

#: Dilation of every other block, by stage. ``dinat`` is for images of 224 x 224 pixels, and ``dinat-384`` is for images
#: of 384 x 384 pixels.
DILATIONS = {"nat": (1, 1, 1, 1), "dinat": (8, 4, 2, 1), "dinat-384": (13, 6, 3, 1)}
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
#: Mean and standard deviation of ImageNet by color channel. The models expect pixels that are normalized with these
#: values.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

#: Heights and widths, in pixels, of the square images of the published models.
IMAGE_SIZES = (224, 384)
CLASSES = 1000

_tanh_gelu = functools.partial(jax.nn.gelu, approximate=True)
_gelu = functools.partial(jax.nn.gelu, approximate=False)
#: Activations by their names in transformers.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": _gelu,
    "gelu_10": lambda array: jnp.clip(_gelu(array), -10, 10),
    "gelu_accurate": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_new": _tanh_gelu,
    "gelu_python": _gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "leaky_relu": jax.nn.leaky_relu,
    "linear": lambda array: array,
    "mish": jax.nn.mish,
    "quick_gelu": lambda array: array * jax.nn.sigmoid(1.702 * array),
    "relu": jax.nn.relu,
    "relu2": lambda array: jnp.square(jax.nn.relu(array)),
    "relu6": jax.nn.relu6,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
}


class Size(NamedTuple):
    """Size of a model: features and heads of the first stage, blocks per stage, and the width ratio of MLPs.

    The width ratio is the number of hidden features, divided by the number of input features.
    """

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

#: Regular expressions and replacements. They convert the array names of Hugging Face and of DiNAT_s to the names that
#: the authors' NAT has.
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
Arrays = Mapping[str, np.ndarray]
Dilations = str | Sequence[int | Sequence[int]]


class Architecture(NamedTuple):
    """Properties of a model that follow from the names and shapes of its arrays.

    Attributes:
        channels: Number of channels of an image.
        width: Number of features of the first stage. Each later stage has twice the features of the previous stage.
        depths: Number of blocks of each stage.
        heads: Number of attention heads of each stage.
        hidden: Number of hidden features of the MLPs of each stage.
        kernel_size: Size of the attention window in both dimensions.
        merges: True for DiNAT_s: patches are 4 x 4 pixels, and downsampling merges 2 x 2 tokens.
        qkv_bias: True if the projections to query, key and value have a bias.
        layer_scale: True if the output of every attention and MLP is multiplied by a factor per feature.
        stage_norms: Stages (``stem``, ``stage1``, ...) whose feature maps are normalized. Empty unless the checkpoint
            is a backbone of transformers. A backbone has no final normalization and no classification head.
        classes: Number of classes, or 0 without a classification head.
    """

    channels: int
    width: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    hidden: tuple[int, ...]
    kernel_size: int
    merges: bool = False
    qkv_bias: bool = True
    layer_scale: bool = False
    stage_norms: tuple[str, ...] = ()
    classes: int = CLASSES

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Architecture:
        """Return the architecture of a checkpoint with the authors' names.

        Only the shapes that determine the architecture are read.
        """

        def shape(name: str, dimensions: int) -> tuple[int, ...]:
            if name not in arrays or arrays[name].ndim != dimensions:
                message = f"the checkpoint has no {name} of {dimensions} dimensions: it is not a NAT, DiNAT or DiNAT_s"
                raise ValueError(message)
            return arrays[name].shape

        (width,) = shape("patch_embed.norm.weight", 1)
        merges = "patch_embed.proj.weight" in arrays
        channels = shape(f"patch_embed.proj.{'' if merges else '0.'}weight", 4)[1]
        kernel_size = (shape("levels.0.blocks.0.attn.rpb", 3)[1] + 1) // 2
        blocks = {found[0] for found in map(re.compile(r"levels\.(\d+)\.blocks\.\d+\.").match, arrays) if found}
        stages = range(len({block.split(".")[1] for block in blocks}))
        norms = (name.split(".") for name in arrays if name.startswith("hidden_states_norms."))
        stage_norms = tuple(stage for _, stage, kind in norms if kind == "weight")
        return cls(
            channels,
            width,
            tuple(sum(block.startswith(f"levels.{stage}.") for block in blocks) for stage in stages),
            tuple(shape(f"levels.{stage}.blocks.0.attn.rpb", 3)[0] for stage in stages),
            tuple(shape(f"levels.{stage}.blocks.0.mlp.fc1.weight", 2)[0] for stage in stages),
            kernel_size,
            merges,
            any(name.endswith(".attn.qkv.bias") for name in arrays),
            any(name.endswith(".gamma1") for name in arrays),
            stage_norms,
            shape("head.weight", 2)[0] if "head.weight" in arrays and not stage_norms else 0,
        )

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of features of each stage."""
        return tuple(self.width * 2**stage for stage in range(len(self.depths)))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every array of the model."""
        shapes: dict[str, tuple[int, ...]] = {}

        def put(name: str, *shape: int, bias: bool = True) -> None:
            shapes[f"{name}.weight"] = shape
            if bias:
                shapes[f"{name}.bias"] = shape[:1]

        if self.merges:
            put("patch_embed.proj", self.width, self.channels, 4, 4)
        else:
            put("patch_embed.proj.0", self.width // 2, self.channels, 3, 3)
            put("patch_embed.proj.1", self.width, self.width // 2, 3, 3)
        put("patch_embed.norm", self.width)
        for stage, width in enumerate(self.widths):
            for number in range(self.depths[stage]):
                block = f"levels.{stage}.blocks.{number}."
                put(f"{block}norm1", width)
                put(f"{block}attn.qkv", 3 * width, width, bias=self.qkv_bias)
                shapes[f"{block}attn.rpb"] = (self.heads[stage], *(2 * self.kernel_size - 1,) * 2)
                put(f"{block}attn.proj", width, width)
                put(f"{block}norm2", width)
                put(f"{block}mlp.fc1", self.hidden[stage], width)
                put(f"{block}mlp.fc2", width, self.hidden[stage])
                if self.layer_scale:
                    shapes |= {f"{block}gamma1": (width,), f"{block}gamma2": (width,)}
            if stage + 1 < len(self.depths):
                kernel = (4 * width,) if self.merges else (width, 3, 3)
                put(f"levels.{stage}.downsample.reduction", 2 * width, *kernel, bias=False)
                put(f"levels.{stage}.downsample.norm", (4 if self.merges else 2) * width)
        widths = {"stem": self.width} | {f"stage{stage}": width for stage, width in enumerate(self.widths, 1)}
        for name in self.stage_norms:
            put(f"hidden_states_norms.{name}", widths.get(name, 0))
        if not self.stage_norms:
            put("norm", self.widths[-1])
        if self.classes:
            put("head", self.classes, self.widths[-1])
        return shapes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["parameters"],
    meta_fields=["dilations", "activation", "epsilon"],
)
@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model. It is a pytree, so `jax.jit` takes it as an argument.

    Attributes:
        parameters: Arrays, by the authors' names.
        dilations: Dilation of each block, by stage.
        activation: Key of ``ACTIVATIONS``.
        epsilon: Value that the normalizations in blocks and the final normalization add to variances. All other
            normalizations add 1e-5.
    """

    parameters: Parameters
    dilations: tuple[tuple[int, ...], ...]
    activation: str = "gelu"
    epsilon: float = 1e-5

    @property
    def depths(self) -> tuple[int, ...]:
        """Number of blocks of each stage."""
        return tuple(map(len, self.dilations))

    @property
    def channels(self) -> int:
        """Number of channels of an image."""
        names = "patch_embed.proj.weight", "patch_embed.proj.0.weight"
        return next(self.parameters[name].shape[1] for name in names if name in self.parameters)

    @property
    def image_size(self) -> int:
        """Smallest published image size at which the dilated windows of the first stage fit into the stage's layout.

        This layout has a fourth of the image's rows and columns. If no size is large enough, the largest is returned.
        """
        window = (self.parameters["levels.0.blocks.0.attn.rpb"].shape[1] + 1) // 2 * max(self.dilations[0])
        return next((size for size in IMAGE_SIZES if window <= size // 4), IMAGE_SIZES[-1])


def load(
    state_dict: Mapping[str, Any], dilations: Dilations | None = None, *, config: Mapping[str, Any] | None = None
) -> Model:
    """Load a model from its checkpoint.

    Args:
        state_dict: Arrays or PyTorch tensors, by the authors' names or by Hugging Face's names.
        dilations: A key of ``DILATIONS``, or a sequence with an entry per stage. An entry is the dilation of every
            other block, or a list of the dilations of all blocks. If ``None``, the dilations are read from ``config``.
            If ``config`` is also ``None``, names that begin with ``nat.`` imply dilations of 1.
        config: Contents of Hugging Face's ``config.json``. If ``None``, the activation is GELU, and epsilons are 1e-5.
            This default is reported as a warning if the weights have Hugging Face's names.

    Raises:
        TypeError: ``state_dict`` or ``config`` is not a mapping, a weight is not an array of floats, or ``dilations``
            is neither a name nor a sequence.
        ValueError: The weights are not from a NAT, DiNAT or DiNAT_s; ``dilations`` is invalid; ``dilations`` or
            ``config`` contradicts the weights; or ``config`` requires an unsupported feature.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a mapping of names to weights, got {type(state_dict).__name__}")
    if unnamed := [name for name in state_dict if not isinstance(name, str)]:
        raise TypeError(f"names of state_dict must be strings, got {unnamed[0]!r}")
    kinds = {name.split(".")[0] for name in state_dict} & {"nat", "dinat"}
    if len(kinds) > 1:
        raise ValueError("names of the checkpoint begin with nat. and with dinat., which are two models")
    kind = kinds.pop() if kinds else None
    arrays = _renamed(state_dict)
    architecture = Architecture.from_arrays(arrays)
    if config is None:
        config = {} if kind is None else {"model_type": kind}
        if any(".attention.self." in name for name in state_dict):
            undilated = "; dilations of 1, because names begin with nat." if kind == "nat" else ""
            warnings.warn(
                f"weights from Hugging Face without their config.json: assuming GELU and epsilons of 1e-5{undilated}",
                stacklevel=2,
            )
    elif isinstance(config, Mapping):
        _check_config(config, architecture, kind)
    else:
        given = type(config).__name__
        raise TypeError(f"config must be a mapping, such as config.json or config.to_dict(), got {given}")
    _check_shapes(arrays, architecture)
    layers = _block_dilations(config, dilations, architecture)
    parameters = {name: jnp.asarray(array) for name, array in arrays.items()}
    return Model(parameters, layers, config.get("hidden_act", "gelu"), float(config.get("layer_norm_eps", 1e-5)))


def _renamed(state_dict: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint by the authors' names.

    Separate weights of query, key and value are concatenated.
    """
    arrays: dict[str, np.ndarray] = {}
    for given, weight in state_dict.items():
        name = given
        for pattern, replacement in _NAMES:
            name = re.sub(pattern, replacement, name)
        if name in arrays:
            raise ValueError(f"the checkpoint has {name} twice, as {given} and by another name")
        arrays[name] = _float_array(given, weight)
    scales = [name for name in arrays if name.endswith(".layer_scale_parameters")]
    for name in [name for name in scales if arrays[name].shape[:1] == (2,)]:
        prefix = name.removesuffix("layer_scale_parameters")
        arrays[f"{prefix}gamma1"], arrays[f"{prefix}gamma2"] = arrays.pop(name)
    for name in [name for name in arrays if ".attn.query." in name]:
        names = [name.replace("query", part) for part in ("query", "key", "value")]
        if missing := [part for part in names if part not in arrays]:
            raise ValueError(f"the checkpoint has {name}, but no {missing[0]}")
        if len({arrays[part].shape for part in names}) > 1:
            raise ValueError(f"{', '.join(names)} have different shapes")
        arrays[name.replace("query", "qkv")] = np.concatenate([arrays.pop(part) for part in names])
    return arrays


def _float_array(name: str, weight: Any) -> np.ndarray:
    """Convert a weight to a NumPy array."""
    if hasattr(weight, "detach"):  # NumPy rejects PyTorch tensors that need gradients, are on GPUs or are bfloat16
        weight = weight.detach().cpu()
        weight = weight.float() if "bfloat16" in str(weight.dtype) else weight
    array = np.asarray(weight)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be an array of floats, got {type(weight).__name__} of dtype {array.dtype}")
    return array


def _check_shapes(arrays: Arrays, architecture: Architecture) -> None:
    """Raise an error if arrays are missing, are not part of the architecture, or do not have the expected shapes."""
    expected = architecture.shapes()
    for problem, names in (("no", expected.keys() - arrays.keys()), ("an unknown", arrays.keys() - expected.keys())):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"the checkpoint has {problem} {min(names)}{more}")
    for name, shape in expected.items():
        if arrays[name].shape != shape:
            raise ValueError(f"{name} has shape {arrays[name].shape}, but other weights require {shape}")
    for stage, (width, heads) in enumerate(zip(architecture.widths, architecture.heads, strict=True)):
        if heads == 0 or width % heads:
            raise ValueError(f"{heads} heads do not divide the {width} features of stage {stage}")


def _check_config(config: Mapping[str, Any], architecture: Architecture, kind: str | None) -> None:
    """Raise an error if a configuration contradicts the weights, or requires an unsupported feature."""

    def refuse(key: str, reason: str) -> ValueError:
        return ValueError(f"config.json has {key} {config.get(key)!r}, {reason}")

    if config.get("model_type") not in ("nat", "dinat"):
        raise refuse("model_type", "which must be 'nat' or 'dinat'")
    if kind not in (None, config["model_type"]):
        raise refuse("model_type", f"but names of the weights begin with {kind}.")
    if config.get("quantization_config"):
        raise refuse("quantization_config", "but quantized models are not supported")
    if not isinstance(activation := config.get("hidden_act", "gelu"), str) or activation not in ACTIVATIONS:
        raise refuse("hidden_act", f"which must be one of {', '.join(ACTIVATIONS)}")
    for key in ("layer_norm_eps", "mlp_ratio", "layer_scale_init_value"):
        number = config.get(key, 0.0)
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) < 1e30:
            raise refuse(key, "which must be a finite number")
    if config.get("layer_norm_eps", 0.0) < 0:
        raise refuse("layer_norm_eps", "which must not be negative")
    facts = {
        "patch_size": 4,
        "num_channels": architecture.channels,
        "embed_dim": architecture.width,
        "depths": architecture.depths,
        "num_heads": architecture.heads,
        "kernel_size": architecture.kernel_size,
        "qkv_bias": architecture.qkv_bias,
    }
    for key, fact in facts.items():
        given = config.get(key, fact)
        if (tuple(given) if isinstance(given, list) else given) != fact:
            raise refuse(key, f"but the weights have {fact!r}")
    if "mlp_ratio" in config:
        hidden = tuple(int(config["mlp_ratio"] * width) for width in architecture.widths)
        if hidden != architecture.hidden:
            raise refuse("mlp_ratio", f"but the MLPs of the weights have {architecture.hidden} hidden features")
    if (config.get("layer_scale_init_value", architecture.layer_scale) > 0) != architecture.layer_scale:
        has = "a" if architecture.layer_scale else "no"
        raise refuse("layer_scale_init_value", f"but the weights have {has} layer scale")
    stages, normalized = config.get("out_features"), architecture.stage_norms
    is_list = isinstance(stages, list | tuple)
    if normalized and stages is not None and not (is_list and sorted(map(str, stages)) == sorted(normalized)):
        raise refuse("out_features", f"but the weights have normalizations for {normalized}")


def _block_dilations(
    config: Mapping[str, Any], dilations: Dilations | None, architecture: Architecture
) -> tuple[tuple[int, ...], ...]:
    """Return the dilation of each block, by stage.

    Raise an error if ``dilations``, ``config`` and the kind of model disagree.
    """
    kind, depths = config.get("model_type"), architecture.depths
    ones = tuple((1,) * depth for depth in depths)
    if dilations == "dinat-384" and architecture.kernel_size != 7:
        raise ValueError("dilations 'dinat-384' are those of 7 x 7 windows; published models of 11 x 11 have 'dinat'")
    if "dilations" in config:
        stages = config["dilations"]
        if not isinstance(stages, list | tuple) or not all(isinstance(stage, list | tuple) for stage in stages):
            raise ValueError(f"config.json has dilations {stages!r}, which must be a list for each stage")
        # Like transformers, ignore additional entries at the ends of the lists.
        known = _as_blocks([stage[:depth] for stage, depth in zip(stages, depths, strict=False)], depths)
        if kind == "nat" and known != ones:
            raise ValueError(f"config.json has dilations {stages!r}, but those of this nat model are {ones}")
    elif kind == "nat":
        known = ones
    elif dilations is None:
        raise ValueError(
            "dilations are not among the weights: name them (nat, dinat or dinat-384; --dilations), or pass a list for "
            "each stage or Hugging Face's config.json, which the program reads from the folder of the weights"
        )
    elif kind == "dinat" and dilations == "nat":
        raise ValueError("dilations are 'nat', but the weights are from a DiNAT")
    else:
        known = _as_blocks(dilations, depths)
    if dilations is not None and (given := _as_blocks(dilations, depths)) != known:
        raise ValueError(f"dilations are {dilations!r}, which is {given}, but those of this {kind} model are {known}")
    return known


def _as_blocks(dilations: Dilations, depths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the dilation of each block, by stage."""
    if isinstance(dilations, str):
        if dilations not in DILATIONS:
            raise ValueError(f"dilations must be one of {', '.join(DILATIONS)}, or numbers, got {dilations!r}")
        dilations = DILATIONS[dilations]
    if not isinstance(dilations, Iterable):
        raise TypeError(f"dilations must be a name or a sequence with an entry per stage, got {dilations!r}")
    stages = tuple(dilations)
    if len(stages) != len(depths):
        raise ValueError(f"dilations {dilations} are of {len(stages)} stages, but the checkpoint has {len(depths)}")
    blocks = []
    for stage, (given, depth) in enumerate(zip(stages, depths, strict=True)):
        alternating = [given if block % 2 else 1 for block in range(depth)]
        numbers: list[Any] = [*given] if isinstance(given, Iterable) else alternating
        if not all(isinstance(each, int | np.integer) and not isinstance(each, bool) and each > 0 for each in numbers):
            raise ValueError(f"dilations of stage {stage} must be integers of at least 1, got {given!r}")
        if len(numbers) != depth:
            raise ValueError(f"dilations of stage {stage} are {len(numbers)} numbers, but it has {depth} blocks")
        blocks.append(tuple(map(int, numbers)))
    return tuple(blocks)


class Features(NamedTuple):
    """Tokens ``[batch, rows, columns, features]`` that a model computes.

    Attributes:
        hidden_states: Tokens after the embedding, and tokens after the downsampling of each stage, as in transformers'
            ``Model``.
        feature_maps: Tokens after the embedding (``stem``), and tokens before the downsampling of each stage
            (``stage1``, ...), by name. In a backbone of transformers, feature maps in ``out_features`` are normalized.
        tokens: Tokens of the last stage. They are normalized unless the checkpoint is a backbone.
        pooled: The mean of ``tokens``, ``[batch, features]``.
    """

    hidden_states: tuple[jax.Array, ...]
    feature_maps: dict[str, jax.Array]
    tokens: jax.Array
    pooled: jax.Array


def classify(model: Model, images: jax.Array, *, backend: str | None = None) -> jax.Array:
    """Return the logits ``[batch, classes]`` of images, in the dtype of the parameters.

    Args:
        model: The classifier.
        images: ``[batch, height, width, channels]``. Floats, normalized with the mean and standard deviation of
            ImageNet.
        backend: Backend of the attention. ``None`` selects the default backend.

    Raises:
        TypeError: The images are not floats.
        ValueError: The model has no classification head, or the images do not have the documented shape.
    """
    if "head.weight" not in model.parameters:
        raise ValueError("the checkpoint has no classification head: features(model, images) returns its tokens")
    return _linear(model.parameters, "head", features(model, images, backend=backend).pooled)


def features(model: Model, images: jax.Array, *, backend: str | None = None) -> Features:
    """Return the tokens of every stage, in the dtype of the parameters.

    Args:
        model: The model, with or without a classification head.
        images: ``[batch, height, width, channels]``. Floats, normalized with the mean and standard deviation of
            ImageNet.
        backend: Backend of the attention. ``None`` selects the default backend.
    """
    parameters = model.parameters

    def mapped(stage: str, tokens: jax.Array) -> jax.Array:
        name = f"hidden_states_norms.{stage}"
        return _normalized(parameters, name, tokens) if f"{name}.weight" in parameters else tokens

    tokens = _tokens(model, images)
    hidden_states, feature_maps = [tokens], {"stem": mapped("stem", tokens)}
    for stage, dilations in enumerate(model.dilations):
        for number, dilation in enumerate(dilations):
            tokens = _block(model, f"levels.{stage}.blocks.{number}.", tokens, dilation, backend)
        feature_maps[f"stage{stage + 1}"] = mapped(f"stage{stage + 1}", tokens)
        tokens = _downsampled(_under(parameters, f"levels.{stage}.downsample."), tokens)
        hidden_states.append(tokens)
    if "norm.weight" in parameters:
        tokens = _normalized(parameters, "norm", tokens, model.epsilon)
    return Features(tuple(hidden_states), feature_maps, tokens, tokens.mean((1, 2)))


def _under(parameters: Parameters, prefix: str) -> Parameters:
    return {name.removeprefix(prefix): array for name, array in parameters.items() if name.startswith(prefix)}


def _tokens(model: Model, images: jax.Array) -> jax.Array:
    """Embed images as tokens, by two convolutions of stride 2.

    DiNAT_s pads images to multiples of 4 pixels, and has a single convolution of stride 4.
    """
    parameters, channels = model.parameters, model.channels
    if images.ndim != 4 or images.shape[-1] != channels:
        hint = ": move the channels to the end" if images.shape[1:2] == (channels,) else ""
        raise ValueError(f"images must be [batch, height, width, {channels}], got shape {images.shape}{hint}")
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise TypeError(f"images must be floats, normalized with a mean and a deviation, got dtype {images.dtype}")
    images = images.astype(parameters["patch_embed.norm.weight"].dtype)
    if "patch_embed.proj.weight" in parameters:
        padding = [(0, -extent % 4) for extent in images.shape[1:3]]
        images = jnp.pad(images, [(0, 0), *padding, (0, 0)])
        images = _convolved(parameters, "patch_embed.proj", images, 4, 0)
    else:
        for number in range(2):
            images = _convolved(parameters, f"patch_embed.proj.{number}", images, 2, 1)
    return _normalized(parameters, "patch_embed.norm", images)


def _block(model: Model, prefix: str, tokens: jax.Array, dilation: int, backend: str | None) -> jax.Array:
    """Apply attention and an MLP, each with pre-normalization and a residual connection.

    Models with a layer scale multiply the outputs of attention and MLP by a factor per feature.
    """
    parameters = _under(model.parameters, prefix)
    normalized = _normalized(parameters, "norm1", tokens, model.epsilon)
    change = _attention(_under(parameters, "attn."), normalized, dilation, backend)
    tokens = tokens + parameters.get("gamma1", 1) * change
    hidden = _linear(parameters, "mlp.fc1", _normalized(parameters, "norm2", tokens, model.epsilon))
    hidden = ACTIVATIONS[model.activation](hidden)
    return tokens + parameters.get("gamma2", 1) * _linear(parameters, "mlp.fc2", hidden)


def _attention(parameters: Parameters, tokens: jax.Array, dilation: int, backend: str | None) -> jax.Array:
    """Apply attention. Layouts that are smaller than the dilated window are padded with zero tokens.

    As in training, queries attend to these zero tokens.
    """
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
    """Halve the rows and columns of tokens, and double the features. Return tokens of the last stage unchanged."""
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


def _normalized(parameters: Parameters, name: str, array: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    wide = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    deviation = jnp.sqrt(wide.var(-1, keepdims=True) + epsilon)
    normalized = ((wide - wide.mean(-1, keepdims=True)) / deviation).astype(array.dtype)
    return normalized * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]


def _convolved(parameters: Parameters, name: str, array: jax.Array, stride: int, padding: int) -> jax.Array:
    layouts = ("NHWC", "OIHW", "NHWC")
    kernel = parameters[f"{name}.weight"]
    sides = [(padding, padding)] * 2
    out = jax.lax.conv_general_dilated(array, kernel, (stride, stride), sides, dimension_numbers=layouts)
    return out + parameters.get(f"{name}.bias", 0)


def random_weights(size: Size, kernel_size: int = 7, seed: int = 0) -> dict[str, np.ndarray]:
    """Return a checkpoint of NAT or DiNAT with random weights, by the authors' names."""
    rng = np.random.default_rng(seed)
    factors = [2**stage for stage in range(len(size.depths))]
    heads = tuple(size.heads * factor for factor in factors)
    hidden = tuple(size.mlp_ratio * size.width * factor for factor in factors)
    weights: dict[str, np.ndarray] = {}
    for name, shape in Architecture(3, size.width, size.depths, heads, hidden, kernel_size).shapes().items():
        is_matrix = len(shape) > 1 and name.endswith("weight")
        deviation = math.prod(shape[1:]) ** -0.5 if is_matrix else 0.02
        mean = 1.0 if len(shape) == 1 and name.endswith("weight") else 0.0
        weights[name] = (mean + deviation * rng.standard_normal(shape)).astype(np.float32)
    return weights


def read(path: Path) -> Mapping[str, Any]:
    """Read the arrays of a checkpoint file."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name the file with the weights")
    if path.suffix == ".npz":
        return dict(np.load(path))
    if path.suffix == ".safetensors":
        arrays: Mapping[str, Any] = _package("safetensors.numpy", path).load_file(path)
        return arrays
    found: dict[str, Any] = _package("torch", path).load(path, map_location="cpu", weights_only=True)
    weights: Mapping[str, Any] = found.get("model", found.get("state_dict", found))
    return weights


def _package(name: str, path: Path) -> ModuleType:
    """Import the package that reads a file."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.split(".")[0]
        raise ModuleNotFoundError(f"{path.name} needs {package} to be read: pip install {package} ({error})") from None


def read_config(path: Path) -> Mapping[str, Any] | None:
    """Return the contents of ``config.json`` in the folder of the file ``path``, or ``None`` if it is missing."""
    path = path.with_name("config.json")
    if not path.exists():
        return None
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must have names and values, got {config!r}")
    return config


def pixels(path: Path, size: int) -> jax.Array:
    """Read an image file; return its central square, resized and normalized, as ``[1, size, size, 3]``."""
    image = np.asarray(files.imread(path))
    image = image / 255 if image.dtype == np.uint8 else image
    image = np.repeat(image[..., None], 3, axis=-1) if image.ndim == 2 else image[..., :3]
    side = min(image.shape[:2])
    top, left = ((extent - side) // 2 for extent in image.shape[:2])
    square = jnp.asarray(image[top : top + side, left : left + side], jnp.float32)
    square = jax.image.resize(square, (size, size, 3), "bicubic")
    return ((square - jnp.array(MEAN)) / jnp.array(DEVIATION))[None]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Classify images with NAT, DiNAT or DiNAT_s, from published weights.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, help=".pth, .safetensors or .npz file; random weights if not given")
    parser.add_argument("--image", type=Path, help="image to classify; random pixels if not given")
    parser.add_argument("--size", default="mini", choices=SIZES, help="size of the model with random weights")
    parser.add_argument("--dilations", choices=DILATIONS, help="kind of model; from the checkpoint if not given")
    parser.add_argument("--image-size", type=int, help="height and width in pixels; as published if not given")
    parser.add_argument("--batch", type=int, default=1, help="number of random images")
    parser.add_argument("--dtype", default="fp32", choices=DTYPES, help="dtype of the computation")
    parser.add_argument("--backend", default=None, help="such as cpu-fna or flex-fna (default: automatic)")
    parser.add_argument("--profile", action="store_true", help="print the share of attention in the time")
    options = parser.parse_args(arguments)
    if options.batch < 1:
        parser.error(f"--batch must be at least 1, got {options.batch}")
    if options.image_size is not None and options.image_size < 1:
        parser.error(f"--image-size must be at least 1, got {options.image_size}")
    return options


def read_model(options: argparse.Namespace) -> Model:
    """Load a model from a checkpoint and its configuration, or with random weights."""
    if options.checkpoint is None:
        model = load(random_weights(SIZES[options.size]), options.dilations or "dinat")
    else:
        model = load(read(options.checkpoint), options.dilations, config=read_config(options.checkpoint))
    parameters = {name: each.astype(DTYPES[options.dtype]) for name, each in model.parameters.items()}
    return dataclasses.replace(model, parameters=parameters)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the five most likely classes of an image, or the time of a batch of random images."""
    options = parse(arguments)
    try:
        model = read_model(options)
        size = options.image_size or model.image_size
        count = sum(array.size for array in model.parameters.values())
        print(f"{count / 1e6:.2f} M parameters, blocks {model.depths}, {options.dtype}, {jax.devices()[0].device_kind}")
        if options.image is not None:
            probabilities = jax.nn.softmax(classify(model, pixels(options.image, size), backend=options.backend)[0])
            for label in np.argsort(probabilities)[::-1][:5]:
                print(f"class {label:>4}: {probabilities[label]:.1%}")
            return
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise SystemExit(f"nat_weights.py: {error}") from None
    images = jax.random.normal(jax.random.key(0), (options.batch, size, size, model.channels))

    def step(parameters: Parameters, images: jax.Array) -> tuple[Parameters, jax.Array]:
        with_parameters = dataclasses.replace(model, parameters=parameters)
        if "head.weight" in parameters:
            return parameters, classify(with_parameters, images, backend=options.backend).sum()
        return parameters, features(with_parameters, images, backend=options.backend).pooled.sum()

    steps = TimedSteps(step, model.parameters)
    steps.repeat(10, images)
    print(f"{options.batch} images of {size} x {size}: {steps.median_seconds * 1e3:.2f} ms")
    if options.profile:
        print(steps.profile(images))


if __name__ == "__main__":
    main()
