"""The conversion of weights of NATTEN's modules to parameters of the Flax modules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import oracle

pytest.importorskip("flax")

from flax import nnx
from natten_jax.flax_modules import convert

from tests.support.flax_layers import (
    FEATURES,
    HEADS,
    LINEN,
    RANKS,
    WINDOWS,
    inputs_of,
    nnx_module,
    params_of,
    shapes_of,
)


def natten_weights(seed: int = 0, prefix: str = "", qkv_bias: bool = True) -> dict[str, np.ndarray]:
    """Return random weights in the format of NATTEN's modules."""
    random = np.random.default_rng(seed)
    shapes = {"qkv.weight": (3 * FEATURES, FEATURES), "proj.weight": (FEATURES, FEATURES), "proj.bias": (FEATURES,)}
    if qkv_bias:
        shapes["qkv.bias"] = (3 * FEATURES,)
    return {prefix + name: 0.5 * random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def natten_forward(weights: dict[str, np.ndarray], inputs: np.ndarray, window: dict, scale: float) -> np.ndarray:
    """Compute the output of NATTEN's modules in float64 NumPy, with a dense mask."""
    batch, *layout, features = inputs.shape
    weights = {name: array.astype(np.float64) for name, array in weights.items()}
    windows = [
        np.broadcast_to(window.get(name, default), len(layout)).tolist()
        for name, default in (("kernel_size", 1), ("stride", 1), ("dilation", 1), ("is_causal", False))
    ]
    qkv = inputs.astype(np.float64) @ weights["qkv.weight"].T + weights.get("qkv.bias", 0.0)
    query, key, value = np.moveaxis(qkv.reshape(batch, *layout, 3, HEADS, features // HEADS), -3, 0)
    tensors = oracle.Tensors(query, key, value, relative_bias=weights.get("rpb"))
    mask, entries = (make(layout, *windows) for make in (oracle.neighborhood_mask, oracle.relative_entries))
    out = oracle.forward(tensors, mask, scale, entries).out
    return out.reshape(inputs.shape) @ weights["proj.weight"].T + weights["proj.bias"]


def split_names(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Split the ``qkv`` weights into separate weights for the query, key and value projections."""
    found = {name: array for name, array in weights.items() if not name.startswith("qkv.")}
    for kind in ("weight", "bias"):
        if f"qkv.{kind}" in weights:
            names = [f"{name}.{kind}" for name in ("query", "key", "value")]
            found |= dict(zip(names, np.split(weights[f"qkv.{kind}"], 3), strict=True))
    return found


def hugging_face_weights(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the weights under the names that Hugging Face's port of the models uses."""
    return {
        "attention." + (name.replace("proj", "output.dense") if name.startswith("proj") else f"self.{name}"): array
        for name, array in split_names(weights).items()
    }


class TestConvert:
    @pytest.mark.parametrize("rank", RANKS)
    @pytest.mark.parametrize("names", ["natten", "split", "hugging face"])
    @pytest.mark.parametrize(("relative_bias", "qkv_bias"), [(False, False), (False, True), (True, True)])
    def test_outputs_equal_the_converted_module(self, rank, names, relative_bias, qkv_bias):
        weights, inputs = natten_weights(rank, qkv_bias=qkv_bias), inputs_of(rank)
        if relative_bias:
            sizes = np.broadcast_to(WINDOWS[rank]["kernel_size"], rank)
            weights["rpb"] = np.random.default_rng(5).standard_normal((HEADS, *(2 * sizes - 1))).astype(np.float32)
        expected = natten_forward(weights, np.asarray(inputs), WINDOWS[rank], (FEATURES // HEADS) ** -0.5)
        given = {"natten": weights, "split": split_names(weights), "hugging face": hugging_face_weights(weights)}[names]
        prefix = "attention." if names == "hugging face" else ""
        module = nnx_module(rank, relative_bias=relative_bias, qkv_bias=qkv_bias)
        convert.load_nnx(module, given, prefix=prefix)
        np.testing.assert_allclose(module(inputs), expected, rtol=1e-4, atol=1e-4)
        params = convert.linen_params(given, HEADS, prefix=prefix)
        twin = LINEN[rank](num_heads=HEADS, relative_bias=relative_bias, qkv_bias=qkv_bias, **WINDOWS[rank])
        np.testing.assert_array_equal(twin.apply({"params": params}, inputs), module(inputs))
        jax.tree.map(np.testing.assert_array_equal, params, params_of(module))
        assert shapes_of(params) == shapes_of(twin.init(jax.random.key(0), inputs)["params"])

    def test_relative_biases_have_to_agree(self):
        weights = natten_weights()
        with pytest.raises(
            ValueError, match=r"the module has a relative bias, rpb, but .* does not: relative_bias must"
        ):
            convert.load_nnx(nnx_module(1, relative_bias=True), weights)
        weights["rpb"] = np.ones((HEADS, 9))
        with pytest.raises(ValueError, match="has a relative bias, rpb, but the module does not"):
            convert.load_nnx(nnx_module(1), weights)
        weights["rpb"] = np.ones((HEADS, 7))
        with pytest.raises(ValueError, match=r"rpb has shape \(4, 7\), but the module's is \(4, 9\)"):
            convert.load_nnx(nnx_module(1, relative_bias=True), weights)

    def test_split_weights_that_do_not_fit(self):
        for name, wrong, message in (
            ("key.weight", None, "state_dict has no 'key.weight'"),
            ("value.weight", np.ones((8, FEATURES)), r"value.weight has shape \(8, 16\), but query.weight requires"),
            ("key.bias", None, "all projections have a bias, or none"),
            ("key.bias", np.ones(8), r"key.bias has shape \(8,\), but query.weight requires \(16,\)"),
            ("proj.weight", None, "state_dict has no 'proj.weight'"),
        ):
            weights = split_names(natten_weights()) | {name: wrong}
            with pytest.raises(ValueError, match=message):
                convert.linen_params({k: v for k, v in weights.items() if v is not None}, HEADS)

    def test_prefix(self):
        model = {**natten_weights(1, "blocks.0.attn."), **natten_weights(2, "blocks.1.attn."), "head.bias": np.ones(3)}
        one, other = (convert.linen_params(model, HEADS, prefix=f"blocks.{i}.attn.") for i in (0, 1))
        jax.tree.map(np.testing.assert_array_equal, one, convert.linen_params(natten_weights(1), HEADS))
        assert (one["query"]["kernel"] != other["query"]["kernel"]).any()
        with pytest.raises(ValueError, match=r"no 'qkv.weight'.*'blocks.0.attn.', 'blocks.1.attn.'"):
            convert.linen_params(model, HEADS)

    @pytest.mark.parametrize(
        ("prefix", "change", "message"),
        [
            ("", {}, "no 'qkv.weight' .*are 'nat.0.attention.', 'nat.1.attention.'$"),
            ("nat.0.", {}, "no 'nat.0.qkv.weight' .*are 'nat.0.attention.', 'nat.1.attention.'$"),
            ("nat.0.attention.", {"output.dense.weight": None}, "no 'nat.0.attention.output.dense.weight'"),
            ("nat.0.attention.", {"qkv.weight": np.ones((48, 16))}, r"attention.qkv.weight and .*self.query.weight:"),
        ],
    )
    def test_prefixes_of_hugging_face(self, prefix, change, message):
        weights = hugging_face_weights(natten_weights()) | {
            f"attention.{name}": array for name, array in change.items()
        }
        model = {f"nat.{i}.{name}": array for i in (0, 1) for name, array in weights.items() if array is not None}
        with pytest.raises(ValueError, match=message):
            convert.linen_params(model, HEADS, prefix=prefix)

    @pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
    def test_weights_in_another_byte_order(self, param_dtype):
        weights = natten_weights()
        swapped = {name: array.astype(array.dtype.newbyteorder("S")) for name, array in weights.items()}
        expected = convert.linen_params(weights, HEADS, param_dtype=param_dtype)
        module = nnx_module(1, param_dtype=param_dtype)
        convert.load_nnx(module, swapped)
        for params in (convert.linen_params(swapped, HEADS, param_dtype=param_dtype), params_of(module)):
            jax.tree.map(np.testing.assert_array_equal, params, expected)
            assert all(leaf.dtype == param_dtype for leaf in jax.tree.leaves(params))

    @pytest.mark.parametrize("qkv_bias", [True, False])
    def test_an_abstract_module_is_loaded(self, qkv_bias):
        weights, inputs = natten_weights(qkv_bias=qkv_bias), inputs_of(1)
        make = lambda: nnx_module(1, qkv_bias=qkv_bias, param_dtype="bfloat16")  # noqa: E731
        module, expected = nnx.eval_shape(make), make()
        for each in (module, expected):
            convert.load_nnx(each, weights)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(module)))
        jax.tree.map(np.testing.assert_array_equal, params_of(module), params_of(expected))
        np.testing.assert_array_equal(module(inputs), expected(inputs))

    def test_an_abstract_module_that_does_not_fit_stays_abstract(self):
        module = nnx.eval_shape(lambda: nnx_module(1))
        with pytest.raises(ValueError, match="has no 'proj"):
            convert.load_nnx(module, {k: v for k, v in natten_weights().items() if not k.startswith("proj")})
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(module)))

    def test_pytorch_tensors(self):
        class Tensor:
            """An imitation of a PyTorch parameter. Only a detached float32 tensor on the CPU converts to an array."""

            def __init__(self, array: np.ndarray, state: tuple[str, ...] = ("grad", "cuda", "torch.bfloat16")) -> None:
                self.array, self.state, self.dtype = array, state, state[-1] if state else "torch.float32"

            def detach(self):
                return Tensor(self.array, self.state[1:])

            cpu = float = detach

            def __array__(self, dtype=None, copy=None):
                assert not self.state
                return self.array

        weights = natten_weights()
        converted = convert.linen_params({name: Tensor(array) for name, array in weights.items()}, HEADS)
        jax.tree.map(np.testing.assert_array_equal, converted, convert.linen_params(weights, HEADS))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"qkv.weight": None}, "state_dict has no 'qkv.weight' .*it has no qkv.weight"),
            ({"proj.weight": None}, "state_dict has no 'proj.weight'"),
            ({"qkv.weight": np.ones((2 * FEATURES, FEATURES))}, r"qkv.weight has shape \(32, 16\)"),
            ({"qkv.bias": np.ones(FEATURES)}, r"qkv.bias has shape \(16,\), but qkv.weight requires \(48,\)"),
            ({"proj.weight": np.ones((FEATURES, 8))}, "proj.weight has shape"),
            ({"rpb": np.ones((HEADS, 4))}, r"rpb has shape \(\d, 4\), but NATTEN's is \[heads, 2 \* kernel_size - 1"),
        ],
    )
    def test_weights_that_do_not_fit(self, change, message):
        weights = {name: array for name, array in {**natten_weights(), **change}.items() if array is not None}
        module = nnx_module(1)
        before = params_of(module)
        for call in (lambda: convert.linen_params(weights, HEADS), lambda: convert.load_nnx(module, weights)):
            with pytest.raises(ValueError, match=message):
                call()
        jax.tree.map(np.testing.assert_array_equal, params_of(module), before)

    def test_modules_that_do_not_fit(self):
        weights = natten_weights()
        with pytest.raises(ValueError, match="num_heads 3 does not divide the 16 features"):
            convert.linen_params(weights, 3)
        with pytest.raises(ValueError, match="num_kv_heads 2 and num_heads 4"):
            convert.load_nnx(nnx_module(1, num_kv_heads=2), weights)
        with pytest.raises(ValueError, match=r"query.kernel the shape \(16, 4, 4\), but the module's is \(16, 4, 8\)"):
            convert.load_nnx(nnx_module(1, qkv_features=32), weights)
        with pytest.raises(ValueError, match="has a bias for query but the module does not: qkv_bias must agree"):
            convert.load_nnx(nnx_module(1, qkv_bias=False), weights)
        with pytest.raises(ValueError, match="module has normalize_qk=True"):
            convert.load_nnx(nnx_module(1, normalize_qk=True), weights)
        with pytest.raises(ValueError, match="the module has a bias for query"):
            convert.load_nnx(nnx_module(1), natten_weights(qkv_bias=False))

    @pytest.mark.parametrize(
        ("change", "shown"),
        [
            (lambda array: array.astype(object), "object"),
            (lambda array: array.astype(str), "<U"),
            (lambda array: array > 0, "bool"),
            (lambda array: array.astype(np.int8), "int8"),  # quantized weights, which need scales
            (lambda array: array.astype(complex).tolist(), "complex128"),
            (lambda _: None, ""),
            (lambda _: [[1.0], [1.0, 2.0]], ""),
        ],
    )
    def test_weights_that_are_no_arrays_of_floats(self, change, shown):
        module = nnx_module(1)
        before = params_of(module)
        for name in ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias"):
            weights = natten_weights(prefix="blocks.")
            weights[f"blocks.{name}"] = change(weights[f"blocks.{name}"])
            for call in (
                lambda weights=weights: convert.linen_params(weights, HEADS, prefix="blocks."),
                lambda weights=weights: convert.load_nnx(module, weights, prefix="blocks."),
            ):
                with pytest.raises(
                    TypeError, match=rf"^state_dict\['blocks.{name}'\] must be an array of floats.*{shown}"
                ):
                    call()
        jax.tree.map(np.testing.assert_array_equal, params_of(module), before)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn"])
    def test_weights_of_all_float_types(self, dtype):
        weights = {name: array.astype(jnp.dtype(dtype)) for name, array in natten_weights().items()}
        for holder in (np.asarray, jnp.asarray):
            params = convert.linen_params({name: holder(array) for name, array in weights.items()}, HEADS)
            kernel = params["query"]["kernel"]
            expected = weights["qkv.weight"][:FEATURES].T.reshape(kernel.shape)
            np.testing.assert_array_equal(np.asarray(kernel, np.float32), expected.astype(np.float32))

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"state_dict": None}, TypeError, "state_dict must be a mapping of names to weights, got NoneType"),
            ({"prefix": None}, TypeError, "prefix must be a str, got None"),
            ({"num_heads": "4"}, TypeError, "num_heads must be an int, got '4'"),
            ({"num_heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
            ({"param_dtype": int}, TypeError, "param_dtype must be None or a float type, got .*int"),
            ({"param_dtype": "nothing"}, TypeError, "param_dtype must be None or a float type, got 'nothing'"),
        ],
    )
    def test_wrong_arguments(self, arguments, error, message):
        good = {"state_dict": natten_weights(), "num_heads": HEADS}
        with pytest.raises(TypeError, match="module must be a NeighborhoodAttention module for"):
            convert.load_nnx(3, natten_weights())
        with pytest.raises(error, match=message):
            convert.linen_params(**{**good, **arguments})
