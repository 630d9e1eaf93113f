"""Small problems that run every form (variant) of the GPU kernels under compute-sanitizer: ``make sanitize-gpu``.

Both passes of every form run four times:

1. with ordinary inputs and a single scale;
2. with the same scale for every head, given as per-head scales: the results must equal those of run 1;
3. with different per-head scales, for which some forms have separate kernels;
4. with inputs so large that weights need the logsumexp's remainder.

The argument ``biased`` runs problems with a bias or sinks. If the head dimension is 128, they run on the hopper
kernels. Otherwise, they run on the kernels for small windows, with and without a ring buffer of tiles.

Example:
    compute-sanitizer --tool racecheck python -m tests.support.kernel_forms hopper
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arrays.boxes import QueryBox
from natten_jax.arrays.operands import Cotangents, Inputs, Operands, Saved
from natten_jax.backends.base import Earlier
from natten_jax.performance import PASSES, KernelSchedule, Performance, tile_names
from tests.fuzz.problem import Fuzzed
from tests.support.families import BOUNDS
from tests.support.plans import first_tiles, plans_of
from tests.support.problems import Case

LAYOUT = (24, 28)
WHOLE_LAYOUT, LARGE_LAYOUT = (14, 18), (40, 28)
SCALES = 0.1, -0.2  # scales of the two query heads
LARGE = 300.0  # factor of the queries: logits reach several thousand


class Form(NamedTuple):
    """Parameters that select a form of a family's kernels."""

    dtype: str
    head_dim: int
    performance: Performance
    precision: str | None = None  # precision of float32 products
    additional_kv: int = 5
    layout: tuple[int, int] = LAYOUT
    heads_kv: int = 1


def hopper_forms() -> Iterator[Form]:
    """Yield forms that differ in element type, head dimension, tile shape, schedule, and determinism of gradients."""
    tiles: dict[int, list[tuple[tuple[int, int], tuple[int, int]]]] = {
        64: [((8, 16), (8, 16)), ((12, 16), (8, 16))],
        128: [((8, 16), (8, 16)), ((8, 16), (8, 12))],
        192: [((8, 16), (8, 12))],
        256: [((8, 16), (8, 8))],
    }
    schedules = itertools.cycle(KernelSchedule)
    for dtype, (width, pairs) in itertools.product(("bfloat16", "float16"), tiles.items()):
        for (q_tile, kv_tile), is_ping_pong in itertools.product(pairs, (True, False)):
            schedule = KernelSchedule.PING_PONG if is_ping_pong else next(schedules)
            performance = Performance(q_tile, kv_tile, kernel_schedule=schedule, backward_deterministic=is_ping_pong)
            yield Form(dtype, width, performance)
            # Heads that are narrower than the compiled width have separate kernels.
            yield Form(dtype, width - 24, performance)


def cutlass_forms() -> Iterator[Form]:
    """Yield forms that differ in element type, precision and head dimension.

    For 16-bit types and a head dimension of 128, one more form has forward query tiles of 256 tokens.
    """
    for dtype, width in itertools.product(("bfloat16", "float16"), (64, 128, 256)):
        yield Form(dtype, width, Performance((8, 8), (8, 16), (8, 8), (8, 16), backward_kv_splits=(1, 2)))
    for dtype in ("bfloat16", "float16"):
        yield Form(dtype, 128, Performance((16, 16), (8, 8), (8, 16), (8, 8), backward_deterministic=True))
    # Kernels for small windows. In the first form, TMA loads the columns, except for a head dimension of 128. In forms
    # with additional tokens, TMA does not load columns.
    boxes, chunks = Performance((8, 2), (1, 8), (1, 8), (8, 2)), Performance((8, 2), (2, 4), (2, 4), (4, 4))
    for dtype, width in itertools.product(("bfloat16", "float16"), (32, 64, 128)):
        yield Form(dtype, width, boxes, additional_kv=0)
        yield Form(dtype, width, chunks, additional_kv=0)
        yield Form(dtype, width, boxes)
        # These forms have as many key/value heads as query heads. In the second layout, a CTA can also process a whole
        # dilation group.
        yield Form(dtype, width, boxes, additional_kv=0, layout=LARGE_LAYOUT, heads_kv=2)
        yield Form(dtype, width, boxes, additional_kv=0, layout=WHOLE_LAYOUT, heads_kv=2)
    for precision, width in itertools.product((None, "tensorfloat32"), (64, 128, 256)):
        yield Form("float32", width, Performance((8, 8), (8, 16), (8, 8), (8, 16)), precision)


def biased_cases() -> Iterator[Case]:
    """Yield problems with two layouts and three head dimensions. Each problem has either one bias or sinks."""
    # The first layout is for kernels without a ring buffer. The second layout is large, so kernels with a ring buffer
    # are faster.
    layouts = (
        Case((14, 18), (7, 7), batch=2, heads=2, heads_kv=2),
        Case((34, 33), (13, 13), batch=40, heads=8, heads_kv=8),
    )
    for case, head_dim in itertools.product(layouts, (32, 64, 128)):
        case = dataclasses.replace(case, head_dim=head_dim)
        yield dataclasses.replace(case, relative_bias=True)
        yield dataclasses.replace(case, key_bias="tokens")
        yield dataclasses.replace(case, key_bias="heads")
        yield dataclasses.replace(case, sinks=True)


FORMS = {"hopper": hopper_forms, "cutlass": cutlass_forms}


def run_biased(case: Case) -> None:
    """Run both passes of a problem.

    Heads below 128 run on the cutlass backend, with and without a ring buffer. Wider heads run on the hopper backend.
    """
    tiles: list[dict[str, Any]] = [{}]
    if case.head_dim < 128:
        problem = Fuzzed("cutlass", case, "bfloat16", 0).description()
        tiles = [
            {
                name: tile
                for pass_ in PASSES
                for name, tile in zip(tile_names(pass_), first_tiles(problem, pass_, has_ring), strict=True)
            }
            for has_ring in (False, True)
        ]
    operands, cotangents = case.operands("bfloat16", 0), case.cotangents("bfloat16", 0)
    for arguments in tiles:
        operator = case.operator("cutlass-fna" if arguments else "hopper-fna", **arguments)
        results, pullback = jax.vjp(jax.jit(operator), operands)
        gradients = jax.jit(pullback)(cotangents)
        for result in jax.tree.leaves((results, gradients)):
            assert np.isfinite(np.asarray(result, np.float32)).all(), (case, arguments)


def run(family: str, form: Form) -> None:
    case = Case(form.layout, (7, 9), (2, 1), (1, 2), is_causal=(True, False), heads=2, heads_kv=form.heads_kv)
    case = dataclasses.replace(case, head_dim=form.head_dim, additional=form.additional_kv)
    problem = Fuzzed(family, case, form.dtype, 0).description()
    backend, plans = plans_of(f"{family}-fna", problem, form.performance, precision=form.precision)
    query, key, value, keys, values, *_ = case.operands(form.dtype, 0)
    cotangents = Cotangents(*case.cotangents(form.dtype, 0))

    @jax.jit
    def forward(operands: Operands) -> Saved:
        return backend.forward(plans["forward"], operands, saves=True)

    @jax.jit
    def continued(operands: Operands, saved: Saved) -> Saved | None:
        if not backend.form(plans["forward"]).continues:
            return None
        earlier = Earlier(saved, QueryBox(jnp.zeros(2, jnp.int32), form.layout))
        return backend.forward(plans["forward"], operands, saves=True, earlier=earlier)

    @jax.jit
    def backward(operands: Operands, saved: Saved) -> Any:
        return backend.backward(plans["backward"], operands, saved, cotangents)

    bound = BOUNDS["float16" if form.precision == "tensorfloat32" else form.dtype]  # TF32 is as precise as float16
    single_scale_results: list[Any] = []
    for factor, scale in ((1.0, None), (1.0, (problem.scale, problem.scale)), (1.0, SCALES), (LARGE, None)):
        large = jnp.asarray((np.asarray(query, np.float32) * factor).astype(query.dtype))
        operands = Operands(Inputs(large, key, value, keys, values, None if scale is None else jnp.asarray([scale])))
        # Copy the arrays to the host and back, because initcheck does not track writes by TMA or by other kernels.
        saved = jax.tree.map(np.asarray, forward(operands))
        gradients = backward(operands, saved)
        results = [np.asarray(each, np.float32) for each in jax.tree.leaves((saved, gradients))]
        assert all(np.isfinite(result).all() for result in results), (form, factor)
        if scale != SCALES and factor == 1.0:
            shared = [saved.out, saved.logsumexp, *(each for each in gradients[:5] if each is not None)]
            single_scale_results = single_scale_results or shared
            for result, expected in zip(shared, single_scale_results, strict=True):
                expected = np.asarray(expected, np.float64)
                distance = np.linalg.norm(np.asarray(result, np.float64) - expected)
                assert distance <= bound * np.linalg.norm(expected), (form, distance / np.linalg.norm(expected))
        twice = continued(operands._replace(origins=jnp.zeros((2, 3), jnp.int32)), saved)
        if twice is not None:  # each key is processed twice, which adds log 2 to the logsumexp
            np.testing.assert_allclose(twice.logsumexp, saved.logsumexp + np.log(2), rtol=1e-6, atol=1e-5)


def main() -> int:
    """Run all forms of a family, or every N-th form from the I-th on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=(*FORMS, "biased"))
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every N-th from I on")
    options = parser.parse_args()
    first, step = options.part
    calls: dict[str, list[Callable[[], None]]] = {
        family: [functools.partial(run, family, form) for form in forms()] for family, forms in FORMS.items()
    }
    calls["biased"] = [functools.partial(run_biased, case) for case in biased_cases()]
    chosen = calls[options.family][first::step]
    for call in chosen:
        call()
    print(f"{options.family}: {len(chosen)} forms ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
