"""The conversion of NATTEN's weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

pytest.importorskip("flax")

from flax_layers import FEATURES, HEADS, LINEN, RANKS, WINDOWS, inputs_of, nnx_module, params_of
from natten_jax.flax_modules import convert


def natten_weights(seed: int = 0, prefix: str = "", qkv_bias: bool = True) -> dict[str, np.ndarray]:
    """Random weights as NATTEN's modules hold them."""
    random = np.random.default_rng(seed)
    shapes = {"qkv.weight": (3 * FEATURES, FEATURES), "proj.weight": (FEATURES, FEATURES), "proj.bias": (FEATURES,)}
    if qkv_bias:
        shapes["qkv.bias"] = (3 * FEATURES,)
    return {prefix + name: 0.5 * random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def natten_forward(weights: dict[str, np.ndarray], inputs: np.ndarray, window: dict, scale: float) -> np.ndarray:
    """What NATTEN's modules compute, in float64 NumPy with a dense mask."""
    batch, *layout, features = inputs.shape
    weights = {name: array.astype(np.float64) for name, array in weights.items()}

    def sizes(name: str, default: int) -> tuple:
        value = window.get(name, default)
        return value if isinstance(value, tuple) else (value,) * len(layout)

    qkv = inputs.astype(np.float64) @ weights["qkv.weight"].T + weights.get("qkv.bias", 0.0)
    query, key, value = np.moveaxis(qkv.reshape(batch, *layout, 3, HEADS, features // HEADS), -3, 0)
    mask = oracle.neighborhood_mask(
        layout, sizes("kernel_size", 1), sizes("stride", 1), sizes("dilation", 1), sizes("is_causal", False)
    )
    out = oracle.forward(oracle.Tensors(query, key, value), mask, scale).out
    return out.reshape(inputs.shape) @ weights["proj.weight"].T + weights["proj.bias"]


class TestConvert:
    @pytest.mark.parametrize("rank", RANKS)
    @pytest.mark.parametrize("qkv_bias", [True, False])
    def test_outputs_are_those_of_natten(self, rank, qkv_bias):
        weights, inputs = natten_weights(rank, qkv_bias=qkv_bias), inputs_of(rank)
        expected = natten_forward(weights, np.asarray(inputs), WINDOWS[rank], (FEATURES // HEADS) ** -0.5)
        module = nnx_module(rank, qkv_bias=qkv_bias)
        convert.load_nnx(module, weights)
        np.testing.assert_allclose(module(inputs), expected, rtol=1e-4, atol=1e-4)
        twin, params = LINEN[rank](HEADS, **WINDOWS[rank], qkv_bias=qkv_bias), convert.linen_params(weights, HEADS)
        np.testing.assert_array_equal(twin.apply({"params": params}, inputs), module(inputs))
        jax.tree.map(np.testing.assert_array_equal, params, params_of(module))

    def test_prefix(self):
        model = {**natten_weights(1, "blocks.0.attn."), **natten_weights(2, "blocks.1.attn."), "head.bias": np.ones(3)}
        one, other = (convert.linen_params(model, HEADS, prefix=f"blocks.{i}.attn.") for i in (0, 1))
        jax.tree.map(np.testing.assert_array_equal, one, convert.linen_params(natten_weights(1), HEADS))
        assert (one["query"]["kernel"] != other["query"]["kernel"]).any()
        with pytest.raises(ValueError, match=r"no 'qkv.weight'.*'blocks.0.attn.', 'blocks.1.attn.'"):
            convert.linen_params(model, HEADS)

    def test_dtype(self):
        weights = natten_weights()
        module = nnx_module(1, param_dtype="bfloat16")
        convert.load_nnx(module, weights)
        for params in (convert.linen_params(weights, HEADS, param_dtype="bfloat16"), params_of(module)):
            assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(params))

    def test_pytorch_tensors(self):
        class Tensor:
            """Refuses, as PyTorch's parameters do, to become an array where it is not a float32 one of its own."""

            def __init__(self, array: np.ndarray, state: tuple[str, ...] = ("grad", "cuda", "torch.bfloat16")) -> None:
                self.array, self.state, self.dtype = array, state, state[-1] if state else "torch.float32"

            def detach(self):
                return Tensor(self.array, self.state[1:])

            def cpu(self):
                return Tensor(self.array, self.state[1:])

            def float(self):
                return Tensor(self.array, self.state[1:])

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
            ({"proj.bias": None}, "state_dict has no 'proj.bias'"),
            ({"qkv.weight": np.ones((2 * FEATURES, FEATURES))}, r"qkv.weight has shape \(32, 16\)"),
            ({"qkv.bias": np.ones(FEATURES)}, r"qkv.bias has shape \(16,\), but qkv.weight asks for \(48,\)"),
            ({"proj.weight": np.ones((FEATURES, 8))}, "proj.weight has shape"),
            ({"rpb": np.ones((HEADS, 5))}, "relative position biases cannot be converted"),
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
        with pytest.raises(ValueError, match="has a bias for query and the module has none: qkv_bias must agree"):
            convert.load_nnx(nnx_module(1, qkv_bias=False), weights)
        with pytest.raises(ValueError, match="the module has a bias for query"):
            convert.load_nnx(nnx_module(1), natten_weights(qkv_bias=False))
