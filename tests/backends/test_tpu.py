"""The TPU backend: selection, and kernels in Pallas's interpreter."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import natten_jax
from natten_jax import backends, na2d
from natten_jax.backends import select
from natten_jax.backends.pallas import _tpu_call
from natten_jax.backends.pallas._tpu_call import pack_size
from natten_jax.performance import PASSES, tile_names
from natten_jax.plan.devices import Device
from tests.fuzz.interpreted import KERNELS
from tests.fuzz.problem import Fuzzed
from tests.ops.test_added_logits import CASES as ADDED
from tests.ops.test_added_logits import check
from tests.support.interpreted_tpu import FINDING_RACES, raising_races, register
from tests.support.machine import Machine
from tests.support.problems import Case, Trial, check_all

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


def test_the_batch_size_may_be_symbolic_without_scales_per_head() -> None:
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


def test_unsupported_problems_run_in_plain_jax(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
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


def test_configuration_queries_list_supported_tiles(machine: Machine) -> None:
    machine.has(Device("tpu"))
    x = jax.ShapeDtypeStruct((1, 40, 40, 2, 64), jnp.bfloat16)
    forward, *_ = natten_jax.get_configs_for_tpu_fna(x, x, x)
    backward, *_ = natten_jax.get_bwd_configs_for_tpu_fna(x, x, x)
    names = "q_tile_shape", "kv_tile_shape", "backward_q_tile_shape", "backward_kv_tile_shape"
    tiles: dict[str, Any] = dict(zip(names, (*forward, *backward), strict=True))

    def attend(x: jax.Array, **tiles: Any) -> jax.Array:
        return natten_jax.na2d(x, x, x, 7, backend="tpu-fna", **tiles)

    assert jax.eval_shape(lambda x: attend(x, **tiles), x).shape == x.shape
    with pytest.raises(ValueError, match="get_configs_for_tpu_fna lists all"):
        jax.eval_shape(lambda x: attend(x, q_tile_shape=(8, 8), kv_tile_shape=(8, 17)), x)


FAMILY = KERNELS.family

WINDOWS = {
    "cut, stride and dilation": Case((31, 24), (5, 6), stride=(1, 3), dilation=(3, 2), edges=("cut", "shift")),
    "wrap in both": Case((12, 16), (5, 4), dilation=(1, 2), edges=("wrap", "wrap"), additional=3),
    "boxes": Case((40,), (9,), batch=3, box=(6,), origins=((0,), (17,), (34,)), is_causal=(True,)),
    "box of a layout that cuts": Case((24,), (7,), edges=("cut",), box=(8,), origins=((14,),)),
    "upsampled": Case((13, 9), (4, 3), upsample=(2, 3)),
    "sinks": Case((25,), (6,), heads=4, heads_kv=2, sinks=True),
    "queries of attention": Case((50,), queries=12, origins=((31,),), is_causal=(True,)),
}


@pytest.mark.usefixtures("_known")
@pytest.mark.parametrize("name", WINDOWS)
def test_results_equal_the_definition(name: str) -> None:
    check_all([Trial(WINDOWS[name], "float32", len(name))], FAMILY)


@pytest.mark.usefixtures("_known")
@pytest.mark.parametrize("name", ["shared", "merged"])
def test_one_rule_for_biases_that_hide_keys(name: str) -> None:
    # Non-finite numbers spread to other heads that are packed in the same vector register. With one key/value head,
    # there are no packs.
    check(FAMILY, dataclasses.replace(ADDED[name], heads_kv=1), "float32", without=("0.49 min",))


# The TPU kernels in Pallas's interpreter, which detects races and fills new memory with NaN.


def direct(case: Case, dtype: str, q_tile: tuple[int, ...], kv_tile: tuple[int, ...]) -> Fuzzed:
    """Return a problem that calls the kernels directly, with the same tiles in both passes."""
    tiles = {name: tile for pass_ in PASSES for name, tile in zip(tile_names(pass_), (q_tile, kv_tile), strict=True)}
    return Fuzzed(FAMILY.name, case, dtype, 0, is_direct=True, tiles=tiles)


VOLUME = Case((3, 4, 18), (2, 3, 4), stride=(1, 2, 3), is_causal=(True, False, False), head_dim=16, head_dim_v=24)

PROBLEMS = {
    "three dimensions": direct(VOLUME, "bfloat16", (3, 2, 16), (2, 3, 16)),
    "attention": direct(Case((25,), queries=20, scale=-0.3), "float32", (8,), (16,)),
}


@pytest.fixture
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_registered", [*backends.registered()])
    register()


@pytest.mark.usefixtures("_known")
@pytest.mark.parametrize("which", [*PROBLEMS, 0, 1, 2])
def test_results_and_gradients_without_races(which: str | int) -> None:
    """``python -m tests.fuzz.interpreted`` runs more random problems."""
    problem = PROBLEMS[which] if isinstance(which, str) else KERNELS.draw(0, which)
    assert not KERNELS.find_errors(problem), problem


def test_races_are_found() -> None:
    """The interpreter reports a kernel that reads a buffer before the copy into it is complete."""

    def kernel(x: Any, out: Any, scratch: Any, done: Any) -> None:
        copy = pltpu.make_async_copy(x, scratch, done)
        copy.start()
        out[...] = scratch[...]
        copy.wait()

    racing = pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
        interpret=FINDING_RACES,
    )
    with pytest.raises(Exception, match="RACE DETECTED"), raising_races():
        jax.block_until_ready(racing(jnp.ones((8, 128), jnp.float32)))


@pytest.mark.usefixtures("_known")
def test_biases_of_keys() -> None:
    cases = [
        Case((24,), (5,), key_bias="tokens", hidden=0.4, heads=2, heads_kv=1, batch=2),
        Case((4, 9), (3, 4), key_bias="heads", hidden=0.6, heads=2, heads_kv=2, scales=(0.0, -0.5), additional=2),
    ]
    check_all([Trial(case, dtype) for case in cases for dtype in FAMILY.dtypes], FAMILY)


@pytest.mark.usefixtures("_known")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packs_of_narrow_heads(dtype: str) -> None:
    """Test packs (narrow heads in the same vector register).

    The cases are two packs of four heads, a pack of three heads with different head dimensions of keys and values, and
    a pack of two heads with boxes of several chunks.
    """
    scales = tuple((-1) ** i * 0.1 * (i + 1) for i in range(8))
    eight = Case((5, 20), (3, 6), stride=(1, 2), batch=2, scales=scales).with_heads(8, 8)
    three = Case((41,), (9,), dilation=(2,), is_causal=(True,), head_dim=24, head_dim_v=16).with_heads(3, 3)
    large = Case((24, 64), (21, 50), is_causal=(False, True), scales=(0.3, -0.2)).with_heads(2, 2)
    cases = [dataclasses.replace(eight, head_dim=32), three, dataclasses.replace(large, head_dim=32)]
    check_all([Trial(case, dtype, seed) for seed, case in enumerate(cases)], FAMILY)


@pytest.mark.parametrize(
    ("heads", "widths", "pack"),
    [
        ((2, 2), (32, 32), 2),
        ((8, 8), (32, 32), 4),
        ((5, 5), (16, 24), 5),
        ((6, 6), (32, 32), 1),
        ((8, 8), (24, 24), 1),
        ((8, 8), (32, 16), 1),
        ((4, 2), (32, 32), 1),
        ((2, 2), (40, 32), 1),
    ],
)
def test_which_heads_are_packed(heads: tuple[int, int], widths: tuple[int, int], pack: int) -> None:
    assert pack_size(*heads, widths) == pack


@pytest.mark.usefixtures("_known")
def test_chunks_as_the_kernels_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read the chunks of a box through reshaped references, so XLA runs the kernels in this test.

    Pallas's interpreter does not support reshaped references. In tests that use it, kernels read whole boxes.
    """
    monkeypatch.setattr(_tpu_call, "FEW_ROWS_CHUNK", 48)
    query, key, value = (jax.random.normal(jax.random.key(i), (1, 20, 33, 2, 16)) for i in range(3))
    attend = functools.partial(na2d, query, key, value, (7, 9), (2, 1), (1, 2), (False, True))
    tiled = attend(backend="interpreted-fna", q_tile_shape=(4, 8), kv_tile_shape=(6, 16))
    assert jnp.abs(tiled - attend(backend="flex-fna")).max() < 1e-5
