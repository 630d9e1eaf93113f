"""Batch entries one after the other: for backends that take but one layout in a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from natten_jax.arrays.roles import Role
from natten_jax.plan.request import Request

#: Runs a computation of a request on arrays.
RunEntry = Callable[[Request, Sequence[jax.Array]], list[jax.Array]]


def one_by_one(
    run: RunEntry, roles: Sequence[Role], of_results: Sequence[Role], request: Request, arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """The results of ``run`` on one entry of the batch after the other.

    Args:
        run: Runs the computation.
        roles: The roles of the arrays.
        of_results: The roles of the results.
        request: What is asked for, of the whole batch.
        arrays: The arrays; those that are not the same for the whole batch begin with it.
    """
    of_entry = request.of_part(1, arrays[0].shape[-2], arrays[1].shape[-2])
    batch = arrays[0].shape[0]
    if isinstance(batch, int) and batch == 1:
        return run(of_entry, arrays)

    def run_one(entry: list[jax.Array]) -> list[jax.Array]:
        own = iter(entry)
        every = [array if is_same else next(own)[None] for is_same, array in zip(are_same, arrays, strict=True)]
        return [result[0] for result in run(of_entry, every)]

    # There may be one table for all entries, or one for each.
    are_same = [
        role is Role.WHOLE or (role is Role.PER_HEAD_OF_ALL and array.shape[0] == 1)
        for role, array in zip(roles, arrays, strict=True)
    ]
    results = jax.lax.map(run_one, [array for is_same, array in zip(are_same, arrays, strict=True) if not is_same])
    is_shared = any(role is Role.PER_HEAD_OF_ALL for role, is_same in zip(roles, are_same, strict=True) if is_same)
    return [
        result.sum(axis=0, keepdims=True) if role is Role.PER_HEAD_OF_ALL and is_shared else result
        for role, result in zip(of_results, results, strict=True)
    ]
