"""What a backend is checked with: small problems of every feature for its results, larger ones for its times."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from natten_jax.doctor.reference import Arrays
from natten_jax.element_types import SUPPORTED_DTYPES
from natten_jax.ops.attention import attention
from natten_jax.ops.neighborhood import na1d, na2d, na3d
from natten_jax.problem import Operator, Problem, problem_of

_OPERATORS: Mapping[int, Callable[..., Any]] = {1: na1d, 2: na2d, 3: na3d}

_NEIGHBORHOOD = (
    problem_of((301,), 64, heads=2),
    problem_of((300,), 96, 8, is_causal=True, heads=4, heads_kv=2, head_dim=128),
    problem_of((257,), 13, dilation=9, heads=1, head_dim=32),
    problem_of((28, 30), 7, batch=2, heads=2, head_dim=32),
    problem_of((25, 31), (9, 13), (4, 1), heads=2, head_dim=80),
    problem_of((26, 33), (5, 7), 1, (5, 4), heads=2, additional_kv=11),
    problem_of((8, 11, 13), (3, 5, 7), is_causal=(True, False, False), heads=2),
    problem_of((6, 12, 16), (4, 6, 8), (2, 3, 4), heads=2, head_dim=128),
    problem_of((20, 20), (11, 12), heads=1, head_dim=256, head_dim_v=64),
)
#: With windows of so many keys, in so many batch entries, that kernels for small windows go along strips.
_NEIGHBORHOOD_OF_GPUS = (problem_of((11, 7, 13), (7, 6, 5), batch=64, heads=1),)
_ATTENTION = (
    problem_of((333,), operator="fmha", heads=2),
    problem_of((300,), operator="fmha", is_causal=True, heads=4, heads_kv=1, head_dim=128),
    problem_of((150,), operator="fmha", kv_layout=(77,), batch=2, heads=2, head_dim=32),
    problem_of((64,), operator="fmha", kv_layout=(400,), heads=1, head_dim=256, head_dim_v=80),
)
_TIMED_NEIGHBORHOOD = (
    problem_of((112, 112), 7, head_dim=32),
    problem_of((64, 64), 25),
    problem_of((8192,), 1024, is_causal=True, head_dim=128),
    problem_of((8, 24, 40), (4, 12, 12), head_dim=128),
)
_TIMED_ATTENTION = (
    problem_of((4096,), operator="fmha", head_dim=128),
    problem_of((4096,), operator="fmha", is_causal=True),
)

#: Batch entries with numbers of their own, at most: others repeat these, and need no reference.
_MOST_DIFFERENT = 2


def problems(operator: Operator, dtypes: tuple[str, ...], *, is_gpu: bool = False) -> Iterator[Problem]:
    """Those whose results are compared: all in the first element type, every third in each other one.

    Args:
        operator: ``"fna"`` or ``"fmha"``.
        dtypes: Element types of the backend, in the order of :func:`in_order`.
        is_gpu: Whether they are for an NVIDIA GPU, some of whose kernels are for more than hosts compute in no time.
    """
    every = _NEIGHBORHOOD + _NEIGHBORHOOD_OF_GPUS * is_gpu if operator == "fna" else _ATTENTION
    for number, dtype in enumerate(dtypes):
        for problem in every if number == 0 else every[number % 3 :: 3]:
            yield _in(problem, dtype)


def timed(operator: Operator, dtype: str, heads: int) -> Iterator[Problem]:
    """Those that are timed, with so many heads."""
    for problem in _TIMED_NEIGHBORHOOD if operator == "fna" else _TIMED_ATTENTION:
        yield dataclasses.replace(_in(problem, dtype), heads=heads, heads_kv=heads)


def in_order(dtypes: tuple[str, ...]) -> tuple[str, ...]:
    """Element types, those that people compute in first."""
    return tuple(sorted(dtypes, key=["bfloat16", "float16", "float32", *SUPPORTED_DTYPES].index))


def _in(problem: Problem, dtype: str) -> Problem:
    return dataclasses.replace(problem, dtype=dtype)


def different_entries(problem: Problem) -> int:
    """How many batch entries of :func:`arrays_of` have numbers of their own: the first ones; others repeat these."""
    return min(problem.batch, _MOST_DIFFERENT)


def arrays_of(problem: Problem) -> Arrays:
    """Random normal inputs of a problem, the same in every run."""
    entries = different_entries(problem)
    own = _different_arrays(dataclasses.replace(problem, batch=entries))
    return Arrays(*(None if each is None else repeated(each, problem) for each in own))  # type: ignore[arg-type]


def repeated(array: np.ndarray, problem: Problem) -> np.ndarray:
    """An array of the different batch entries as one of all."""
    entries = np.arange(problem.batch) % len(array)
    return array if len(entries) == len(array) else array[entries]


def _different_arrays(problem: Problem) -> Arrays:
    rng = np.random.default_rng(len(problem.describe()))

    def draw(tokens: tuple[int, ...], heads: int, width: int) -> np.ndarray:
        shape = problem.batch, *tokens, heads, width
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(problem.dtype))

    widths = problem.head_dim, problem.head_dim_v
    query = draw(problem.query_layout, problem.heads, problem.head_dim)
    key, value = (draw(problem.kv_layout, problem.heads_kv, width) for width in widths)
    added = (problem.additional_kv,) if problem.additional_kv else None
    keys, values = (None if added is None else draw(added, problem.heads_kv, width) for width in widths)
    out_cotangent = draw(problem.query_layout, problem.heads, problem.head_dim_v)
    logsumexp_cotangent = rng.standard_normal(query.shape[:-1], np.float32)
    return Arrays(query, key, value, keys, values, out_cotangent, logsumexp_cotangent)


def operator_of(problem: Problem, backend: str | None) -> Callable[..., Any]:
    """The public function on a problem: output and logsumexp of the operands, which are given by name."""
    common: dict[str, Any] = {"backend": backend, "scale": problem.scale, "return_lse": True}
    if problem.operator == "fmha":
        return functools.partial(attention, is_causal=problem.is_causal[0], **common)
    return functools.partial(_OPERATORS[problem.rank], **problem.windows._asdict(), **common)
