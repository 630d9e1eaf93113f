"""Contexts in which programs are lowered."""

from __future__ import annotations

import concurrent.futures

from jax._src.interpreters import mlir

from tests.support.lowering import MOST_PROGRAMS, share_contexts


def test_a_context_serves_many_programs_of_a_thread() -> None:
    made = []
    for _ in range(3):
        share_contexts()  # the second time does nothing: the run has begun with it
        made.append(mlir.make_ir_context())
    assert len(set(map(id, made))) <= 2, "JAX makes contexts in another way"
    every = [mlir.make_ir_context() for _ in range(3 * MOST_PROGRAMS)]
    assert 3 <= len({id(context) for context in every}) <= 4
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        elsewhere = executor.submit(mlir.make_ir_context).result()
    assert elsewhere is not every[-1] and elsewhere is not mlir.make_ir_context()
