"""Passes that overlap halo exchange with compute: which passes are selected, and the order of their operations."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from natten_jax import na2d
from natten_jax.arrays.boxes import elements_of, words_of
from natten_jax.backends.select import resolve
from natten_jax.cost_model.halos import NVLINK, profitable_overlap
from natten_jax.halo import bytes_received, halos_of
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan, Request
from natten_jax.problem import Problem, problem_of
from natten_jax.simulator import calibration_for, predict_split, simulate
from tests.support.meshes import mesh_of, put
from tests.support.programs import output_of, run_python

SetOverlap = Callable[[Callable[..., bool]], None]
H200 = Device("cuda", (9, 0), is_present=False)
TILES = "q_tile_shape", "kv_tile_shape", "backward_q_tile_shape", "backward_kv_tile_shape"


def plans(problem: Problem) -> tuple[Plan, Plan]:
    request = Request(problem, backend="hopper-fna")
    return resolve(request, H200, "forward"), resolve(request, H200, "backward")


VIDEO = problem_of((30, 48, 80), (18, 24, 24), heads=24, head_dim=128, dtype="bfloat16")
STRIDED_VIDEO = problem_of((30, 48, 80), (18, 24, 24), (16, 8, 8), heads=24, head_dim=128, dtype="bfloat16")


@pytest.mark.parametrize(
    ("problem", "parts"),
    [
        (problem_of((131072,), 4096, is_causal=True, heads=8, head_dim=128, dtype="bfloat16"), (2,)),
        *((video, parts) for video in (VIDEO, STRIDED_VIDEO) for parts in ((1, 1, 2), (1, 2, 1))),
    ],
)
def test_overlap_pays_on_a_gpu(problem: Problem, parts: tuple[int, ...]) -> None:
    """Test that overlap is selected. On two H200, overlap reduced the time of one problem from 11.9 to 11.5 ms."""
    halos = halos_of(problem, parts)
    assert all(profitable_overlap(plan, halos) is not None for plan in plans(problem))


def test_overlap_that_does_not_pay() -> None:
    small = problem_of((64, 64), 7, heads=1, head_dim=64, dtype="bfloat16")
    for parts in ((2, 1), (1, 1)):
        assert all(profitable_overlap(plan, halos_of(small, parts)) is None for plan in plans(small))


def test_the_link_equals_the_measurement() -> None:
    for received, seconds in ((1e6, 0.12e-3), (16e6, 0.25e-3), (64e6, 0.44e-3), (212e6, 1.03e-3), (425e6, 1.59e-3)):
        assert NVLINK.seconds(int(received)) == pytest.approx(seconds, rel=0.22)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a traced function and of the functions that it calls, recursively."""
    for equation in jaxpr.eqns:
        parameters = jax.tree.leaves(list(equation.params.values()))
        inner = [getattr(each, "jaxpr", each) for each in parameters if hasattr(each, "eqns")]
        if not inner:
            yield equation
        for each in inner:
            yield from equations(each)


def traced(pass_: str, devices: int) -> Any:
    """Trace a pass of a 2-D problem whose first token dimension is sharded."""
    mesh = jax.sharding.AbstractMesh((devices,), ("x",), axis_types=(AxisType.Auto,))

    tiles: dict[str, Any] = dict.fromkeys(TILES[:2], (1, 1))
    attend = functools.partial(na2d, kernel_size=3, backend="cpu-fna", token_axes=("x", None), **tiles)

    def local(*arrays: jax.Array) -> Any:
        return attend(*arrays) if pass_ == "forward" else jax.vjp(attend, *arrays)[1](arrays[0])

    spec = P(None, "x")
    split = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec if pass_ == "forward" else (spec,) * 3)
    tokens = jax.ShapeDtypeStruct((1, 16, 4, 1, 8), jnp.float32)
    return jax.jit(split).trace(tokens, tokens, tokens)


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_halos_travel_while_kernels_run(pass_: str, set_overlap: SetOverlap) -> None:
    set_overlap(lambda *_: True)
    program = list(equations(traced(pass_, 4).jaxpr))
    names = [each.primitive.name for each in program]
    passes = [i for i, name in enumerate(names) if name == "natten_jax_pass"]
    assert len(passes) == (3 if pass_ == "forward" else 6)
    passes = passes[-3:]  # kernels for local keys, the halo before them, and the halo after them
    permutes = [i for i, name in enumerate(names) if name == "ppermute"]
    permutes = permutes[:4] if pass_ == "forward" else permutes[4:8]
    made_by = {each: i for i, equation in enumerate(program) for each in equation.outvars}

    def read_by(i: int) -> set[Any]:
        return {each for each in program[i].invars if not hasattr(each, "val")}  # without literals

    def comes_after(i: int, j: int) -> bool:
        """Return True if equation ``i`` depends on the results of equation ``j``."""
        found, todo = set(), [i]
        while todo:
            todo = [
                made_by[each] for k in todo for each in read_by(k) if each in made_by and made_by[each] not in found
            ]
            found |= set(todo)
        return j in found

    for meanwhile, following, slab_permutes in zip(passes, passes[1:], (permutes[:2], permutes[2:]), strict=False):
        # The slabs to send are cut before the kernel ``meanwhile`` starts, which does not wait for their exchange.
        (sent,) = {made_by[program[i].invars[0]] for i in slab_permutes}
        assert comes_after(meanwhile, sent) and not any(comes_after(meanwhile, i) for i in slab_permutes)
        # The kernel ``following`` reads the received slabs. They are not read before ``meanwhile`` has finished.
        arrived = {program[i].outvars[0] for i in slab_permutes}
        (received,) = {i for i in range(len(program)) if read_by(i) & arrived}
        assert comes_after(received, meanwhile) and comes_after(following, received)
        assert names[sent] == names[received] == "optimization_barrier"
    # The second exchange starts only after the first kernel has finished.
    assert all(comes_after(i, passes[0]) for i in permutes[2:])


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_two_devices_swap_halos(pass_: str, overlaps: bool, set_overlap: SetOverlap) -> None:
    """Two devices swap slabs in one permute. With one permute per direction, half of the link would be idle."""
    set_overlap(lambda *_: overlaps)
    program = traced(pass_, 2).lower(lowering_platforms=("cpu",)).as_text()
    moves = re.findall(r"collective_permute.*?source_target_pairs = dense<(.*?)> :", program)
    # The forward pass sends slabs of keys and values (two permutes). The program for ``backward`` runs a forward pass,
    # then a backward pass that sends gradients of keys and values (two more permutes). With overlap, the forward pass
    # does not save the slabs, so the backward pass also sends keys and values again (six permutes in all).
    assert len(moves) == (2 if pass_ == "forward" else 6 if overlaps else 4)
    assert set(moves) == {"[[0, 1], [1, 0]]"}


def test_the_time_of_a_split_is_predicted() -> None:
    video = problem_of((32, 48, 80), (18, 24, 24), (16, 8, 8), heads=24, head_dim=128, dtype="bfloat16")
    model = calibration_for("hopper")
    assert model is not None
    for plan in plans(video):
        one = simulate(video, plan.tiles, plan.pass_, calibration=model).seconds
        assert one is not None
        alone, two, eight, many = (predict_split(plan, (1, 1, parts), model) for parts in (1, 2, 8, 40))
        assert alone and two and eight and many
        assert (alone.received, alone.exchange, alone.exposed) == (0, 0.0, 0.0)
        assert alone.seconds == pytest.approx(one, rel=0.03)
        assert one / 2.1 < two.seconds < one / 1.9
        assert 0.5 * two.seconds > eight.seconds > two.seconds / 4
        # With 40 devices, the exchange uses the network between hosts, and each device has two of the 80 columns. The
        # exposed part of the exchange, which compute does not hide, then takes longer than the compute.
        assert many.exposed > many.compute
    # The backward pass returns the gradients of halos after all compute, so compute hides only a part of the exchange.
    _, backward = plans(video)
    partly = predict_split(backward, (1, 1, 2), model)
    assert partly and 0 < partly.exposed < partly.exchange


def gradients(*arrays: Any, size: int, tile: int, token_axes: Any = None) -> Any:
    query, key, value, cotangent = arrays
    tiles: dict[str, Any] = dict.fromkeys(TILES, (tile, tile))
    attend = functools.partial(na2d, kernel_size=size, backend="cpu-fna", token_axes=token_axes, **tiles)
    return jax.vjp(attend, query, key, value)[1](cotangent)


MEMORY = """
import functools, json, os
# By default JAX 0.12 orders operations for concurrency, and not for little memory.
os.environ["XLA_FLAGS"] += " --xla_cpu_enable_concurrency_optimized_scheduler=false"
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
from natten_jax.cost_model import halos
from tests.sharding.test_overlap import gradients
from tests.support.meshes import mesh_of

sharding = NamedSharding(mesh_of("Auto", x=4), P(None, "x"))
tokens = jax.ShapeDtypeStruct((1, 256, 64, 2, 32), "float32", sharding=sharding)
for overlaps in (False, True):
    halos.is_overlap_faster = lambda *_: overlaps
    halos.profitable_overlap.cache_clear()
    jax.clear_caches()
    lowered = jax.jit(functools.partial(gradients, size=13, tile=8)).lower(*[tokens] * 4)
    found = lowered.compile().memory_analysis()
    print(json.dumps([found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes]))
"""


@pytest.mark.usefixtures("without_stored_programs")
def test_memory_is_that_of_a_part_and_its_halos() -> None:
    together, apart = map(json.loads, output_of(run_python(MEMORY, devices=4, quick=False)).splitlines())
    own = 256 * 64 * 2 * 32 * 4 // 4  # bytes of one array on one device
    problem = problem_of((256, 64), 13, heads=2, head_dim=32, dtype="float32")
    halos = bytes_received(problem, (4, 1))
    arguments, results, between = apart
    assert arguments == 4 * own and own * 3 <= results < own * 3.01
    # Temporary memory holds the halos, the output and logsumexp of the forward pass, and one more array: first the
    # output of the call with local keys, later the query gradient.
    assert between <= (2 * own + halos) * 1.1
    # With overlap, keys, values and their gradients are not concatenated with their halos, so temporary memory is
    # smaller.
    assert between < 0.6 * together[2]


@pytest.mark.parametrize("is_manual", [False, True])
@pytest.mark.parametrize(("overlapping", "counts"), [("forward", [3, 1]), ("backward", [1, 3])])
def test_each_pass_gets_its_halos_as_is_best_for_it(
    overlapping: str, counts: list[int], is_manual: bool, set_overlap: SetOverlap
) -> None:
    """With overlap, a pass runs three kernels: for local keys, and for each of two slabs. Otherwise, it runs one."""
    set_overlap(lambda plan, *_: plan.pass_ == overlapping)
    mesh, spec = mesh_of("Auto", x=4), P(None, "x")
    run = functools.partial(gradients, size=3, tile=1, token_axes=("x", None) if is_manual else None)
    split = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec) if is_manual else run
    tokens = jax.ShapeDtypeStruct((1, 16, 4, 1, 8), jnp.float32, sharding=NamedSharding(mesh, spec))
    text = jax.jit(split).lower(*[tokens] * 4).compile().as_text() or ""
    targets = re.findall(r'custom_call_target="natten_jax_cpu_(\w+)"', text)
    assert [targets.count("forward"), targets.count("backward")] == counts


# Pairs of 16-bit elements are sent as 32-bit words.


@pytest.mark.parametrize("width", [1, 2, 7, 8, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8"])
def test_words_have_the_bits_of_their_elements(dtype: str, width: int) -> None:
    bits = np.random.default_rng(width).integers(0, 256, (3, 5, width * jnp.dtype(dtype).itemsize), np.uint8)
    array = jnp.asarray(bits.view(jnp.dtype(dtype)))
    words = words_of(array)
    is_paired = jnp.dtype(dtype).itemsize == 2 and width % 2 == 0
    assert words.shape == ((3, 5, width // 2) if is_paired else array.shape)
    assert words.dtype == (jnp.uint32 if is_paired else array.dtype)
    assert np.asarray(words).tobytes() == np.asarray(array).tobytes()
    assert np.asarray(elements_of(words, array.dtype)).tobytes() == np.asarray(array).tobytes()


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 2e-2), ("float16", 2e-3), ("float32", 1e-6)])
@pytest.mark.parametrize(("width", "width_v"), [(8, 8), (7, 14)])
def test_slabs_travel_as_words(width: int, width_v: int, dtype: str, bound: float, set_overlap: SetOverlap) -> None:
    set_overlap(lambda *_: True)
    mesh = mesh_of("Auto", x=4)
    shapes = [(2, 16, 8, 2, each) for each in (width, width, width_v, width_v)]
    arrays = [jax.random.normal(jax.random.key(i), shape).astype(dtype) for i, shape in enumerate(shapes)]

    @jax.jit
    def results(query: Any, key: Any, value: Any, cotangent: Any) -> Any:
        out, pullback = jax.vjp(lambda q, k, v: na2d(q, k, v, 5, backend="cpu-fna"), query, key, value)
        return out, *pullback(cotangent)

    split = [put(array, mesh, None, "x") for array in arrays]
    program = results.lower(*split).compile()
    lines = (program.as_text() or "").splitlines()
    assert any("u32[" in line and "collective-permute" in line for line in lines) == (dtype != "float32")
    expected = results(*(array.astype("float32") for array in arrays))
    for one, other in zip(program(*split), expected, strict=True):
        assert abs(np.float32(one) - np.float32(other)).max() < bound * abs(other).max()
