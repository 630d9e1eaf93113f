"""Sharded arrays: unsupported shardings, transformations, mapped axes, and the compilation cache."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

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
def test_unsupported_shardings_are_gathered_with_a_warning(mode: str) -> None:
    mesh, arrays = mesh_of(mode, x=4, y=2), drawn()
    flat = [array.reshape(8, 48, 4, 8) for array in arrays]
    with jax.set_mesh(mesh) if mode == "Explicit" else warnings.catch_warnings():
        for function, given, spec, said in (
            (attend_all, flat, P("x", "y"), "token dimension 1"),
            (attend_all, flat, P("y", None, None, "x"), "head_dim"),
            (attend, arrays, P("x", None, None, None, "y"), "head_dim"),
        ):
            placed = put(given, mesh, *spec)
            with pytest.warns(UserWarning, match=f"gathers query.*{said}.*split batch or heads instead") as told:
                found = jax.jit(function)(*placed)
            # JAX 0.10 partitions without the caller's stack frames, so its warnings name "sys" instead of this file.
            assert {each.filename for each in told} in ({__file__}, {"sys"})
            assert_close(found, jax.jit(function)(*given))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert_close(jax.jit(gradient(function))(*placed), jax.jit(gradient(function))(*given))
        expected, gradients = jax.jit(attend)(*arrays), jax.jit(gradient(attend))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for spec in (SPLIT, P("x", "y"), P(None, None, "y", "x")):
                assert_close(jax.jit(attend)(*put(arrays, mesh, *spec)), expected)
        # Keys and values are resharded like the query if their shardings differ from it.
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
    split = put(stacked, mesh, "y", "x")  # axis 0, the mapped axis, is sharded
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


Function = Callable[..., Any]
TILES = "q_tile_shape", "kv_tile_shape", "backward_q_tile_shape", "backward_kv_tile_shape"
#: Sharding of arrays ``[mapped axis, batch, *tokens, heads, head_dim]``: the first token dimension is sharded.
WHOLE = P(None, None, "x")


def mapped_gradients(function: Function, axes: Any) -> Function:
    def both(q: Any, k: Any, v: Any, c: Any) -> Any:
        out, pullback = jax.vjp(jax.vmap(function, in_axes=axes), q, k, v)
        return out, *pullback(c)

    return both


def mapped(function: Function) -> Function:
    return lambda *arrays: jax.lax.map(lambda each: function(*each), arrays, batch_size=2)


def moved(function: Function) -> Function:
    return lambda *arrays: jax.jvp(jax.vmap(function), arrays[:3], arrays[3:])


@pytest.mark.parametrize(
    ("backend", "overlaps"),
    [("cpu-fna", False), ("cpu-fna", True), pytest.param("flex-fna", False, marks=pytest.mark.slow)],
)
def test_mapped_calls_whose_tokens_are_split(
    backend: str, overlaps: bool, set_overlap: Callable[[Callable[..., bool]], None]
) -> None:
    """Only the CPU kernels are tested with overlap, because plain JAX always receives its halos before it computes."""
    set_overlap(lambda *_: overlaps)
    window: dict[str, Any] = {"kernel_size": 3, "backend": backend}
    window |= dict.fromkeys(TILES, (1, 1)) if backend.startswith("cpu") else {}
    attend = functools.partial(na2d, **window)
    split_attend = functools.partial(attend, token_axes=("x", None))
    arrays = [jax.random.normal(key, (3, 2, 16, 4, 2, 8)) for key in jax.random.split(jax.random.key(0), 4)]
    query, key, value, cotangent = arrays
    mesh = mesh_of("Auto", x=4)

    def compare(function: Function, expected: Function, in_specs: Any, out_specs: Any, inputs: Any) -> None:
        split = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        assert_close(jax.jit(split)(*inputs), jax.jit(expected)(*inputs))

    for axes, its_key, key_spec in (((0, 0, 0), key, WHOLE), ((0, None, 0), key[0], P(None, "x"))):
        derive = functools.partial(mapped_gradients, axes=axes)
        inputs, specs = (query, its_key, value, cotangent), (WHOLE, key_spec, WHOLE, WHOLE)
        compare(derive(split_attend), derive(attend), specs, (WHOLE, *specs[:3]), inputs)
        part = jax.shard_map(split_attend, mesh=mesh, in_specs=(P(None, "x"),) * 3, out_specs=P(None, "x"))
        assert_close(jax.jit(derive(part))(*inputs), jax.jit(derive(attend))(*inputs))
    compare(mapped(split_attend), mapped(attend), (WHOLE,) * 3, WHOLE, arrays[:3])
    if backend.startswith("flex"):
        compare(moved(split_attend), moved(attend), (WHOLE,) * 6, (WHOLE,) * 2, (*arrays, query, key)[:6])

    explicit = mesh_of("Explicit", x=4)
    for function, operands in ((mapped_gradients(attend, (0, 0, 0)), arrays), (mapped(attend), arrays[:3])):
        expected = jax.jit(function)(*operands)
        with jax.set_mesh(explicit):
            assert_close(jax.jit(function)(*put(operands, explicit, *WHOLE)), expected)


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
