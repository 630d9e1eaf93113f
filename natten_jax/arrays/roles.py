"""What the arrays of a pass are along their dimensions: which of them a mesh may split."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import Any

import jax

from natten_jax.arrays.operands import Differentiable, Inputs, Operands, Output, Saved
from natten_jax.arrays.query_box import QueryBox


class Role(enum.Enum):
    """A kind of array.

    All but ``WHOLE`` begin with the batch, after the axes that ``jax.vmap`` maps.

    Attributes:
        heads_axis: The dimension that heads lie along, counted from the end.
        has_layout: Whether the token dimensions follow the batch.
        is_key_value: Whether heads are those of keys and values.
    """

    QUERY = ("query", -2, True, False)
    KEY_VALUE = ("key_value", -2, True, True)
    ADDITIONAL = ("additional", -2, False, True)
    PER_QUERY = ("per_query", -1, True, False)
    PER_HEAD = ("per_head", -1, False, False)
    WHOLE = ("whole", 0, False, False)

    def __init__(self, _: str, heads_axis: int, has_layout: bool, is_key_value: bool) -> None:
        self.heads_axis = heads_axis
        self.has_layout = has_layout
        self.is_key_value = is_key_value


_OF_INPUTS = Role.QUERY, Role.KEY_VALUE, Role.KEY_VALUE, Role.ADDITIONAL, Role.ADDITIONAL, Role.PER_HEAD
_ROLES = {
    Inputs: _OF_INPUTS,
    Operands: (*_OF_INPUTS, Role.WHOLE),
    Output: (Role.QUERY, Role.PER_QUERY),
    Differentiable: (Role.QUERY, Role.PER_QUERY, Role.QUERY),
    Saved: (Role.QUERY, Role.PER_QUERY, Role.PER_QUERY),
    QueryBox: (Role.WHOLE,),
}


def roles_of(*arguments: Any) -> Sequence[Role]:
    """One for each array in operands, results, gradients, boxes; in the order of ``jax.tree.leaves``."""
    return _roles_of(jax.tree.structure(arguments))


@functools.lru_cache(maxsize=1024)
def _roles_of(structure: Any) -> Sequence[Role]:
    return [
        role
        for argument in jax.tree.unflatten(structure, range(structure.num_leaves))
        for array, role in zip(_fields(argument), _ROLES[type(argument)], strict=True)
        if array is not None
    ]


def _fields(argument: Any) -> Sequence[Any]:
    if isinstance(argument, Operands):
        return (*argument.inputs, argument.origins)
    return argument if isinstance(argument, tuple) else jax.tree.leaves(argument)
