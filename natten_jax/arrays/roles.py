"""What the arrays of a pass are along their dimensions: which of them a mesh may split."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import Any, get_type_hints

import jax


class Role(enum.Enum):
    """What an array of a pass is.

    - ``QUERY``: queries, outputs and their gradients.
    - ``KEY_VALUE``: keys, values and their gradients.
    - ``ADDITIONAL``: tokens that every query sees.
    - ``PER_QUERY``: a number for each query and head, as the logsumexp.
    - ``PER_HEAD``: a number for each batch entry and head, as scales.
    - ``PER_ENTRY``: numbers of a batch entry.
    - ``WHOLE``: what no mesh splits, as origins, which each device has of its own.

    All but ``WHOLE`` begin with the batch, after the axes that ``jax.vmap`` maps.

    Attributes:
        heads_axis: The dimension that heads lie along, counted from the end; 0 where there are none.
        has_layout: Whether the token dimensions follow the batch.
        is_key_value: Whether heads are those of keys and values.
    """

    QUERY = ("query", -2, True, False)
    KEY_VALUE = ("key_value", -2, True, True)
    ADDITIONAL = ("additional", -2, False, True)
    PER_QUERY = ("per_query", -1, True, False)
    PER_HEAD = ("per_head", -1, False, False)
    PER_ENTRY = ("per_entry", 0, False, False)
    WHOLE = ("whole", 0, False, False)

    def __init__(self, _: str, heads_axis: int, has_layout: bool, is_key_value: bool) -> None:
        self.heads_axis = heads_axis
        self.has_layout = has_layout
        self.is_key_value = is_key_value


def roles_of(*arguments: Any) -> Sequence[Role]:
    """One for each array in operands, results, gradients, boxes; in the order of ``jax.tree.leaves``."""
    return _roles_of(jax.tree.structure(arguments))


@functools.lru_cache(maxsize=1024)
def _roles_of(structure: Any) -> Sequence[Role]:
    found: list[Role] = []
    for argument in jax.tree.unflatten(structure, range(structure.num_leaves)):
        if isinstance(argument, tuple):
            arrays = [array for each in argument for array in (each if isinstance(each, tuple) else (each,))]
            pairs = zip(arrays, roles_of_fields(type(argument)), strict=True)
            found += [role for array, role in pairs if array is not None]
        else:
            found += [Role.WHOLE] * len(jax.tree.leaves(argument))  # of a box
    return found


@functools.cache
def roles_of_fields(kind: type) -> tuple[Role, ...]:
    """Roles of a tuple's fields, which stand with their types; in place of a tuple in it those of its fields."""
    hints = get_type_hints(kind, include_extras=True).values()
    return tuple([role for hint in hints for role in getattr(hint, "__metadata__", None) or roles_of_fields(hint)])
