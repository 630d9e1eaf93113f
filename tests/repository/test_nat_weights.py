"""Classifiers that are loaded from weights in published formats, compared with logits of other implementations."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import sys
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.support.programs import run_command

for package in ("matplotlib", "optax"):
    pytest.importorskip(package)

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Small models: shapes of their weights, and logits that transformers or NumPy computed. The logits were computed with
#: the weights that `arrays_of` returns for these shapes.
RECORDS = {each["model"]: each for each in json.loads(Path(__file__).with_name("nat_weights.json").read_text())}
DINAT, NAT = (RECORDS[f"{kind}ForImageClassification"] for kind in ("Dinat", "Nat"))
Weights = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return runpy.run_path(str(EXAMPLES / "nat_weights.py"))
    finally:
        sys.path.remove(str(EXAMPLES))


def arrays_of(shapes: Mapping[str, Sequence[int]]) -> Weights:
    """Return random weights. Each depends on its name and shape, but not on the order of the weights."""
    arrays = {}
    for name, shape in shapes.items():
        noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape) / math.sqrt(
            math.prod(shape[1:])
        )
        arrays[name] = (noise / 2 + (len(shape) == 1 and name.endswith("weight"))).astype(np.float32)
    return arrays


def images_of(extents: Sequence[int]) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((2, *extents, 3)).astype(np.float32)


@pytest.mark.parametrize("name", RECORDS)
def test_logits_equal_the_recorded_ones(example: dict[str, Any], name: str) -> None:
    """The test models include layouts smaller than the dilated windows of their stage, and odd extents."""
    record = RECORDS[name]
    model = example["load"](arrays_of(record["shapes"]), record["dilations"], config=record["config"])
    assert model.depths == (1, 2)
    logits = jax.jit(example["classify"])(model, images_of(record["extents"]))
    np.testing.assert_allclose(logits, record["logits"], rtol=0, atol=1e-5 * np.abs(record["logits"]).max())


def test_models_without_a_head(example: dict[str, Any]) -> None:
    """Compare a classifier with two other model classes of transformers: the model without a head, and the backbone.

    Weights of these classes lack a classification head. Their names lack the prefix ``dinat.``.
    """
    weights, images = arrays_of(DINAT["shapes"]), images_of(DINAT["extents"])
    headless = {name.removeprefix("dinat."): array for name, array in weights.items() if "classifier" not in name}
    backbone = {name: array for name, array in headless.items() if not name.startswith("layernorm")}
    norms = {f"hidden_states_norms.stage2.{kind}": headless[f"layernorm.{kind}"] for kind in ("weight", "bias")}
    models = [example["load"](each, (1, 2)) for each in (weights, headless, backbone | norms)]
    with pytest.raises(ValueError, match=r"config.json has out_features \['stage1'\], but .* \('stage2',\)"):
        example["load"](backbone | norms, config=DINAT["config"] | {"out_features": ["stage1"]})
    whole, found, bare = (example["features"](model, images) for model in models)
    jax.tree.map(np.testing.assert_array_equal, whole, found)
    logits = found.pooled @ weights["classifier.weight"].T + weights["classifier.bias"]
    np.testing.assert_allclose(example["classify"](models[0], images), logits, rtol=1e-5)
    assert [state.shape for state in whole.hidden_states] == [(2, 10, 8, 8), (2, 5, 4, 16), (2, 5, 4, 16)]
    np.testing.assert_array_equal(bare.feature_maps.pop("stage2"), whole.tokens)
    np.testing.assert_array_equal(bare.tokens, whole.feature_maps.pop("stage2"))
    jax.tree.map(np.testing.assert_array_equal, bare.feature_maps, whole.feature_maps)
    with pytest.raises(ValueError, match=r"no classification head: features\(model, images\)"):
        example["classify"](models[1], images)


@pytest.mark.parametrize(
    ("order", "dtype", "message"),
    [
        ((0, 3, 1, 2), "float32", r"\[batch, height, width, 3\], got shape \(2, 3, 37, 30\): move the channels"),
        ((0, 3, 1, 2, 4), "float32", r"got shape \(2, 3, 37, 30, 1\)"),
        ((0, 1, 2, 3), "uint8", "images must be floats, .* got dtype uint8"),
    ],
)
def test_images_that_do_not_fit(example: dict[str, Any], order: tuple[int, ...], dtype: str, message: str) -> None:
    model = example["load"](arrays_of(DINAT["shapes"]), (1, 2))
    images = images_of((37, 30)).reshape((2, 37, 30, 3, 1)[: len(order)]).transpose(order)
    with pytest.raises((TypeError, ValueError), match=message):
        example["classify"](model, images.astype(dtype))


def test_nat_has_no_dilation(example: dict[str, Any]) -> None:
    weights = arrays_of(NAT["shapes"])
    for dilations in (None, (1, 1)):
        with pytest.warns(UserWarning, match=r"without their config.json: assuming GELU"):
            assert example["load"](weights, dilations).dilations == ((1,), (1, 1))
    for options in ({"dilations": (1, 2)}, {"config": NAT["config"] | {"dilations": [[1], [1, 2]]}}):
        with pytest.raises(ValueError, match=r"dilations .*1, 2.*, but those of this nat model are"):
            example["load"](weights, **options)
    with pytest.raises(TypeError, match="config must be a mapping"):
        example["load"](weights, config=[])


BLOCK = "dinat.encoder.levels.1.layers.0."


@pytest.mark.parametrize(
    ("dilations", "message"),
    [
        (None, "dilations are not among the weights: name them"),
        ("nat", "dilations are 'nat', but the weights are from a DiNAT"),
        ("dinat-384", "'dinat-384' are those of 7 x 7 windows"),
        ("dinats", "dilations must be one of nat, dinat, dinat-384, or numbers, got 'dinats'"),
        ("dinat", r"dilations \(8, 4, 2, 1\) are of 4 stages, but the checkpoint has 2"),
        (8, "dilations must be a name or a sequence with an entry per stage, got 8"),
        ((1, 2.5), "dilations of stage 1 must be integers of at least 1, got 2.5"),
        ((1, [1, 0]), r"dilations of stage 1 must be integers of at least 1, got \[1, 0\]"),
        ((1, [1]), "dilations of stage 1 are 1 numbers, but it has 2 blocks"),
    ],
)
def test_dilations_that_do_not_fit(example: dict[str, Any], dilations: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        example["load"](arrays_of(DINAT["shapes"]), dilations)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("dinat.layernorm.bias", None, "the checkpoint has no norm.bias$"),
        ("dinat.encoder.more", np.ones(3), "the checkpoint has an unknown encoder.more$"),
        ("nat.layernorm.bias", np.ones(16), "begin with nat. and with dinat., which are two models"),
        ("layernorm.bias", np.ones(16), "the checkpoint has norm.bias twice"),
        ("dinat.layernorm.bias", np.ones(8), r"norm.bias has shape \(8,\), but other weights require \(16,\)"),
        ("dinat.layernorm.bias", np.ones(16, int), "must be an array of floats, got ndarray of dtype int64"),
        ("dinat.embeddings.norm.weight", None, "no patch_embed.norm.weight .* not a NAT, DiNAT or DiNAT_s"),
        (f"{BLOCK}attention.self.key.bias", None, "query.bias, but no levels.1.blocks.0.attn.key.bias"),
        (f"{BLOCK}attention.self.key.bias", np.ones(8), "attn.value.bias have different shapes"),
    ],
)
def test_weights_that_do_not_fit(example: dict[str, Any], name: str, array: np.ndarray | None, message: str) -> None:
    weights = arrays_of(DINAT["shapes"]) | {name: array}
    with pytest.raises((TypeError, ValueError), match=message):
        example["load"]({name: each for name, each in weights.items() if each is not None}, (1, 2))


WRONG: dict[str, list[Any]] = {
    "model_type": ["nat", "vit"],
    "hidden_act": ["laplace", ["gelu"]],
    "layer_norm_eps": ["1e-5", True, math.inf],
    "quantization_config": [{"bits": 8}],
    "dilations": [[1, 2], "12"],
    "kernel_size": [7],
    "num_heads": [[2, 2]],
    "qkv_bias": [False],
    "mlp_ratio": [3.0, None, math.inf],
    "layer_scale_init_value": [0.1, None, math.nan],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_configurations_that_do_not_fit(example: dict[str, Any], key: str, value: Any) -> None:
    weights = arrays_of(DINAT["shapes"])
    with pytest.raises(ValueError, match=rf"config.json has {key} {re.escape(repr(value))}, "):
        example["load"](weights, config=DINAT["config"] | {key: value})
    with pytest.raises(ValueError, match=r"dilations are \(2, 3\), .* but those of this dinat model are"):
        example["load"](weights, (2, 3), config=DINAT["config"])


@pytest.mark.parametrize(("suffix", "package"), [(".pth", "torch"), (".safetensors", "safetensors")])
def test_packages_that_are_missing(
    example: dict[str, Any], monkeypatch: pytest.MonkeyPatch, suffix: str, package: str
) -> None:
    with pytest.raises(ValueError, match="is a folder: name the file"):
        example["read"](EXAMPLES)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=f"a{suffix} needs {package} to be read: pip install {package}"):
        example["read"](Path(f"a{suffix}"))


@pytest.mark.parametrize(("size", "millions"), [("mini", 20), ("tiny", 28), ("small", 51), ("base", 90)])
def test_sizes_are_the_published_ones(example: dict[str, Any], size: str, millions: float) -> None:
    """Compare numbers of parameters with the numbers in the papers, in millions."""
    weights = example["random_weights"](example["SIZES"][size])
    assert sum(array.size for array in weights.values()) / 1e6 == pytest.approx(millions, abs=0.5)
    models = [example["load"](weights, dilations) for dilations in ("dinat", "dinat-384")]
    assert [model.image_size for model in models] == [224, 384]
    assert models[0].depths == example["SIZES"][size].depths


def test_an_image_is_classified_from_a_file(example: dict[str, Any], tmp_path: Path) -> None:
    from matplotlib import image

    weights = example["random_weights"](example["Size"](16, 1, (1, 1, 1, 1), 2))
    np.savez(tmp_path / "weights.npz", **weights)
    image.imsave(tmp_path / "photo.png", np.random.default_rng(0).random((300, 260, 3)))
    command = ["nat_weights.py", "--checkpoint", str(tmp_path / "weights.npz"), "--image", str(tmp_path / "photo.png")]
    run = partial(run_command, [EXAMPLES / command[0], *command[1:]], os.environ)
    refused = run()
    assert refused.returncode == 1
    assert refused.stderr.startswith("nat_weights.py: dilations are not among the weights"), refused.stderr
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nat"}))
    found = run()
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("class ") == 5
