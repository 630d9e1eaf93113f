"""Published classifiers from their weights, beside a forward pass of the same weights in float64 and NumPy."""

from __future__ import annotations

import math
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import oracle
from tests.support.programs import run_command

for package in ("matplotlib", "optax"):
    pytest.importorskip(package)

EXAMPLES = Path(__file__).parents[2] / "examples"
Weights = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return runpy.run_path(str(EXAMPLES / "nat_weights.py"))
    finally:
        sys.path.remove(str(EXAMPLES))


def linear(weights: Weights, name: str, array: np.ndarray) -> np.ndarray:
    out = array @ weights[f"{name}.weight"].astype(np.float64).T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def normalized(weights: Weights, name: str, array: np.ndarray) -> np.ndarray:
    centered = array - array.mean(-1, keepdims=True)
    unit = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
    return unit * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def convolved(weights: Weights, name: str, array: np.ndarray, stride: int, padding: int) -> np.ndarray:
    kernel = weights[f"{name}.weight"].astype(np.float64)
    padded = np.pad(array, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
    patches = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape[2:], axis=(1, 2))[:, ::stride, ::stride]
    out = np.einsum("bhwiyx,oiyx->bhwo", patches, kernel)
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def attended(weights: Weights, prefix: str, tokens: np.ndarray, dilation: int) -> np.ndarray:
    """Neighborhood attention with a relative bias, of tokens that are padded to the window at least."""
    table = weights[f"{prefix}rpb"]
    heads, size = table.shape[0], (table.shape[1] + 1) // 2
    _, height, width, features = tokens.shape
    more = [(0, max(0, size * dilation - extent)) for extent in (height, width)]
    tokens = np.pad(tokens, [(0, 0), *more, (0, 0)])
    qkv = linear(weights, f"{prefix}qkv", tokens).reshape(*tokens.shape[:3], 3, heads, -1)
    query, key, value = np.moveaxis(qkv, 3, 0)
    operands = oracle.Tensors(query, key, value, relative_bias=table)
    window = tokens.shape[1:3], (size,) * 2, (1, 1), (dilation,) * 2, (False, False)
    scale, entries = (features // heads) ** -0.5, oracle.relative_entries(*window)
    out = oracle.forward(operands, oracle.neighborhood_mask(*window), scale, entries).out
    return linear(weights, f"{prefix}proj", out.reshape(tokens.shape)[:, :height, :width])


def gelu(array: np.ndarray) -> np.ndarray:
    return array * (1 + np.vectorize(math.erf)(array / math.sqrt(2))) / 2


def block(weights: Weights, prefix: str, tokens: np.ndarray, dilation: int) -> np.ndarray:
    change = attended(weights, f"{prefix}attn.", normalized(weights, f"{prefix}norm1", tokens), dilation)
    tokens = tokens + weights.get(f"{prefix}gamma1", 1) * change
    hidden = gelu(linear(weights, f"{prefix}mlp.fc1", normalized(weights, f"{prefix}norm2", tokens)))
    return tokens + weights.get(f"{prefix}gamma2", 1) * linear(weights, f"{prefix}mlp.fc2", hidden)


def reference(
    weights: Weights, images: np.ndarray, depths: tuple[int, ...], dilations: tuple[int, ...], stages: str = "levels"
) -> np.ndarray:
    tokens = images.astype(np.float64)
    if stages == "layers":
        whole = np.pad(tokens, [(0, 0), *[(0, -n % 4) for n in tokens.shape[1:3]], (0, 0)])
        tokens = convolved(weights, "patch_embed.proj", whole, 4, 0)
    else:
        tokens = convolved(weights, "patch_embed.proj.1", convolved(weights, "patch_embed.proj.0", tokens, 2, 1), 2, 1)
    tokens = normalized(weights, "patch_embed.norm", tokens)
    for stage, depth in enumerate(depths):
        for number in range(depth):
            tokens = block(weights, f"{stages}.{stage}.blocks.{number}.", tokens, dilations[stage] if number % 2 else 1)
        down = f"{stages}.{stage}.downsample."
        if f"{down}reduction.weight" not in weights:
            continue
        if stages == "layers":
            tokens = np.pad(tokens, [(0, 0), (0, tokens.shape[1] % 2), (0, tokens.shape[2] % 2), (0, 0)])
            corners = (tokens[:, i::2, j::2] for i, j in ((0, 0), (1, 0), (0, 1), (1, 1)))
            merged = normalized(weights, f"{down}norm", np.concatenate([*corners], axis=-1))
            tokens = linear(weights, f"{down}reduction", merged)
        else:
            tokens = normalized(weights, f"{down}norm", convolved(weights, f"{down}reduction", tokens, 2, 1))
    return linear(weights, "head", normalized(weights, "norm", tokens).mean((1, 2)))


def scaled_layers(weights: Weights) -> Weights:
    """With a factor for each feature, as NAT's small and base models have."""
    rng = np.random.default_rng(5)
    added: Weights = {}
    for name, array in weights.items():
        if name.endswith(".norm1.weight"):
            prefix = name.removesuffix("norm1.weight")
            added |= {f"{prefix}gamma{i}": rng.standard_normal(array.shape).astype(np.float32) for i in (1, 2)}
    return {**weights, **added}


#: Parts of names, and what transformers calls them.
HUGGING_FACE = {
    "patch_embed.proj": "dinat.embeddings.patch_embeddings.projection",
    "patch_embed.norm": "dinat.embeddings.norm",
    "levels.": "dinat.encoder.levels.",
    ".blocks.": ".layers.",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.output.dense",
    "attn.": "attention.self.",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "head.": "classifier.",
}


def hugging_face(weights: Weights) -> Weights:
    """The same weights as transformers names and splits them."""
    renamed: Weights = {}
    for name, array in weights.items():
        new = f"dinat.layernorm.{name.removeprefix('norm.')}" if name.startswith("norm.") else name
        for ours, theirs in HUGGING_FACE.items():
            new = new.replace(ours, theirs)
        if ".qkv." in new:
            for part, values in zip(("query", "key", "value"), np.split(array, 3), strict=True):
                renamed[new.replace("qkv", part)] = values
        elif new.endswith("gamma1"):
            both = np.stack([array, weights[name.replace("gamma1", "gamma2")]])
            renamed[new.replace("gamma1", "layer_scale_parameters")] = both
        elif not new.endswith("gamma2"):
            renamed[new] = array
    return renamed


def dinat_s(weights: Weights) -> Weights:
    """A model of the third kind: patches of 4 x 4 pixels, and tokens that are merged."""
    rng = np.random.default_rng(6)

    def draw(*shape: int) -> np.ndarray:
        return (0.2 * rng.standard_normal(shape)).astype(np.float32)

    width = weights["patch_embed.norm.weight"].shape[0]
    new = {
        name.replace("levels.", "layers."): array for name, array in weights.items() if "patch_embed.proj" not in name
    }
    new |= {"patch_embed.proj.weight": draw(width, 3, 4, 4), "patch_embed.proj.bias": draw(width)}
    for name in [name for name in new if name.endswith("downsample.reduction.weight")]:
        prefix, wide = name.removesuffix("reduction.weight"), new[name].shape[1]
        new[name] = draw(2 * wide, 4 * wide)
        new |= {f"{prefix}norm.weight": 1 + draw(4 * wide), f"{prefix}norm.bias": draw(4 * wide)}
    return new


KINDS: dict[str, Callable[[Weights], Weights]] = {
    "authors": lambda weights: weights,
    "layer-scale": scaled_layers,
    "dinat_s": dinat_s,
}


@pytest.mark.parametrize("from_hugging_face", [False, True], ids=["", "hugging-face"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_in_float64(example: dict[str, Any], kind: str, from_hugging_face: bool) -> None:
    """The last stage is smaller than its dilated windows, and an extent is odd."""
    if from_hugging_face and kind == "dinat_s":
        pytest.skip("transformers has no DiNAT_s")
    size = example["Size"](8, 1, (1, 2), 2)
    weights = KINDS[kind](example["random_weights"](size, kernel_size=3))
    images = np.random.default_rng(1).standard_normal((2, 37, 30, 3)).astype(np.float32)
    expected = reference(weights, images, (1, 2), (1, 2), "layers" if kind == "dinat_s" else "levels")
    model = example["load"](hugging_face(weights) if from_hugging_face else weights, (1, 2))
    assert model.depths == (1, 2)
    logits = example["classify"](model, jnp.asarray(images))
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("size", "millions"), [("mini", 20), ("tiny", 28), ("small", 51), ("base", 90)])
def test_sizes_are_the_published_ones(example: dict[str, Any], size: str, millions: float) -> None:
    """Parameters as the papers count them, in millions."""
    weights = example["random_weights"](example["SIZES"][size])
    assert sum(array.size for array in weights.values()) / 1e6 == pytest.approx(millions, abs=0.5)
    assert example["load"](weights, "dinat").depths == example["SIZES"][size].depths


def test_checkpoints_that_are_none(example: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="has no patch_embed"):
        example["load"]({"layers.0.weight": np.ones(3)}, "nat")
    weights = example["random_weights"](example["Size"](8, 1, (1, 1), 2))
    with pytest.raises(ValueError, match="the checkpoint has 2"):
        example["load"](weights, "dinat")


def test_an_image_is_classified_from_a_file(example: dict[str, Any], tmp_path: Path) -> None:
    from matplotlib import image

    weights = example["random_weights"](example["Size"](16, 1, (1, 1, 1, 1), 2))
    np.savez(tmp_path / "weights.npz", **weights)
    image.imsave(tmp_path / "photo.png", np.random.default_rng(0).random((300, 260, 3)))
    command = ["nat_weights.py", "--checkpoint", str(tmp_path / "weights.npz"), "--image", str(tmp_path / "photo.png")]
    found = run_command([EXAMPLES / command[0], *command[1:]], os.environ)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("class ") == 5
