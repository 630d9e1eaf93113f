"""What the arrays of a pass are along their dimensions: which of them a mesh may split."""

from __future__ import annotations

import enum
from typing import Any

import jax

from natten_jax.arrays.operands import Differentiable, Gradients, Operands, Output, Saved
from natten_jax.arrays.query_box import QueryBox


class Role(enum.Enum):
    """A kind of array; the value is the dimension that heads lie along, counted from the end.

    All but ``WHOLE`` begin with the batch, after the axes that ``jax.vmap`` maps.
    """

    QUERY = ("query", -2)
    KEY_VALUE = ("key_value", -2)
    ADDITIONAL = ("additional", -2)
    PER_QUERY = ("per_query", -1)
    PER_HEAD = ("per_head", -1)
    WHOLE = ("whole", 0)

    @property
    def heads_axis(self) -> int:
        """Where heads lie."""
        return self.value[1]

    @property
    def has_layout(self) -> bool:
        """Whether the token dimensions follow the batch."""
        return self in (Role.QUERY, Role.KEY_VALUE, Role.PER_QUERY)

    @property
    def is_key_value(self) -> bool:
        """Whether heads are those of keys and values."""
        return self in (Role.KEY_VALUE, Role.ADDITIONAL)


_FIELDS = {
    Operands: (Role.QUERY, *(Role.KEY_VALUE,) * 2, *(Role.ADDITIONAL,) * 2, Role.PER_HEAD, Role.WHOLE),
    Gradients: (Role.QUERY, *(Role.KEY_VALUE,) * 2, *(Role.ADDITIONAL,) * 2, Role.PER_HEAD),
    Output: (Role.QUERY, Role.PER_QUERY),
    Differentiable: (Role.QUERY, Role.PER_QUERY, Role.QUERY),
    Saved: (Role.QUERY, Role.PER_QUERY, Role.PER_QUERY),
    QueryBox: (Role.WHOLE,),
}


def roles_of(*arguments: Any) -> list[Role]:
    """One for each array in operands, results, gradients, boxes; in the order of ``jax.tree.leaves``."""
    return [
        role
        for argument in arguments
        for array, role in zip(_fields(argument), _FIELDS[type(argument)], strict=True)
        if array is not None
    ]


def _fields(argument: Any) -> list[Any]:
    return jax.tree.leaves(argument, is_leaf=lambda field: field is None)
