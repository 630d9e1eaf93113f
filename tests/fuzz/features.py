"""What problems may be asked to have: features of the operators, all others drawn beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from natten_jax.problem import Operator
from tests.support.families import Family

from .problem import Fuzzed, draw, draw_where

#: Sequences of problems, one behind the other, in which a problem with a feature is looked for.
_APART = 2**32
_MOST_ATTEMPTS = 4000

FEATURES: Mapping[str, Callable[[Fuzzed], bool]] = {
    "edges": lambda problem: bool({"cut", "wrap"} & set(problem.case.edges or ())),
    "wrap": lambda problem: "wrap" in (problem.case.edges or ()),
    "query_origin": lambda problem: problem.case.origins is not None,
    "extents": lambda problem: problem.case.extents is not None,
    "upsample": lambda problem: problem.case.upsample is not None,
    "odd_heads": lambda problem: any(dim % 8 for dim in (problem.case.head_dim, problem.case.head_dim_v or 0)),
    "relative_bias": lambda problem: problem.case.relative_bias,
    "key_bias": lambda problem: problem.case.key_bias is not None,
    "sinks": lambda problem: problem.case.sinks,
    "float8": lambda problem: problem.is_float8,
}


def draw_with(
    features: Sequence[str], family: Family, operators: tuple[Operator, ...], seed: int, number: int, is_direct: bool
) -> Fuzzed:
    """The problem with a number, as :func:`draw` has it; or the first one with all features of those it stands for.

    Raises:
        ValueError: None has the features: the family or its kernels alone do not take them.
    """
    if not features:
        return draw(family, operators, seed, number, is_direct)

    def is_wanted(problem: Fuzzed) -> bool:
        return problem.spoiled is None and all(FEATURES[feature](problem) for feature in features)

    for attempt in range(_MOST_ATTEMPTS):
        found = draw_where(family, operators, seed, number + attempt * _APART, is_direct, is_wanted)
        if found is not None and is_wanted(found):  # kernels that know no edges get a problem without them
            return found
    raise ValueError(f"no problem of {family.name} has {' and '.join(features)}")
