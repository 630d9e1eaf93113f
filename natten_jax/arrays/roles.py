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
    - ``PER_KEY``, ``PER_KEY_OF_ALL_HEADS``: a number for each key, by query head or for all of them.
    - ``PER_HEAD``: a number for each batch entry and head, as scales.
    - ``PER_HEAD_OF_ALL``: numbers of a head that all batch entries share, with 1 in place of the batch.
    - ``PER_ENTRY``: numbers of a batch entry.
    - ``WHOLE``: what no mesh splits, as origins, which each device has of its own.

    All but ``WHOLE`` begin with the batch, after the axes that ``jax.vmap`` maps.

    Attributes:
        heads_axis: The dimension that heads lie along, counted from the end; 0 where there are none.
        tokens: Whose token dimensions follow the batch: ``"queries"``, ``"keys"`` or nobody's.
        has_layout: Whether there are any.
        is_key_value: Whether heads are those of keys and values.
    """

    QUERY = ("query", -2, "queries", False)
    KEY_VALUE = ("key_value", -2, "keys", True)
    ADDITIONAL = ("additional", -2, None, True)
    PER_QUERY = ("per_query", -1, "queries", False)
    PER_KEY = ("per_key", -2, "keys", False)
    PER_KEY_OF_ALL_HEADS = ("per_key_of_all_heads", 0, "keys", False)
    PER_HEAD = ("per_head", -1, None, False)
    PER_HEAD_OF_ALL = ("per_head_of_all", -2, None, False)
    PER_ENTRY = ("per_entry", 0, None, False)
    WHOLE = ("whole", 0, None, False)

    def __init__(self, _: str, heads_axis: int, tokens: str | None, is_key_value: bool) -> None:
        self.heads_axis = heads_axis
        self.tokens = tokens
        self.has_layout = tokens is not None
        self.is_key_value = is_key_value

    @property
    def is_of_heads(self) -> bool:
        """Whether query heads have it, whatever their tokens are."""
        return self in (Role.PER_HEAD, Role.PER_HEAD_OF_ALL)


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
    found: list[Role] = []
    for hint in get_type_hints(kind, include_extras=True).values():
        roles = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Role)]
        found += roles or roles_of_fields(hint)
    return tuple(found)
