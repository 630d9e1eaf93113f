"""Contexts in which programs are lowered."""

from __future__ import annotations

import concurrent.futures
import itertools

import pytest
from jax._src.interpreters import mlir

from tests.support.lowering import MOST_PROGRAMS, share_contexts


def test_a_context_serves_many_programs_of_a_thread() -> None:
    share_contexts()  # does nothing: the run has begun with it
    every = [mlir.make_ir_context() for _ in range(3 * MOST_PROGRAMS)]
    assert 3 <= len({id(context) for context in every}) <= len(every) / 3
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        elsewhere = executor.submit(mlir.make_ir_context).result()
    assert elsewhere not in (every[-1], mlir.make_ir_context())


def test_contexts_that_jax_shares_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in the life of a context the question is asked."""
    for used in range(12):
        programs = itertools.count(used)
        monkeypatch.setattr(mlir, "make_ir_context", lambda programs=programs: str(next(programs) // 11))
        make = mlir.make_ir_context
        share_contexts()
        assert mlir.make_ir_context is make
