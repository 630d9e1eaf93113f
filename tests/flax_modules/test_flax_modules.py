"""The Flax modules."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import nnx as flax_nnx
from natten_jax.flax_modules import attention_fn, linen, nnx

import natten_jax
from natten_jax.performance import Performance, PerformanceArguments
from tests.support.flax_layers import (
    FEATURES,
    HEADS,
    LINEN,
    NNX,
    RANKS,
    WINDOWS,
    inputs_of,
    nnx_module,
    params_of,
    shapes_of,
)
from tests.support.programs import run_python


class TestArguments:
    def test_import_is_light(self):
        code = "import sys, natten_jax.flax_modules; sys.exit('flax' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)

    @pytest.mark.parametrize("rank", RANKS)
    def test_are_the_same_in_nnx_and_linen(self, rank):
        def parameters(function, *left_out: str) -> dict:
            found = inspect.signature(function).parameters.items()
            return {name: each.default for name, each in found if name not in left_out}

        # Arguments for metadata exist only in NNX. In Linen, initializers set the metadata.
        nnx_parameters = {
            name: default
            for name, default in parameters(NNX[rank].__init__, "self", "rngs", "performance", "in_features").items()
            if not name.endswith("_metadata")
        }
        linen_parameters = parameters(LINEN[rank], "parent", "name", "in_features")
        operator = {**parameters(getattr(natten_jax, f"na{rank}d")), **dataclasses.asdict(Performance())}
        nnx_parameters |= {name: operator[name] for name in attention_fn.Performance.__annotations__}
        assert nnx_parameters.keys() == linen_parameters.keys()
        initializers = {"kernel_init", "bias_init"}  # these defaults are functions, and are not compared
        assert all(nnx_parameters[name] == linen_parameters[name] for name in nnx_parameters.keys() - initializers)

    def test_performance_is_all_that_the_operators_have(self):
        others = "query key value kernel_size stride dilation is_causal scale additional_keys additional_values edges"
        others += " clamp_window query_origin extents upsample relative_bias key_bias sinks try_fuse_additional_kv"
        others += " return_lse token_axes query_scale key_scale value_scale out_dtype performance"
        own = inspect.signature(natten_jax.na1d).parameters.keys() - set(others.split())
        assert own | PerformanceArguments.__annotations__.keys() == attention_fn.Performance.__annotations__.keys()

    def test_are_documented(self):
        for modules in (NNX, LINEN):
            for rank, module in modules.items():
                assert f"na{rank}d" in module.__doc__
                names = set(inspect.signature(LINEN[rank]).parameters) - {"parent", "name"}
                if modules is NNX:
                    names |= inspect.signature(module.__init__).parameters.keys() - {"self", "performance"}
                for name in names:
                    assert f"{name}:" in module.__doc__ or f"``{name}``" in module.__doc__

    def test_subclasses_keep_their_docstrings(self):
        class OfNnx(nnx.NeighborhoodAttention2D):
            """Mine."""

        class OfLinen(linen.NeighborhoodAttention2D):
            """Mine."""

        assert OfNnx.__doc__ == OfLinen.__doc__ == "Mine."

    @pytest.mark.parametrize("make", ["nnx", "linen"])
    @pytest.mark.parametrize(
        ("settings", "error", "message"),
        [
            ({"in_features": 18}, ValueError, "in_features 18 is not a multiple of num_heads 4"),
            ({"qkv_features": 18}, ValueError, "qkv_features 18 is not a multiple of num_heads 4"),
            ({"out_features": 0}, ValueError, "out_features must be at least 1"),
            ({"num_kv_heads": 3}, ValueError, "num_heads 4 is not a multiple of num_kv_heads 3"),
            ({"num_kv_heads": 0}, ValueError, "num_kv_heads must be at least 1"),
            ({"kernel_size": (3, 3, 3)}, ValueError, "kernel_size must have 2 value"),
            ({"kernel_size": 0}, ValueError, "kernel_size must be at least 1"),
            ({"qk_scale": "1"}, TypeError, "^qk_scale must be None or a real number, got '1'"),
            ({"qk_scale": np.ones(4)}, TypeError, "^qk_scale must be None or a real number, got array"),
            ({"qk_scale": np.nan}, ValueError, "^qk_scale must be finite"),
            ({"proj_drop": 1.5}, ValueError, r"proj_drop must be in \[0, 1\], got 1.5"),
            ({"attn_drop": -0.1}, ValueError, r"attn_drop must be in \[0, 1\], got -0.1"),
            ({"backend": "torch-fna"}, ValueError, "backend='torch-fna' is unknown"),
            ({"attention_kwargs": 3}, TypeError, "attention_kwargs must be a mapping"),
            ({"q_tile_shape": (4, 4)}, ValueError, "without kv_tile_shape"),
            ({"fp8": "int8"}, ValueError, "fp8 must be one of e4m3"),
            ({"sinks": jnp.zeros(HEADS)}, TypeError, "sinks must be"),
            ({"relative_bias": 2}, TypeError, "relative_bias must be"),
            ({"qkv_bias": jnp.ones(2)}, TypeError, "qkv_bias must be a bool"),
            ({"normalize_qk": jnp.ones(2)}, TypeError, "normalize_qk must be a bool"),
            ({"kernel_size": -1, "relative_bias": True}, ValueError, r"relative_bias=True with kernel_size \(-1, -1\)"),
        ],
    )
    def test_are_checked_at_construction(self, make, settings, error, message):
        settings = {"in_features": FEATURES, "num_heads": HEADS, "kernel_size": 3, **settings}
        with pytest.raises(error, match=message):
            if make == "nnx":
                nnx.NeighborhoodAttention2D(**settings, rngs=flax_nnx.Rngs(0))
            else:
                linen.NeighborhoodAttention2D(**settings)

    def test_without_flax_the_error_names_the_package_to_install(self):
        code = """
            import importlib.util
            importlib.util.find_spec = lambda name, package=None: None
            import natten_jax.flax_modules.nnx
        """
        result = run_python(code, fresh=True)
        assert result.returncode != 0
        assert "natten_jax.flax_modules needs Flax: pip install 'flax>=0.12.2'" in result.stderr

    @pytest.mark.parametrize("flavour", ["nnx", "linen"])
    @pytest.mark.parametrize(
        ("settings", "shape", "message"),
        [
            ({}, (16,), "inputs has shape .* NeighborhoodAttention2D takes arrays of"),
            ({"in_features": FEATURES}, (2, 6, 8, 12), "inputs has 12 features .* in_features is 16"),
            ({"in_features": FEATURES}, (2, FEATURES, 8, 8), r"jnp.moveaxis\(inputs, -3, -1\)"),
            ({}, (2, 2, 2, FEATURES), "exceeds the token layout"),
            ({}, (2, 0, 8, FEATURES), r"^inputs has shape \(2, 0, 8, 16\): every extent"),
            ({"qk_scale": 1e39}, (2, 6, 8, FEATURES), r"^qk_scale must be within .* float32 .*\(qk_scale \* log2\(e\)"),
        ],
    )
    def test_inputs_are_checked(self, flavour, settings, shape, message):
        inputs = jnp.zeros(shape)
        with pytest.raises(ValueError, match=message):
            if flavour == "linen":
                LINEN[2](num_heads=HEADS, kernel_size=3, **settings).init(jax.random.key(0), inputs)
            else:
                nnx_module(2, **{name: value for name, value in settings.items() if name != "in_features"})(inputs)

    @pytest.mark.parametrize("flavour", ["nnx", "linen"])
    @pytest.mark.parametrize(
        ("shape", "arguments", "message"),
        [
            ((1, 6, 8), {}, "^inputs_kv has batch size 1, but inputs has 2"),
            (
                (2, 12, 8),
                {},
                r"^inputs_kv has token layout \(12, 8\), but inputs has \(6, 8\): inputs and inputs_kv must",
            ),
            (
                (2, 5, 8),
                {"query_origin": (0, 0)},
                r"^inputs has token layout .* larger than inputs_kv's token layout, \(5, 8\)",
            ),
            ((2, 3, 8), {"upsample": 2}, r"^inputs has token layout .* of the layout of inputs_kv, \(3, 8\), "),
        ],
    )
    def test_inputs_are_named_as_the_module_names_them(self, flavour, shape, arguments, message):
        if flavour == "nnx":
            run = nnx_module(2)
        else:
            module = linen.NeighborhoodAttention2D(num_heads=HEADS, kernel_size=3)
            run = functools.partial(module.init, jax.random.key(0))
        with pytest.raises(ValueError, match=message):
            run(inputs_of(2), inputs_kv=jnp.zeros((*shape, FEATURES)), **arguments)

    def test_settings_of_nnx_alone_are_checked(self):
        settings = {"num_heads": HEADS, "kernel_size": 3, "rngs": flax_nnx.Rngs(0)}
        with pytest.raises(TypeError, match="in_features must be an int, got None"):
            nnx.NeighborhoodAttention2D(None, **settings)
        with pytest.raises(TypeError, match="kernel_metadata must be a mapping from names"):
            nnx.NeighborhoodAttention2D(FEATURES, kernel_metadata={1: 2}, **settings)

    def test_features_that_linen_infers_are_checked(self):
        with pytest.raises(ValueError, match="in_features 18 is not a multiple"):
            LINEN[2](num_heads=HEADS, kernel_size=3).init(jax.random.key(0), jnp.zeros((2, 6, 8, 18)))


class TestModules:
    @pytest.mark.parametrize("rank", RANKS)
    @pytest.mark.parametrize("dtype", [None, "bfloat16"])
    @pytest.mark.parametrize(
        "settings",
        [{}, {"num_kv_heads": 2, "qkv_features": 32, "qkv_bias": False, "out_features": 8, "normalize_qk": True}],
    )
    def test_nnx_and_linen_agree_bit_for_bit(self, rank, dtype, settings):
        module = nnx_module(rank, dtype=dtype, proj_drop=0.5, deterministic=True, **settings)
        twin = LINEN[rank](num_heads=HEADS, **WINDOWS[rank], dtype=dtype, proj_drop=0.5, deterministic=True, **settings)
        inputs, params = inputs_of(rank), params_of(module)
        outputs = flax_nnx.jit(lambda module, inputs: module(inputs))(module, inputs)
        assert outputs.shape == (*inputs.shape[:-1], settings.get("out_features", FEATURES))
        assert outputs.dtype == (dtype or "float32")
        np.testing.assert_array_equal(outputs, jax.jit(twin.apply)({"params": params}, inputs))
        assert shapes_of(jax.jit(twin.init)(jax.random.key(0), inputs)["params"]) == shapes_of(params)

    @pytest.mark.parametrize("rank", RANKS)
    def test_parameters_are_shaped_like_flax_attention(self, rank):
        module = nnx_module(rank, qkv_features=32)
        flax_module = flax_nnx.MultiHeadAttention(HEADS, FEATURES, qkv_features=32, decode=False, rngs=flax_nnx.Rngs(0))
        assert shapes_of(params_of(module)) == shapes_of(params_of(flax_module))
        assert shapes_of(params_of(module))["query"] == {"kernel": (FEATURES, 4, 8), "bias": (4, 8)}
        grouped = nnx_module(rank, num_kv_heads=2, qkv_features=32)
        assert shapes_of(params_of(grouped))["key"] == {"kernel": (FEATURES, 2, 8), "bias": (2, 8)}
        # The module's state contains only parameters. It contains no random number generators.
        assert len(jax.tree.leaves(flax_nnx.state(module))) == 8

    def test_param_dtype_and_initializers(self):
        ones = flax_nnx.initializers.ones
        module = nnx_module(1, param_dtype="bfloat16", kernel_init=ones, bias_init=ones)
        for leaf in jax.tree.leaves(flax_nnx.state(module)):
            assert leaf.dtype == jnp.bfloat16
            assert (leaf == 1).all()

    @pytest.mark.parametrize("rank", RANKS)
    def test_gradients_reach_every_parameter(self, rank):
        module, inputs = nnx_module(rank, num_kv_heads=2), inputs_of(rank)
        gradients = flax_nnx.jit(flax_nnx.grad(lambda module: (module(inputs) ** 2).sum()))(module)
        for path, gradient in flax_nnx.to_flat_state(gradients):
            if path[:2] != ("key", "bias"):  # adding a constant to all keys changes no attention weight
                assert np.abs(gradient[...]).max() > 1e-3, path

    def test_window_of_the_whole_sequence_is_flax_attention(self):
        """Parameters are random, because the initial scales of the normalization are 1, which would hide errors."""
        settings: dict[str, Any] = {"qkv_features": 32, "out_features": 24, "normalize_qk": True}
        ours = nnx_module(1, kernel_size=12, stride=1, dilation=1, is_causal=False, **settings)
        flax = flax_nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=flax_nnx.Rngs(0), **settings)
        state = flax_nnx.state(ours, flax_nnx.Param)
        leaves, tree = jax.tree.flatten(state)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        state = jax.tree.unflatten(tree, [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])
        flax_nnx.update(ours, state)
        flax_nnx.update(flax, state)
        np.testing.assert_allclose(ours(inputs_of(1)), flax(inputs_of(1)), rtol=2e-4, atol=2e-4)

    def test_scale_and_backend_are_passed_on(self):
        inputs = inputs_of(2)
        default, zero = nnx_module(2), nnx_module(2, qk_scale=0.0)
        flex = nnx_module(2, backend="flex-fna", attention_kwargs={"backend": "flex-fmha"})
        assert np.abs(default(inputs) - zero(inputs)).max() > 1e-3
        np.testing.assert_allclose(default(inputs), nnx_module(2, qk_scale=0.5)(inputs), rtol=1e-6)
        np.testing.assert_allclose(default(inputs), flex(inputs), rtol=1e-5, atol=1e-5)

    def test_equal_arguments_share_a_compiled_program(self):
        traces = []

        @flax_nnx.jit
        def run(module, inputs):
            traces.append(1)
            return module(inputs)

        settings = {"attention_kwargs": {"backend": "flex-fmha"}}
        for _ in range(2):
            run(nnx_module(2, **settings), inputs_of(2))
        assert len(traces) == 1
        run(nnx_module(2, **settings, qk_scale=1.0), inputs_of(2))
        assert len(traces) == 2

    def test_vmap_and_scan_over_layers(self):
        @flax_nnx.split_rngs(splits=3)
        @flax_nnx.vmap
        def make(rngs):
            return NNX[2](FEATURES, num_heads=HEADS, kernel_size=3, rngs=rngs)

        layers, inputs = make(flax_nnx.Rngs(0)), inputs_of(2)
        graph, state = flax_nnx.split(layers)
        each = [flax_nnx.merge(graph, jax.tree.map(lambda array, i=i: array[i], state)) for i in range(3)]

        stacked = flax_nnx.vmap(lambda layer, inputs: layer(inputs), in_axes=(0, None))(layers, inputs)
        expected = jnp.stack([layer(inputs) for layer in each])
        np.testing.assert_allclose(stacked, expected, rtol=1e-5, atol=1e-5)

        step = flax_nnx.scan(lambda inputs, layer: layer(inputs), in_axes=(flax_nnx.Carry, 0), out_axes=flax_nnx.Carry)
        for layer in each:
            inputs = layer(inputs)
        np.testing.assert_allclose(step(inputs_of(2), layers), inputs, rtol=1e-5, atol=1e-5)


class TestLinen:
    @pytest.mark.parametrize("rank", RANKS)
    def test_tabulate(self, rank):
        pytest.importorskip("rich")
        module = LINEN[rank](num_heads=HEADS, **WINDOWS[rank], attention_kwargs={"backend": "flex-fmha"})
        table = module.tabulate(jax.random.key(0), inputs_of(rank), console_kwargs={"width": 200})
        assert f"NeighborhoodAttention{rank}D" in table
        parameters = 4 * (FEATURES * FEATURES + FEATURES)
        assert f"Total Parameters: {parameters:,}" in table


class TestDropout:
    @pytest.mark.parametrize("flavour", ["nnx", "linen"])
    def test_drops_outputs(self, flavour):
        module, inputs = nnx_module(1, proj_drop=0.5), inputs_of(1)
        plain = nnx_module(1)(inputs)

        def built_linen(**settings) -> Any:
            twin = LINEN[1](num_heads=HEADS, **WINDOWS[1], proj_drop=0.5, **settings)
            return functools.partial(twin.apply, {"params": params_of(module)}, inputs)

        if flavour == "nnx":
            call = functools.partial(module, inputs)
            seeded = [call(deterministic=False, rngs=flax_nnx.Rngs(dropout=seed)) for seed in (3, 3, 4)]
            dropped = call(deterministic=False)
            assert (call(deterministic=False) != dropped).any()
        else:
            call = built_linen()
            seeded = [call(deterministic=False, dropout_rng=jax.random.key(seed)) for seed in (0, 0, 1)]
            dropped = call(deterministic=False, rngs={"dropout": jax.random.key(1)})
            # The argument of the call takes precedence over the argument of the constructor.
            np.testing.assert_array_equal(
                built_linen(deterministic=False)(deterministic=True), call(deterministic=True)
            )
        with pytest.raises(ValueError, match="deterministic"):
            call()
        np.testing.assert_allclose(call(deterministic=True), plain, rtol=1e-6, atol=1e-6)
        kept = dropped != 0
        assert 0.3 < kept.mean() < 0.7
        np.testing.assert_allclose(dropped[kept], 2 * plain[kept], rtol=1e-6)
        np.testing.assert_array_equal(seeded[0], seeded[1])
        assert (seeded[0] != seeded[2]).any()

    def test_modes_of_nnx(self):
        module, inputs = nnx_module(1, proj_drop=0.5), inputs_of(1)
        module.eval()
        np.testing.assert_array_equal(module(inputs), nnx_module(1)(inputs))
        module.train()
        assert (module(inputs) == 0).any()


@pytest.mark.parametrize("flavour", ["nnx", "linen"])
class TestDropoutOfWeights:
    """Dropout of attention weights.

    The mean over many dropout masks is the result without dropout. Dropout sets single weights to zero, not outputs.
    """

    def module(self, flavour, rate, **settings):
        settings = {"num_heads": HEADS, "relative_bias": True, **WINDOWS[2], **settings}
        if flavour == "nnx":
            module = nnx.NeighborhoodAttention2D(FEATURES, attn_drop=rate, **settings, rngs=flax_nnx.Rngs(0))
            return lambda inputs, key=None, **more: module(inputs, rngs=key, **more)
        module = linen.NeighborhoodAttention2D(attn_drop=rate, **settings)
        variables = module.init(jax.random.key(0), inputs_of(2), deterministic=True)
        return lambda inputs, key=None, **more: module.apply(variables, inputs, dropout_rng=key, **more)

    def test_drops_weights_and_not_outputs(self, flavour):
        inputs, key = inputs_of(2), jax.random.key(3)
        layer = self.module(flavour, 0.25)
        plain = self.module(flavour, 0.0)(inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            np.testing.assert_array_equal(layer(inputs, deterministic=True), plain)
        with pytest.warns(
            attention_fn.AttentionDropoutWarning, match="attention weights are formed as an array"
        ) as found:
            dropped = layer(inputs, key, deterministic=False)
        assert [each.filename for each in found] == [__file__]
        assert (np.asarray(dropped) == 0).mean() < 0.1  # an output is zero only if all its weights are dropped
        assert np.abs(dropped - plain).max() > 0.01
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", attention_fn.AttentionDropoutWarning)
            np.testing.assert_array_equal(layer(inputs, key, deterministic=False), dropped)
            many = jax.vmap(lambda key: layer(inputs, key, deterministic=False))(jax.random.split(key, 400))
        error = np.abs(np.mean(many, axis=0) - plain).max()
        assert error < 0.35 * np.abs(np.std(many, axis=0)).max()

    def test_is_of_whole_layouts(self, flavour):
        layer, inputs, key = self.module(flavour, 0.5), inputs_of(2), jax.random.key(3)
        with pytest.raises(ValueError, match="attn_drop was given with query_origin: dropout requires queries"):
            layer(inputs[:, :4], key, deterministic=False, inputs_kv=inputs, query_origin=(1, 0))
        with pytest.raises(ValueError, match="attn_drop was given with extents: dropout requires queries"):
            layer(inputs, key, deterministic=False, extents=jnp.ones((2, 2), int))
        with pytest.raises(ValueError, match="attn_drop was given with inputs_kv of another layout"):
            layer(jnp.repeat(inputs, 2, axis=1), key, deterministic=False, inputs_kv=inputs, upsample=(2, 1))
        with pytest.raises(ValueError, match="attn_drop was given with key_bias"):
            layer(inputs, key, deterministic=False, key_bias=jnp.zeros(inputs.shape[:-1]))
        with pytest.raises(ValueError, match="attn_drop was given with clamp_window"):
            self.module(flavour, 0.5, clamp_window=True)(inputs, key, deterministic=False)


def test_modules_attend_from_boxes_padded_and_finer_layouts() -> None:
    """Modules pass origins, extents and upsampling to the operators. Inputs may have several batch dimensions."""
    rng = np.random.default_rng(0)
    image = jnp.asarray(rng.standard_normal((2, 3, 8, 6, 16)), "float32")
    layer = nnx.NeighborhoodAttention2D(16, num_heads=2, kernel_size=3, clamp_window=True, rngs=flax_nnx.Rngs(0))
    linen_layer = linen.NeighborhoodAttention2D(16, num_heads=2, kernel_size=3, clamp_window=True)
    names = ("query", "key", "value", "out")
    params = {name: {kind: getattr(getattr(layer, name), kind)[...] for kind in ("kernel", "bias")} for name in names}
    whole = layer(image)
    places = jnp.asarray(rng.integers(0, 4, (2, 3, 2)), jnp.int32).at[..., 1].set(0)
    boxes = jax.vmap(jax.vmap(lambda each, at: jax.lax.dynamic_slice(each, (at[0], 0, 0), (4, 6, 16))))(image, places)
    expected = jax.vmap(jax.vmap(lambda each, at: jax.lax.dynamic_slice(each, (at[0], 0, 0), (4, 6, 16))))(
        whole, places
    )
    extents = jnp.asarray(rng.integers(1, 6, (2, 3, 2)), jnp.int32)
    for call in (layer, functools.partial(linen_layer.apply, {"params": params})):
        found = call(boxes, inputs_kv=image, query_origin=places)
        np.testing.assert_allclose(found, expected, atol=2e-5)
        padded = call(image, extents=extents)
        height, width = (int(n) for n in extents[1, 2])
        np.testing.assert_allclose(padded[1, 2, :height, :width], call(image[1, 2, :height, :width]), atol=2e-5)
        fine = call(image, inputs_kv=image[:, :, ::2, ::2], upsample=2)
        assert fine.shape == image.shape
        np.testing.assert_allclose(fine[:, :, ::2, ::2], call(image[:, :, ::2, ::2]), atol=2e-5)
