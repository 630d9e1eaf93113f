"""Contexts in which programs are lowered."""

from __future__ import annotations

import concurrent.futures

from jax._src.interpreters import mlir

from tests.support.lowering import MOST_PROGRAMS, share_contexts


def test_a_context_serves_many_programs_of_a_thread() -> None:
    every = []
    for _ in range(3 * MOST_PROGRAMS):
        share_contexts()  # does nothing: the run has begun with it
        every.append(mlir.make_ir_context())
    assert 3 <= len({id(context) for context in every}) <= len(every) / 3
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        elsewhere = executor.submit(mlir.make_ir_context).result()
    assert elsewhere not in (every[-1], mlir.make_ir_context())
