"""The Blackwell backend: selection, kernels in JAX's interpreter, and machine code."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax.arrays.operands import Inputs, Operands
from natten_jax.backends import find, registered, select
from natten_jax.backends.pallas._blackwell_call import Lines, call_of
from natten_jax.backends.pallas._common import Visits
from natten_jax.backends.pallas.blackwell import BlackwellBackend
from natten_jax.backends.select import rejections, resolve
from natten_jax.performance import PASSES, Pass, Performance
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Request
from natten_jax.problem import problem_of
from natten_jax.windows import Axis
from tests.fuzz.execution import both_passes
from tests.fuzz.interpreted_blackwell import KERNELS as INTERPRETED
from tests.support import machine_code
from tests.support.interpreted_blackwell import needs_interpreter
from tests.support.machine import Machine
from tests.support.machine_code import KERNELS, compiled, direct, ignored, missing
from tests.support.plans import plans_of
from tests.support.problems import Case

B200, B300 = (Device("cuda", (10, minor), is_present=False) for minor in (0, 3))

IMAGE = problem_of((256, 256), 80, 16, heads=24, head_dim=128)


def families(**performance: Any) -> list[str]:
    """Return the backend families that run the forward and the backward pass of ``IMAGE`` on a B200."""
    request = Request(IMAGE, **performance)
    return [resolve(request, B200, pass_).backend.family for pass_ in PASSES]


@pytest.mark.parametrize("device", [B200, B300], ids=str)
@pytest.mark.parametrize("pass_", PASSES)
def test_its_gpus_are_two(device: Device, pass_: Pass) -> None:
    assert find("blackwell-fna", "fna").rejection(IMAGE, device, pass_) is None


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (11, 0), (12, 0)])
def test_other_gpus_refuse_it_in_a_sentence(capability: tuple[int, int]) -> None:
    device = Device("cuda", capability, is_present=False)
    reason = find("blackwell-fna", "fna").rejection(IMAGE, device, "forward")
    assert reason == f"it runs on NVIDIA GPUs of compute capability 10.0 or 10.3 only, not on {device}"


def test_the_default_is_the_portable_kernels(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    assert "blackwell" not in families()
    assert families(backend="blackwell-fna") == ["blackwell", "blackwell"]
    machine.forget()
    monkeypatch.setenv(select.VARIABLE, "blackwell")
    assert families() == ["blackwell", "blackwell"]


@pytest.mark.parametrize("pass_", PASSES)
def test_it_can_run_both_passes(pass_: Pass) -> None:
    assert "blackwell-fna" not in map(str, rejections(IMAGE, B200, pass_))


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        ({"dtype": "float32"}, "float16, bfloat16"),
        ({"head_dim": 136}, "at most 128"),
        ({"head_dim_v": 192}, "at most 128"),
        ({"edges": "wrap"}, "edges"),
    ],
)
def test_unsupported_problems(facts: dict[str, Any], part: str) -> None:
    reason = find("blackwell-fna", "fna").rejection(problem_of((64, 64), 7, **facts), B200, "forward")
    assert reason is not None and part in reason


@pytest.mark.parametrize(
    ("widths", "width"), [((8, 8), 32), ((32, 8), 32), ((40, 64), 64), ((64, 72), 128), ((128, 1), 128)]
)
def test_heads_are_filled_up_to_one_width(widths: tuple[int, int], width: int) -> None:
    problem = BlackwellBackend().widened(
        problem_of((64,), 7, head_dim=widths[0], head_dim_v=widths[1]), B200, "forward"
    )
    assert (problem.head_dim, problem.head_dim_v) == (width, width)


def test_natten_configuration_queries_list_supported_tiles() -> None:
    tokens = jax.ShapeDtypeStruct((1, 30, 48, 80, 24, 128), jnp.bfloat16)
    configurations = natten_jax.get_configs_for_cutlass_blackwell_fna(
        tokens, kernel_size=(18, 24, 24), stride=(16, 8, 8), compute_capability="10.0"
    )
    assert ((4, 8, 8), (2, 8, 8)) in configurations
    backend = BlackwellBackend()
    for q_tile, kv_tile in configurations:
        assert backend.offers(problem_of((30, 48, 80), 18), B200, "forward", (q_tile, kv_tile))
    sizes = natten_jax.get_configs_for_cutlass_blackwell_fmha(
        jax.ShapeDtypeStruct((1, 4096, 24, 128), jnp.float16), compute_capability=(10, 3)
    )
    assert sorted(sizes) == [(128, 128), (256, 128)]
    backward_pairs = natten_jax.get_bwd_configs_for_cutlass_blackwell_fna(
        tokens, kernel_size=(18, 24, 24), stride=(16, 8, 8), compute_capability="10.0"
    )
    assert ((2, 8, 8), (2, 8, 8)) in backward_pairs
    for pair in backward_pairs:
        assert backend.offers(problem_of((30, 48, 80), 18), B200, "backward", pair)


def test_only_the_forward_pass_has_tiles_of_two_halves() -> None:
    pair = (16, 16), (16, 8)
    backend = BlackwellBackend()
    assert backend.offers(IMAGE, B200, "forward", pair) and not backend.offers(IMAGE, B200, "backward", pair)


@pytest.mark.parametrize("pair", [((16, 16), (16, 4)), ((16, 8), (12, 8)), ((64, 4), (16, 8)), ((8, 8), (16, 8))])
def test_rejected_tiles_are_reported_with_supported_ones(pair: Any) -> None:
    request = Request(IMAGE, Performance(q_tile_shape=pair[0], kv_tile_shape=pair[1]), "blackwell-fna")
    with pytest.raises(ValueError, match=r"natten_jax\.get_configs_for_cutlass_blackwell_fna lists all"):
        resolve(request, B200, "forward")


def test_a_gpu_without_portable_kernels_still_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing kernels are reported, although the Blackwell backend supports the call. It runs only if it is named."""
    here = Device("cuda", (10, 0))
    for backend in registered():
        if backend.capabilities.targets:
            monkeypatch.setattr(
                type(backend),
                "rejection",
                lambda self, problem, device, pass_: "no code" if device.is_present else None,
            )
    reason = select.missing_kernels_of(registered(), IMAGE, here, "forward")
    assert reason is not None and reason.startswith("no code. ")


def test_older_jax_is_rejected_with_the_required_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("natten_jax.backends.pallas.blackwell.missing_in_jax", lambda: "it is old")
    here = Device("cuda", (10, 0))
    assert find("blackwell-fna", "fna").rejection(IMAGE, here, "forward") == "it is old"
    assert find("blackwell-fna", "fna").rejection(IMAGE, B200, "forward") is None


# The Blackwell kernels run in JAX's interpreter, which detects races and fills new memory with NaN. They are also
# lowered for GPUs.


VOLUME = Case((4, 5, 12), (2, 3, 4), (1, 2, 3), is_causal=(True, False, False), head_dim=64)
PROBLEMS = {
    "three dimensions, two halves": direct(VOLUME, "float16", ((4, 8, 8), (2, 8, 8)), ((2, 8, 8), (4, 4, 8))),
    "attention": direct(
        Case((300,), queries=70, heads=2, head_dim=128, scale=-0.1), "bfloat16", ((128,), (128,)), ((128,), (128,))
    ),
}

SMALL = direct(Case((300,), (150,), head_dim=32), "float16", ((256,), (128,)), ((128,), (128,)))

A_RACE = r"RACE DETECTED|last written through alias group"

#: Errors that the interpreter reports for a missing wait. The order of threads determines which error comes first.
A_MISSING_WAIT = rf"{A_RACE}|Barrier completed phase \d+, but no threads observed phase \d+"


@needs_interpreter
@pytest.mark.parametrize("which", [*PROBLEMS, 5])
def test_results_and_gradients_without_races(which: str | int) -> None:
    """``python -m tests.fuzz.interpreted_blackwell`` runs more random problems."""
    problem = PROBLEMS[which] if isinstance(which, str) else INTERPRETED.draw(0, which)
    assert not INTERPRETED.find_errors(problem), problem


@needs_interpreter
@pytest.mark.parametrize(
    "caller",
    ["ForwardBlock.multiply", "ForwardBlock.weigh", "BackwardBlock.multiply", "BackwardBlock._logit_gradients"],
)
def test_a_missing_wait_is_seen(caller: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter detects a missing wait in the warp that issues MMAs, and in the warps that read logits."""
    from natten_jax.backends.pallas import _blackwell_memory as gpu

    wait = gpu.wait

    def waiting(barrier: Any) -> None:
        if not sys._getframe(1).f_code.co_qualname.startswith(caller):
            wait(barrier)

    monkeypatch.setattr(gpu, "wait", waiting)
    assert re.search(A_MISSING_WAIT, INTERPRETED.find_errors(SMALL)[0])


@needs_interpreter
@pytest.mark.parametrize("name", PROBLEMS)
def test_kernels_are_lowered_for_gpus_that_are_not_there(name: str) -> None:
    """Lowering produces a Mosaic module with layouts of registers and memory. It does not produce machine code."""
    traced = jax.jit(both_passes(PROBLEMS[name])).trace(PROBLEMS[name].inputs(), None)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for part in (*KERNELS, "tcgen05.mma", "cp.async.bulk.tensor"):
        assert part in text


@needs_interpreter
@pytest.mark.parametrize("additional", [0, 3])
def test_operators_run_all_kernels(additional: int, machine: Machine) -> None:
    """The program contains each kernel of both passes once, or twice if there are additional tokens.

    A second call attends to the additional tokens.
    """
    machine.has(Device("cuda", (10, 0)))
    query, key, value = (jax.ShapeDtypeStruct((2, 20, 24, heads, 40), jnp.bfloat16) for heads in (4, 2, 2))
    more = [jax.ShapeDtypeStruct((2, additional, 2, 40), jnp.bfloat16)] * (2 if additional else 0)

    def loss(arrays: Sequence[jax.Array]) -> jax.Array:
        query, key, value, *more = arrays
        tokens: dict[str, Any] = dict(zip(("additional_keys", "additional_values"), more, strict=False))
        out = natten_jax.na2d(query, key, value, kernel_size=7, dilation=(1, 2), backend="blackwell-fna", **tokens)
        return out.astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss)).trace([query, key, value, *more])
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for name in KERNELS:
        assert text.count(f"{name}\\00") == (2 if additional else 1), name


@pytest.mark.parametrize("dilation", [(1,), (3,), (1, 2), (2, 1, 3)])
def test_lines_are_restored(dilation: tuple[int, ...]) -> None:
    shape = (2, *(3, 5, 13)[-len(dilation) :], 4, 128)
    array = jnp.arange(np.prod(shape)).reshape(shape)
    lines = Lines.for_array(array, dilation)
    found = lines.laid_out(array)
    assert found.shape == lines.shape and lines.length % 8 == 0
    np.testing.assert_array_equal(lines.restored(found), array)


@pytest.mark.parametrize("queries", [5, 40])
def test_tiles_of_queries_that_see_a_tile_of_keys(queries: int) -> None:
    """For each key tile, ``Visits.visitors`` is the range of the query tiles that see it.

    The expected ranges are computed from the windows of all queries.
    """
    dilation, q_tile, kv_tile = 2, 4, 8
    axis = Axis(queries, queries, 2, dilation=dilation)
    visits = Visits.along_axis(axis, (q_tile, kv_tile), (queries, queries), None, 1, 0, True)
    kv_tiles = -(-queries // (dilation * kv_tile))
    found = visits.visitors
    assert visits.kv_tiles == kv_tiles
    for group in range(dilation):
        query_tiles: dict[int, set[int]] = {tile: set() for tile in range(kv_tiles)}
        for query, (first, end) in enumerate(visits.bounds[group].swapaxes(1, 2).reshape(-1, 2)):
            for key in range(first, end):
                query_tiles[key // kv_tile].add(query // q_tile)
        expected = [(min(tiles), max(tiles) + 1 - min(tiles)) if tiles else (0, 0) for tiles in query_tiles.values()]
        assert found[group].tolist() == [list(pair) for pair in expected]


def test_numbers_of_queries_come_back_from_items() -> None:
    fuzzed = PROBLEMS["three dimensions, two halves"]
    _, plans = plans_of(fuzzed.backend, fuzzed.description(), Performance(**fuzzed.tiles))
    call = call_of(plans["backward"], Operands(Inputs(*map(jnp.asarray, fuzzed.inputs()[0][:3]))))
    problem = plans["backward"].problem
    numbers = np.random.default_rng(0).standard_normal((2, problem.batch, *problem.query_layout, problem.heads))
    in_items = call.in_items([jnp.asarray(each, jnp.float32) for each in numbers], 7.0)
    assert in_items.shape == (call.items(), 2, 128)
    assert (in_items == 7).sum() == in_items.size - numbers.size
    np.testing.assert_array_equal(np.stack(call.unpacked_items(in_items)), numbers.astype(np.float32))


# The Blackwell kernels compile to machine code for ``sm_100a``, without a GPU.


@needs_interpreter
@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("number", range(len(machine_code.PROBLEMS)))
def test_kernels_are_assembled_and_keep_to_their_registers(number: int, tmp_path: Path) -> None:
    for name, (ptx, said) in compiled(tmp_path, number).items():
        for instruction in ("tcgen05.mma", "tcgen05.ld", "tcgen05.st", "cp.async.bulk.tensor", "setmaxnreg"):
            # KERNELS[2] needs no tcgen05.st, because it writes transposed gradients of logits to shared memory.
            assert instruction in ptx or (name, instruction) == (KERNELS[2], "tcgen05.st")
        assert name in said and "for 'sm_100a'" in said
        assert "error" not in said
        assert ignored(said) == []
        spilled = re.search(r"(\d+) bytes spill stores", said)
        assert spilled is not None and int(spilled[1]) <= 128
