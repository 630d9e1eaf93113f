"""Add query boxes, padded layouts and upsampled queries to drawn problems."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.support.families import Family
from tests.support.problems import Case

#: Maximum number of queries of an upsampled problem.
_MAX_QUERIES = 700


def placed(rng: np.random.Generator, case: Case, family: Family) -> Case:
    """Add a random combination of query box, padding and upsampled queries to the problem, possibly none of them."""
    kinds = rng.random(3) < (0.5, 0.5, 0.3)
    if case.queries is not None:
        return _with_sequences(rng, case, kinds[0], kinds[1] and "own_extents" in family.capabilities.features)
    if kinds[0]:
        box = tuple(int(rng.integers(1, extent + 1)) for extent in case.layout)
        case = dataclasses.replace(case, box=box, origins=_origins(rng, case, box))
    if case.relative_bias:  # with this bias, the oracle supports query boxes only
        return case
    if kinds[1] and "own_extents" in family.capabilities.features and "wrap" not in (case.edges or ()):
        extents = tuple(tuple(int(rng.integers(1, extent + 1)) for extent in case.layout) for _ in range(case.batch))
        case = dataclasses.replace(case, extents=extents)
    if kinds[2]:
        finer = tuple(int(n) for n in rng.integers(1, 4, case.rank))
        more = dataclasses.replace(case, upsample=finer)
        case = more if np.prod(more.query_layout) <= _MAX_QUERIES else case
    return case


def _with_sequences(rng: np.random.Generator, case: Case, is_box: bool, is_padded: bool) -> Case:
    (keys,), queries = case.layout, case.queries
    assert queries is not None
    if is_box:
        case = dataclasses.replace(case, queries=min(queries, keys))
        case = dataclasses.replace(case, origins=_origins(rng, case, (min(queries, keys),)))
    if is_padded:
        lengths = tuple((int(n),) for n in rng.integers(1, keys + 1, case.batch))
        query_lengths = tuple(int(n) for n in rng.integers(1, min(queries, case.queries or 1) + 1, case.batch))
        case = dataclasses.replace(case, extents=lengths, query_lengths=query_lengths if rng.random() < 0.5 else None)
    return case


def _origins(rng: np.random.Generator, case: Case, box: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Draw the origin of a query box: one for all batch entries, or one per entry."""
    count = 1 if rng.random() < 0.4 else case.batch
    room = [extent - some for extent, some in zip(case.layout, box, strict=True)]
    return tuple(tuple(int(rng.integers(0, most + 1)) for most in room) for _ in range(count))
