"""What a problem may be asked to have: features of the operators, all others drawn beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from natten_jax.problem import Operator
from tests.support.families import Family
from tests.support.problems import Case

from .problem import Fuzzed, draw

#: Sequences of problems, one behind the other, in which a problem with a feature is looked for.
_APART = 2**32
_MOST_ATTEMPTS = 4000

FEATURES: Mapping[str, Callable[[Case], bool]] = {
    "edges": lambda case: bool({"cut", "wrap"} & set(case.edges or ())),
    "wrap": lambda case: "wrap" in (case.edges or ()),
    "query_origin": lambda case: case.origins is not None,
    "extents": lambda case: case.extents is not None,
    "upsample": lambda case: case.upsample is not None,
    "odd_heads": lambda case: case.head_dim % 8 != 0 or (case.head_dim_v or case.head_dim) % 8 != 0,
    "relative_bias": lambda case: case.relative_bias,
    "key_bias": lambda case: case.key_bias is not None,
    "sinks": lambda case: case.sinks,
}


def draw_with(
    feature: str | None, family: Family, operators: tuple[Operator, ...], seed: int, number: int, is_direct: bool
) -> Fuzzed:
    """The problem with a number, as :func:`draw` has it; or the first one with the feature of those that it stands for.

    Raises:
        ValueError: None has the feature: the family or its kernels alone do not take it.
    """
    if feature is None:
        return draw(family, operators, seed, number, is_direct)
    for attempt in range(_MOST_ATTEMPTS):
        problem = draw(family, operators, seed, number + attempt * _APART, is_direct)
        if problem.spoiled is None and FEATURES[feature](problem.case):
            return problem
    raise ValueError(f"no problem of {family.name} has {feature}")
