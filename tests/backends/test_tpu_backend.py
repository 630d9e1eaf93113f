"""The TPU backend from outside: it runs by name, or where the environment wants it by default, and nowhere else."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest

import natten_jax
from natten_jax.backends import select
from natten_jax.plan.devices import Device
from tests.support.machine import Machine
from tests.support.programs import output_of, run_python

ARRAY = jax.ShapeDtypeStruct((1, 32, 2, 16), jnp.float32)
NAMES = "natten_jax_tpu_forward", "natten_jax_tpu_query_gradient", "natten_jax_tpu_key_gradients"


def exported(*platforms: str, x: Any = ARRAY, **arguments: Any) -> str:
    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: natten_jax.na1d(x, x, x, 5, **arguments).sum())(x)

    checks = natten_jax.EXPORT_CHECKS
    return str(jax.export.export(jax.jit(gradient), platforms=platforms, disabled_checks=checks)(x).mlir_module())


def kernels(text: str) -> list[bool]:
    return [name in text for name in NAMES]


def test_a_name_is_lowered_to_the_kernels_on_any_machine() -> None:
    assert kernels(exported("tpu", backend="tpu-fna")) == [True] * 3


def test_the_batch_size_may_be_a_symbol_but_for_scales_of_heads() -> None:
    (batch,) = jax.export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, *ARRAY.shape[1:]), ARRAY.dtype)
    assert kernels(exported("tpu", x=x, backend="tpu-fna")) == [True] * 3
    scales = jnp.ones(2)
    assert kernels(exported("tpu", backend="tpu-fna", scale=scales)) == [True] * 3
    with pytest.raises(ValueError, match=r"^scale is an array, and the batch size is batch: "):
        exported("tpu", x=x, backend="tpu-fna", scale=scales)


def test_the_default_is_plain_jax_unless_the_environment_asks(
    monkeypatch: pytest.MonkeyPatch, machine: Machine
) -> None:
    assert kernels(exported("tpu")) == [False] * 3
    machine.forget()
    monkeypatch.setenv(select.VARIABLE, " tpu,")
    assert kernels(exported("tpu")) == [True] * 3
    assert kernels(exported("cpu")) == [False] * 3


def test_what_the_kernels_do_not_take_stays_plain_jax(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    machine.has(Device("tpu"))
    monkeypatch.setenv(select.VARIABLE, "tpu")
    for shape, dtype in (((1, 32, 2, 264), "float32"), ((1, 32, 2, 16), "float16")):
        x = jax.ShapeDtypeStruct(shape, dtype)
        assert kernels(exported("tpu", x=x)) == [False] * 3
        with pytest.raises(ValueError, match=r"'tpu-fna' cannot run the forward pass .* Backends that can: flex-fna"):
            exported("tpu", x=x, backend="tpu-fna")


@pytest.mark.parametrize("value", ["tpux", "flex", "tpu;hopper"])
def test_the_environment_can_name_no_other_family(
    value: str, monkeypatch: pytest.MonkeyPatch, machine: Machine
) -> None:
    machine.forget()
    monkeypatch.setenv(select.VARIABLE, value)
    with pytest.raises(
        ValueError, match=rf"NATTEN_JAX_BY_DEFAULT must name families .* \(blackwell, tpu\), not '{value}'"
    ):
        x = jnp.zeros(ARRAY.shape)
        natten_jax.na1d(x, x, x, 5)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm"])
def test_other_devices_refuse_the_name(platform: str) -> None:
    with pytest.raises(ValueError, match=rf"'tpu-fna' cannot run .*: it runs on platform tpu only, not on {platform}"):
        exported(platform, backend="tpu-fna")


def test_additional_tokens_are_a_second_call_of_the_family() -> None:
    tokens = jnp.ones((1, 3, 2, 16))
    text = exported("tpu", backend="tpu-fna", additional_keys=tokens, additional_values=tokens)
    assert kernels(text) == [True] * 3
    assert "tpu-fna" in text and "tpu-fmha" in text


def test_queries_list_tiles_that_are_taken(machine: Machine) -> None:
    machine.has(Device("tpu"))
    x = jax.ShapeDtypeStruct((1, 40, 40, 2, 64), jnp.bfloat16)
    forward, *_ = natten_jax.get_configs_for_tpu_fna(x, x, x)
    backward, *_ = natten_jax.get_bwd_configs_for_tpu_fna(x, x, x)
    names = "q_tile_shape", "kv_tile_shape", "backward_q_tile_shape", "backward_kv_tile_shape"
    tiles: dict[str, Any] = dict(zip(names, (*forward, *backward), strict=True))

    def attend(x: jax.Array, **tiles: Any) -> jax.Array:
        return natten_jax.na2d(x, x, x, 7, backend="tpu-fna", **tiles)

    assert jax.eval_shape(lambda x: attend(x, **tiles), x).shape == x.shape
    with pytest.raises(ValueError, match="get_configs_for_tpu_fna lists them"):
        jax.eval_shape(lambda x: attend(x, q_tile_shape=(8, 8), kv_tile_shape=(8, 17)), x)


#: Gradients over two devices of the host, exported for TPUs: types name the split, or the caller does.
_ON_MESHES = """
import jax, numpy as np, natten_jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

def gradient(**arguments):
    return jax.grad(lambda x: natten_jax.na1d(x, x, x, 5, backend="tpu-fna", **arguments).sum())

def mesh_of(kind):
    return Mesh(np.asarray(jax.devices()), ("d",), axis_types=(kind,))

def exported(function, mesh):
    x = jax.ShapeDtypeStruct((2, 32, 2, 16), "float32", sharding=NamedSharding(mesh, TOKENS))
    with jax.set_mesh(mesh):
        checks = natten_jax.EXPORT_CHECKS
        found = jax.export.export(jax.jit(function), platforms=["tpu"], disabled_checks=checks)(x)
    assert found.nr_devices == 2 and found.platforms == ("tpu",)
    return str(found.mlir_module())

TOKENS = PartitionSpec(None, "d")
explicit = exported(gradient(), mesh_of(AxisType.Explicit))
mesh = mesh_of(AxisType.Auto)
manual = jax.shard_map(gradient(token_axes=("d",)), mesh=mesh, in_specs=TOKENS, out_specs=TOKENS)
for text in (explicit, exported(manual, mesh)):
    print(*(name in text for name in NAMES), "collective_permute" in text)
x = jax.device_put(np.zeros((2, 32, 2, 16), "float32"), NamedSharding(mesh, TOKENS))
try:
    jax.jit(gradient()).trace(x).lower(lowering_platforms=("tpu",))
except ValueError as error:
    print(error)
"""


def test_meshes_are_split_where_the_compiler_for_tpus_can() -> None:
    explicit, manual, auto = output_of(run_python(f"NAMES = {NAMES}{_ON_MESHES}", devices=2)).splitlines()
    assert explicit == manual == "True True True True"
    assert auto.startswith(
        "tpu-fna cannot be split over mesh axes of type Auto: the compiler for TPUs splits plain JAX"
    )
