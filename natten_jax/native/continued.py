"""Which forward kernels continue others: they merge what they find with what was found before on other keys."""

from __future__ import annotations

from natten_jax.native import module as native
from natten_jax.problem import Problem


def continues(family: str, problem: Problem) -> bool:
    """Whether the kernels of a family of backends do, for the heads of a problem.

    Others run alone, and their results are merged.
    """
    if family != "hopper":
        return False
    return max(problem.head_dim, problem.head_dim_v) <= native.limits("sm90").get("largest_continued_head_dim", 0)
