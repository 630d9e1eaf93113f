"""Compile the TPU kernels for each chip with the compiler for TPUs.

The compiler reports an error if a kernel needs more VMEM than a chip has, or uses an unsupported instruction.
"""

from __future__ import annotations

import pytest

from natten_jax.performance import PASSES
from tests.tpu.compiler import CHIPS, both_passes, compiled_for, shapes_of
from tests.tpu.problems import PROBLEMS, QUICK
from tests.tpu.programs import Program

pytest.importorskip("libtpu", reason="the compiler for TPUs is not installed: make test-tpu has it")

KERNELS = "natten_jax_tpu_forward", "natten_jax_tpu_query_gradient", "natten_jax_tpu_key_gradients"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize with every chip, and with every problem or, by default, with a few problems."""
    if "chip" in metafunc.fixturenames:
        metafunc.parametrize("name", PROBLEMS if metafunc.config.getoption("all_compiled") else QUICK)
        metafunc.parametrize("chip", CHIPS)


def test_both_passes_compile_and_copy_only_the_documented_arrays(name: str, chip: str) -> None:
    """Queries, keys and values are transposed once, to a heads-first layout, and otherwise copied only for padding.

    Layouts that are not multiples of the tiles are padded, differently for each call and pass. Each padding adds a copy
    or, if XLA transposes and pads separately, two copies.
    """
    problem = PROBLEMS[name]
    case = problem.case
    operands, cotangents = shapes_of(case, problem.dtype)
    backend = "tpu-fna" if case.queries is None else "tpu-fmha"
    text = compiled_for(chip, both_passes(case, backend), operands, cotangents).as_text()
    assert text is not None
    program = Program(text)
    calls = 2 if case.additional else 1
    assert [program.calls_of(kernel) for kernel in KERNELS] == [calls] * 3
    for operand, uses in (("query", calls), ("key", 1), ("value", 1)):
        copies = program.copies_of(f"operands.{operand}")
        padded = 2 * len(PASSES) * uses if any(copies) else 0
        assert len(copies) <= 1 + padded, (operand, copies)
