"""Splits that cannot stay, transformations over split arrays, exported programs and the compilation cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import output_of, run_python

PREAMBLE = """
import sys, warnings
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import natten_jax
from natten_jax import attention, na2d

mode = sys.argv[1] if len(sys.argv) > 1 else "Auto"
mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(getattr(AxisType, mode),) * 2)
generator = np.random.default_rng(0)
arrays = [jnp.asarray(generator.standard_normal((8, 8, 6, 4, 8)), "float32") for _ in range(3)]
attend = lambda q, k, v, **more: na2d(q, k, v, kernel_size=(3, 4), backend="cpu-fna", **more)
expected = jax.jit(attend)(*arrays)
gradient = jax.grad(lambda *a: jnp.sin(attend(*a)).sum(), argnums=(0, 1, 2))

def place(spec, arrays=arrays):
    return [jax.device_put(array, NamedSharding(mesh, spec)) for array in arrays]

def close(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=2e-5)
"""

GATHERS = """
if mode == "Explicit":
    jax.set_mesh(mesh)
windows = attend, arrays, expected, gradient
flat = [array.reshape(8, 48, 4, 8) for array in arrays]
attend_all = lambda q, k, v: attention(q, k, v, backend="cpu-fmha")
gradient_of_all = jax.grad(lambda *a: jnp.sin(attend_all(*a)).sum(), argnums=(0, 1, 2))
whole = attend_all, flat, jax.jit(attend_all)(*flat), gradient_of_all
for (attend, arrays, expected, gradient), spec, said in (
    (whole, P("x", "y"), "token dimension 1"),
    (whole, P("y", None, None, "x"), "head_dim"),
    (windows, P("x", None, None, None, "y"), "head_dim"),
):
    placed = place(spec, arrays)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = jax.jit(attend)(*placed)
    texts = [str(each.message) for each in caught]
    assert any("gathers query" in text and said in text and "batch and heads can stay split" in text for text in texts)
    close(found, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(jax.jit(gradient)(*placed), jax.jit(gradient)(*arrays))
with warnings.catch_warnings():
    warnings.simplefilter("error")
    for spec in (P("x", None, None, "y"), P("x", "y"), P(None, None, "y", "x")):
        close(jax.jit(attend)(*place(spec)), expected)
# Keys and values follow the query.
for specs in ((P("x"), P(None, None, None, "y"), P()), (P(), P("x"), P("y")), (P(None, None, None, "x"), P("y"), P())):
    placed = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs)]
    close(jax.jit(attend)(*placed), expected)
    close(jax.jit(gradient)(*placed), jax.jit(gradient)(*arrays))
print("done")
"""

TRANSFORMED = """
spec = P("x", None, None, "y")
placed = place(spec)
given = jax.jit(attend, donate_argnums=0)(place(spec)[0], *placed[1:])
close(given, expected)
assert given.sharding.is_equivalent_to(placed[0].sharding, 5)
stacked = [jnp.stack([array, array + 1]) for array in arrays]
put = [jax.device_put(array, NamedSharding(mesh, P(None, *spec))) for array in stacked]
alone = jnp.stack([attend(*[array[i] for array in stacked]) for i in range(2)])
close(jax.jit(lambda *a: jax.lax.map(lambda each: attend(*each), a))(*put), alone)
split = [jax.device_put(array, NamedSharding(mesh, P("y", "x"))) for array in stacked]  # a mapped axis that is split
mapped = jax.jit(jax.vmap(attend))
compiled = mapped.lower(*split).compile()
assert not [kind for kind in ("all-gather", "all-to-all", "collective-permute") if kind in compiled.as_text()]
close(compiled(*split), mapped(*stacked))
by_device = [array.reshape(8, 1, *array.shape[1:]) for array in arrays]
close(jax.pmap(attend)(*by_device), expected.reshape(by_device[0].shape))
once = jax.jit(attend)(*placed)
np.testing.assert_array_equal(jax.jit(attend, out_shardings=NamedSharding(mesh, P()))(*placed), once)
half = jax.make_mesh((4,), ("z",), axis_types=(AxisType.Auto,), devices=jax.devices()[4:])  # not the first devices
np.testing.assert_array_equal(jax.jit(attend)(*[jax.device_put(a, NamedSharding(half, P("z"))) for a in arrays]), once)
print("done")
"""

EXPORT = """
from jax import export
checks = natten_jax.EXPORT_CHECKS
placed = place(P("x", None, None, "y"))
try:
    export.export(jax.jit(attend), disabled_checks=checks)(*placed)
except NotImplementedError as error:
    assert "jax.shard_map" in str(error) and "Explicit" in str(error), error
else:
    raise AssertionError("exported")
spec = P("x", None, None, "y")
manual = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec))
again = export.deserialize(export.export(manual, disabled_checks=checks)(*placed).serialize())
close(jax.jit(again.call)(*placed), expected)
explicit = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
with jax.set_mesh(explicit):
    typed = [jax.device_put(array, NamedSharding(explicit, spec)) for array in arrays]
    again = export.deserialize(export.export(jax.jit(attend), disabled_checks=checks)(*typed).serialize())
    close(jax.jit(again.call)(*typed), expected)
print("done")
"""

CACHED = """
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
jax.config.update("jax_compilation_cache_dir", sys.argv[2])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
placed = place(P("x", None, None, "y"))
jax.block_until_ready(placed)
hits.clear()
scale, window = float(sys.argv[3]), int(sys.argv[4])
run = lambda q, k, v: na2d(q, k, v, kernel_size=window, scale=scale, backend="cpu-fna")
found = jax.jit(run)(*placed)
hit = len(hits)
jax.config.update("jax_enable_compilation_cache", False)
close(found, jax.jit(run)(*arrays))
print("hits", hit)
"""


@pytest.mark.parametrize("mode", ["Auto", "Explicit"])
def test_what_cannot_stay_split_is_gathered_with_a_warning(mode: str) -> None:
    assert output_of(run_python(PREAMBLE + GATHERS, mode, devices=8)).endswith("done\n")


def test_transformations_of_split_arrays() -> None:
    assert output_of(run_python(PREAMBLE + TRANSFORMED, devices=8)).endswith("done\n")


def test_exported_programs_of_several_devices() -> None:
    assert output_of(run_python(PREAMBLE + EXPORT, devices=8)).endswith("done\n")


def test_the_next_process_finds_the_compiled_program_and_no_other(tmp_path: Path) -> None:
    def hits(scale: float, window: int) -> int:
        arguments = "Auto", str(tmp_path), str(scale), str(window)
        return int(output_of(run_python(PREAMBLE + CACHED, *arguments, devices=8)).split()[-1])

    assert hits(0.5, 3) == 0
    assert hits(0.5, 3) == 1
    assert hits(0.25, 3) == 0
    assert hits(0.25, 5) == 0
