"""Splits that cannot stay, transformations over split arrays, exported programs and the compilation cache."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import natten_jax
from natten_jax import attention, na2d
from tests.support.meshes import assert_close, mesh_of, put
from tests.support.programs import output_of, run_python

attend = functools.partial(na2d, kernel_size=(3, 4), backend="cpu-fna")
attend_all = functools.partial(attention, backend="cpu-fmha")
SPLIT = P("x", None, None, "y")


def gradient(function: Any) -> Any:
    return jax.grad(lambda *arrays: jnp.sin(function(*arrays)).sum(), argnums=(0, 1, 2))


def drawn() -> list[jax.Array]:
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.standard_normal((8, 8, 6, 4, 8)), "float32") for _ in range(3)]


@pytest.mark.usefixtures("without_stored_programs")
@pytest.mark.parametrize("mode", ["Auto", "Explicit"])
def test_what_cannot_stay_split_is_gathered_with_a_warning(mode: str) -> None:
    mesh, arrays = mesh_of(mode, x=4, y=2), drawn()
    flat = [array.reshape(8, 48, 4, 8) for array in arrays]
    with jax.set_mesh(mesh) if mode == "Explicit" else warnings.catch_warnings():
        for function, given, spec, said in (
            (attend_all, flat, P("x", "y"), "token dimension 1"),
            (attend_all, flat, P("y", None, None, "x"), "head_dim"),
            (attend, arrays, P("x", None, None, None, "y"), "head_dim"),
        ):
            placed = put(given, mesh, *spec)
            with pytest.warns(UserWarning, match=f"gathers query.*{said}.*batch and heads can stay split"):
                found = jax.jit(function)(*placed)
            assert_close(found, jax.jit(function)(*given))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert_close(jax.jit(gradient(function))(*placed), jax.jit(gradient(function))(*given))
        expected, gradients = jax.jit(attend)(*arrays), jax.jit(gradient(attend))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for spec in (SPLIT, P("x", "y"), P(None, None, "y", "x")):
                assert_close(jax.jit(attend)(*put(arrays, mesh, *spec)), expected)
        # Keys and values follow the query.
        heads = P(None, None, None, "x"), P(None, None, None, "y")
        for specs in ((P("x"), heads[1], P()), (P(), P("x"), P("y")), (heads[0], P("y"), P())):
            placed = [put(array, mesh, *spec) for array, spec in zip(arrays, specs, strict=True)]
            assert_close(jax.jit(attend)(*placed), expected)
            assert_close(gradients(*placed), gradients(*arrays))


def test_transformations_of_split_arrays() -> None:
    mesh, arrays = mesh_of("Auto", x=4, y=2), drawn()
    expected, placed = jax.jit(attend)(*arrays), put(arrays, mesh, *SPLIT)
    given = jax.jit(attend, donate_argnums=0)(put(arrays[0], mesh, *SPLIT), *placed[1:])
    assert_close(given, expected)
    assert given.sharding.is_equivalent_to(placed[0].sharding, 5)
    stacked = [jnp.stack([array, array + 1]) for array in arrays]
    alone = jnp.stack([attend(*[array[i] for array in stacked]) for i in range(2)])
    mapped = jax.jit(lambda *arrays: jax.lax.map(lambda each: attend(*each), arrays))
    assert_close(mapped(*put(stacked, mesh, None, *SPLIT)), alone)
    split = put(stacked, mesh, "y", "x")  # a mapped axis that is split
    compiled = jax.jit(jax.vmap(attend)).lower(*split).compile()
    text = compiled.as_text() or ""
    assert not [kind for kind in ("all-gather", "all-to-all", "collective-permute") if kind in text]
    assert_close(compiled(*split), alone)
    by_device = [array.reshape(8, 1, *array.shape[1:]) for array in arrays]
    assert_close(jax.pmap(attend)(*by_device), expected.reshape(by_device[0].shape))
    once = jax.jit(attend)(*placed)
    np.testing.assert_array_equal(jax.jit(attend, out_shardings=NamedSharding(mesh, P()))(*placed), once)
    half = jax.make_mesh((4,), ("z",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[4:])
    np.testing.assert_array_equal(jax.jit(attend)(*put(arrays, half, "z")), once)


def test_exported_programs_of_several_devices() -> None:
    def exported(function: Any, arrays: Any) -> Any:
        stored = export.export(jax.jit(function), disabled_checks=natten_jax.EXPORT_CHECKS)(*arrays).serialize()
        return jax.jit(export.deserialize(stored).call)(*arrays)

    mesh, explicit, arrays = mesh_of("Auto", x=4, y=2), mesh_of("Explicit", x=4, y=2), drawn()
    expected, placed = jax.jit(attend)(*arrays), put(arrays, mesh, *SPLIT)
    with pytest.raises(NotImplementedError, match=r"(?s)^(?=.*jax\.shard_map)(?=.*Explicit)"):
        exported(attend, placed)
    assert_close(exported(jax.shard_map(attend, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT), placed), expected)
    with jax.set_mesh(explicit):
        assert_close(exported(attend, put(arrays, explicit, *SPLIT)), expected)


CACHED = """
import sys
import jax
from tests.sharding.test_sharded_programs import SPLIT, drawn
from tests.support.meshes import assert_close, mesh_of, put
from natten_jax import na2d

hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
arrays = drawn()
placed = jax.block_until_ready(put(arrays, mesh_of("Auto", x=4, y=2), *SPLIT))
for pair in sys.argv[2:]:
    scale, window = pair.split(",")
    run = lambda *each: na2d(*each, kernel_size=int(window), scale=float(scale), backend="cpu-fna")
    hits.clear()
    found = jax.jit(run)(*placed)
    print(len(hits))
    jax.config.update("jax_enable_compilation_cache", False)
    assert_close(found, jax.jit(run)(*arrays))
    jax.config.update("jax_enable_compilation_cache", True)
"""


def test_the_next_process_finds_the_compiled_program_and_no_other(tmp_path: Path) -> None:
    def hits(*problems: str) -> list[str]:
        return output_of(run_python(CACHED, str(tmp_path), *problems, devices=8)).split()

    assert hits("0.5,3") == ["0"]
    assert hits("0.5,3", "0.25,3", "0.25,5") == ["1", "0", "0"]
