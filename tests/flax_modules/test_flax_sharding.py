"""The Flax modules with parameters sharded over a device mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")

from flax import linen as flax_linen
from flax import nnx as flax_nnx
from jax.sharding import NamedSharding, PartitionSpec
from natten_jax.flax_modules import convert

from tests.flax_modules.test_flax_convert import natten_weights
from tests.support.flax_layers import FEATURES, HEADS, LINEN, NNX, WINDOWS, inputs_of, nnx_module, params_of
from tests.support.meshes import assert_close, mesh_of, put
from tests.support.problems import QUICK_COMPILATION
from tests.support.sharded_training import train_nnx

#: For each kind of parameter, the mesh axis of each dimension. The dimension of heads is sharded.
KERNEL, BIAS, OUT_KERNEL = (None, "model", None), ("model", None), ("model", None, None)
METADATA = {
    "kernel_metadata": {"out_sharding": KERNEL},
    "bias_metadata": {"out_sharding": BIAS},
    "out_kernel_metadata": {"out_sharding": OUT_KERNEL},
    "out_bias_metadata": {},
}


def annotated(rank: int, **overrides):
    """Return a linen module whose parameters are annotated with mesh axes."""

    def named(initializer, names):
        return flax_linen.with_partitioning(initializer, names)

    kernel_init, bias_init = flax_linen.initializers.lecun_normal(), flax_linen.initializers.normal()
    settings = {
        "kernel_init": named(kernel_init, KERNEL),
        "bias_init": named(bias_init, BIAS),
        "out_kernel_init": named(kernel_init, OUT_KERNEL),
        "out_bias_init": bias_init,
    }
    return LINEN[rank](num_heads=HEADS, **{**WINDOWS[rank], **settings, **overrides})


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_training(kind: str) -> None:
    """Heads are sharded over one mesh axis, the batch over another. Results equal the results on one device.

    The program has all-reduces, but no other collectives.
    """
    mesh = mesh_of(kind, data=4, model=2)
    found, expected = train_nnx(mesh), train_nnx()
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    assert found.params.keys() == expected.params.keys()
    over_heads, bias_axes = {"query": (None, "model"), "out": ("model",)}, {"query": ("model",)}
    for name, array in found.params.items():
        np.testing.assert_allclose(array, expected.params[name], rtol=1e-4, atol=1e-5, err_msg=name)
        _, layer, kind_of_parameter = name.rsplit(".", 2)
        axes = over_heads if kind_of_parameter == "kernel" else bias_axes
        is_split_kv = layer in ("key", "value") and "0" in name  # only the first layer shards key/value heads
        spec = PartitionSpec(*axes.get("query" if is_split_kv else layer, ()))
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim), (name, array.sharding, spec)
    assert found.collectives() == {"all-reduce"}


@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_dropout_on_meshes_equals_dropout_on_one_device(flavour: str) -> None:
    settings: Any = {"attn_drop": 0.5, "proj_drop": 0.5, "relative_bias": True, "deterministic": False}
    settings |= {"kernel_size": 3, "num_heads": HEADS}
    inputs, streams = inputs_of(2), {"dropout": jax.random.key(1)}
    linen = LINEN[2](**settings)
    if flavour == "linen":
        params: Any = linen.init({"params": jax.random.key(0), "dropout": jax.random.key(2)}, inputs)
    else:
        module = NNX[2](FEATURES, rngs=flax_nnx.Rngs(0), **settings)
        parts: Any = flax_nnx.split(module, flax_nnx.Param, ...)
        graph, params, rest = parts

    def loss(params: Any, inputs: jax.Array) -> Any:
        if flavour == "linen":
            outputs: Any = linen.apply(params, inputs, rngs=streams)
        else:
            outputs = flax_nnx.merge(graph, params, rest)(inputs, rngs=flax_nnx.Rngs(**streams))
        return jnp.sum(jnp.sin(outputs)), outputs

    run = jax.jit(jax.grad(loss, (0, 1), has_aux=True), compiler_options=QUICK_COMPILATION)
    expected = run(params, inputs)
    for kind in ("Explicit", "Auto"):
        mesh = mesh_of(kind, x=2)
        with jax.set_mesh(mesh):
            found = run(put(params, mesh), put(inputs, mesh, "x"))
        assert found[1].sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("x")), found[1].ndim)
        assert_close(found, expected, rtol=2e-4, note=kind)


class TestNnx:
    def test_metadata_is_kept_with_the_parameters(self):
        with jax.set_mesh(mesh_of("Auto", model=1)):
            module = nnx_module(2, **METADATA)
            other = {"kv_kernel_metadata": {"tag": 1}, "kv_bias_metadata": {}}
            modules = module, nnx_module(2, **other)
            specs: Any = [flax_nnx.get_partition_spec(flax_nnx.state(each)) for each in modules]
        for name in ("query", "key", "value"):
            assert specs[0][name]["kernel"].get_value() == PartitionSpec(*KERNEL)
            assert specs[0][name]["bias"].get_value() == PartitionSpec(*BIAS)
        assert specs[0]["out"]["kernel"].get_value() == PartitionSpec(*OUT_KERNEL)
        assert specs[0]["out"]["bias"].get_value() == PartitionSpec()
        assert [specs[1][name]["kernel"].get_metadata().get("tag") for name in ("query", "key", "value", "out")] == [
            *(None, 1, 1, None)
        ]

    def test_initializers_annotate(self):
        def named(*names):
            return flax_nnx.with_partitioning(flax_nnx.initializers.normal(), names)

        inits = {"kernel_init": named(*KERNEL), "bias_init": named(*BIAS)}
        outs = {"out_kernel_init": named(*OUT_KERNEL), "out_bias_init": named(None)}
        with jax.set_mesh(mesh_of("Auto", model=1)):
            state: Any = flax_nnx.state(nnx_module(1, **inits, **outs, kv_bias_init=flax_nnx.initializers.ones))
            specs: Any = flax_nnx.get_partition_spec(state)
        assert specs["value"]["kernel"].get_value() == PartitionSpec(*KERNEL)
        assert specs["query"]["bias"].get_value() == PartitionSpec(*BIAS)
        assert specs["key"]["bias"].get_value() == PartitionSpec()
        assert specs["out"]["kernel"].get_value() == PartitionSpec(*OUT_KERNEL)
        assert specs["out"]["bias"].get_value() == PartitionSpec(None)
        np.testing.assert_array_equal(state["key"]["bias"].get_value(), 1)

    @pytest.mark.parametrize(
        ("settings", "error", "message"),
        [
            ({"kernel_metadata": None}, TypeError, "kernel_metadata must be a mapping from names, got None"),
            ({"out_bias_metadata": ("model",)}, TypeError, "out_bias_metadata must be a mapping"),
            ({"bias_metadata": {"out_sharding": BIAS}}, ValueError, r"out_bias_metadata has .*'model', None.* 1 dim"),
            ({"kv_kernel_metadata": {"out_sharding": (None,) * 4}}, ValueError, "kv_kernel_metadata has .* 4 entries"),
        ],
    )
    def test_metadata_is_checked(self, settings, error, message):
        with pytest.raises(error, match=message):
            nnx_module(1, **settings)

    def test_converted_weights_keep_the_sharding_of_the_parameters(self):
        mesh = mesh_of("Auto", model=1)
        with jax.set_mesh(mesh):
            module, plain = nnx_module(1, **METADATA), nnx_module(1)
            weights = natten_weights()
            convert.load_nnx(module, weights)
            convert.load_nnx(plain, weights)
        jax.tree.map(np.testing.assert_array_equal, params_of(module), params_of(plain))
        for layer, names in ((module.query, KERNEL), (module.value, KERNEL), (module.out, OUT_KERNEL)):
            expected = NamedSharding(mesh, PartitionSpec(*names))
            assert layer.kernel[...].sharding.is_equivalent_to(expected, ndim=3)

    def test_converted_weights_without_a_mesh_are_not_bound_to_a_device(self):
        module = nnx_module(1)
        convert.load_nnx(module, natten_weights())
        assert not any(leaf.committed for leaf in jax.tree.leaves(params_of(module)))


class TestLinen:
    def test_names_are_kept_with_and_without_a_mesh(self):
        inputs = inputs_of(1)
        module, plain = annotated(1), LINEN[1](num_heads=HEADS, **WINDOWS[1])
        variables = module.init(jax.random.key(0), inputs)
        with jax.set_mesh(mesh_of("Auto", model=1)):
            on_mesh = jax.jit(module.init)(jax.random.key(0), inputs)
            outputs = jax.jit(module.apply)(on_mesh, inputs)
        for found in (variables, on_mesh):
            specs = flax_linen.get_partition_spec(found)["params"]
            for name in ("query", "key", "value"):
                assert specs[name] == {"kernel": PartitionSpec(*KERNEL), "bias": PartitionSpec(*BIAS)}
            assert specs["out"] == {"kernel": PartitionSpec(*OUT_KERNEL), "bias": PartitionSpec()}
        np.testing.assert_allclose(outputs, plain.apply(flax_linen.unbox(variables), inputs), rtol=1e-5, atol=1e-6)

    def test_initializers_of_other_projections(self):
        ones = flax_linen.initializers.ones
        module = annotated(1, kv_kernel_init=ones, kv_bias_init=ones)
        params = module.init(jax.random.key(0), inputs_of(1))["params"]
        for name in ("key", "value"):
            assert all(isinstance(leaf, jax.Array) and (leaf == 1).all() for leaf in params[name].values())
        assert isinstance(params["query"]["kernel"], flax_linen.Partitioned)
        assert params["query"]["kernel"].unbox().shape == (FEATURES, HEADS, FEATURES // HEADS)
        assert jnp.std(params["query"]["kernel"].unbox()) > 0
