"""The Blackwell kernels in JAX's interpreter, which finds races and fills memory with NaN, and lowered for GPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax.arrays.operands import Operands
from natten_jax.backends.blackwell.backend import BlackwellBackend
from natten_jax.backends.blackwell.layout import Lines
from natten_jax.performance import TilePair
from natten_jax.problem import Problem, problem_of
from tests.fuzz.interpreted_blackwell import complaints, differences, draw
from tests.support.interpreted_blackwell import Drawn, interpreting, mask_of, needs_interpreter, plan_of, run

PROBLEMS: dict[str, tuple[Problem, TilePair]] = {
    "three dimensions, two halves": (
        problem_of((4, 5, 12), (2, 3, 4), (1, 2, 3), 1, (True, False, False), head_dim=40, dtype="float16"),
        ((4, 8, 8), (2, 8, 8)),
    ),
    "attention": (
        problem_of((70,), operator="fmha", kv_layout=(300,), heads=2, heads_kv=1, head_dim=128, scale=-0.1),
        ((128,), (128,)),
    ),
}
SMALL = problem_of((300,), 150, head_dim=32, dtype="float16"), ((256,), (128,))


def complaints_of(problem: Problem, tiles: TilePair) -> list[str]:
    """What is wrong with the results of a problem, whose inputs are random."""
    drawn = Drawn.of(problem, np.random.default_rng(1))
    with interpreting():
        saved = run(plan_of(problem, tiles), problem, Operands(drawn.inputs))
        saved = jax.tree.map(np.asarray, saved)
    return differences(saved, drawn.exact, mask_of(problem), problem)


@needs_interpreter
@pytest.mark.parametrize("name", PROBLEMS)
def test_results(name: str) -> None:
    assert not complaints_of(*PROBLEMS[name])


@needs_interpreter
@pytest.mark.parametrize("number", [5])
def test_random_problems(number: int) -> None:
    """A part of what ``python -m tests.fuzz.interpreted_blackwell`` runs."""
    fuzzed = draw(0, number)
    assert not complaints(fuzzed), fuzzed


@needs_interpreter
@pytest.mark.parametrize("waiting", ["products", "softmax"])
def test_a_missing_wait_is_seen(waiting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what issues products for the copies, and of what reads logits for the products."""
    monkeypatch.setattr(f"natten_jax.backends.blackwell.{waiting}.wait", lambda barrier: None)
    with pytest.raises(Exception, match=r"RACE DETECTED|last written through alias group"):
        complaints_of(*SMALL)


@needs_interpreter
def test_a_wrong_phase_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes are copied to a slot a phase too early: while products still read what is in it."""
    monkeypatch.setattr("natten_jax.backends.blackwell.loads.STAGES", 3)
    with pytest.raises(Exception, match="RACE DETECTED"):
        complaints_of(*SMALL)


@needs_interpreter
def test_a_forgotten_mask_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("natten_jax.backends.blackwell.softmax.hide", lambda call, logits, *_: logits)
    assert complaints_of(*SMALL)


@needs_interpreter
@pytest.mark.parametrize("name", PROBLEMS)
def test_kernels_are_lowered_for_gpus_that_are_not_there(name: str) -> None:
    """To a Mosaic module, layouts of registers and memory included; machine code is another step."""
    problem, tiles = PROBLEMS[name]
    plan, operands = plan_of(problem, tiles), Operands(Drawn.of(problem, np.random.default_rng(0)).inputs)

    def attend(operands: Operands) -> Any:
        return run(plan, problem, operands).out

    text = jax.jit(attend).trace(operands).lower(lowering_platforms=("cuda",)).as_text()
    for part in ("natten_jax_blackwell_forward", "tcgen05.mma", "cp.async.bulk.tensor"):
        assert part in text


@pytest.mark.parametrize("dilation", [(1,), (3,), (1, 2), (2, 1, 3)])
def test_lines_are_restored(dilation: tuple[int, ...]) -> None:
    shape = (2, *(3, 5, 13)[-len(dilation) :], 4, 128)
    array = jnp.arange(np.prod(shape)).reshape(shape)
    lines = Lines.of(array, dilation)
    found = lines.laid_out(array)
    assert found.shape == lines.shape and lines.length % 8 == 0
    np.testing.assert_array_equal(lines.restored(found, len(dilation)), array)


def test_the_backward_pass_is_another_backends() -> None:
    assert BlackwellBackend().passes == ("forward",)
