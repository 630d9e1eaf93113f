"""Draw problems that have required features. All other features remain random."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from natten_jax import backends
from natten_jax.performance import PASSES, tile_names
from natten_jax.plan import devices
from natten_jax.problem import Operator
from tests.support.families import Family

from .problem import MANY_KEYS, SPOILED_BIASES, Fuzzed, draw, draw_where
from .rings import kernels_with_rings, ring_pairs

#: Names of features, and the prefixes of kernel names that they require. A problem with such a feature has large
#: windows, and its tiles select a small-window kernel with a ring of buffers in shared memory.
RINGS: Mapping[str, str] = {
    "ring": "",
    "forward_ring": "forward",
    "query_gradient_ring": "query gradient",
    "key_value_gradient_ring": "key/value gradient",
}


def kernels_of(problem: Fuzzed) -> tuple[str, ...]:
    """Return the names of the ring kernels that a problem's tiles select. Empty if the backend chooses the tiles."""
    if problem.copies == 1:
        return ()
    backend, device = backends.find(problem.backend, problem.operator), devices.default_device()
    found: list[str] = []
    for pass_ in PASSES:
        q_tile, kv_tile = (problem.tiles.get(name) for name in tile_names(pass_))
        if q_tile is not None and kv_tile is not None:
            found += kernels_with_rings(backend, problem.description(), device, pass_, (q_tile, kv_tile))
    return tuple(found)


def has_ring(problem: Fuzzed, kernel: str) -> bool:
    """Return True if the problem's tiles select a ring kernel whose name begins with ``kernel``.

    Features are also checked before tiles are drawn. For a problem without tiles, return True if there are tiles that
    select such a kernel.
    """
    if problem.copies == 1:
        return False
    found = set(kernels_of(problem))
    if not problem.tiles:
        backend, device = backends.find(problem.backend, problem.operator), devices.default_device()
        for pass_ in PASSES:
            found.update(*ring_pairs(backend, problem.description(), device, pass_))
    return any(name.startswith(kernel) for name in found)


#: Name of the feature that a bias, the sinks or the scale contains non-finite or very low numbers.
SPOILED_BIAS = "spoiled_bias"

#: To find a problem with the features, ``draw_with`` tries at most ``_MAX_ATTEMPTS`` numbers, in steps of ``_APART``.
_APART = 2**32
_MAX_ATTEMPTS = 4000

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
    SPOILED_BIAS: lambda problem: problem.spoiled is not None and problem.spoiled.is_added,
    **{name: functools.partial(has_ring, kernel=kernel) for name, kernel in RINGS.items()},
}


def draw_with(
    features: Sequence[str], family: Family, operators: tuple[Operator, ...], seed: int, number: int, is_direct: bool
) -> Fuzzed:
    """Draw problem ``number`` like :func:`draw`. If it lacks a feature, draw other problems until one has all features.

    Raises:
        ValueError: No drawn problem has all features. The family does not support them, or its kernels do not support
            them in direct calls.
    """
    if not features:
        return draw(family, operators, seed, number, is_direct)

    def is_wanted(problem: Fuzzed) -> bool:
        is_whole = problem.spoiled is None or problem.spoiled.is_added
        return is_whole and all(FEATURES[feature](problem) for feature in features)

    share_of_many_keys = MANY_KEYS if RINGS.keys().isdisjoint(features) else 1.0
    share_of_spoiled_biases = 1.0 if SPOILED_BIAS in features else SPOILED_BIASES
    shares = share_of_many_keys, share_of_spoiled_biases
    for attempt in range(_MAX_ATTEMPTS):
        found = draw_where(family, operators, seed, number + attempt * _APART, is_direct, is_wanted, *shares)
        # ``draw_where`` checks the problem before it draws tiles. It may then replace edge modes that no drawn tiles
        # support, so the returned problem is checked again.
        if found is not None and is_wanted(found):
            return found
    raise ValueError(f"no problem of {family.name} has {' and '.join(features)}")
