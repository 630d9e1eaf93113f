"""The attention calls that one call of neighborhood attention consists of: one, or two whose results are merged."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

from natten_jax import backends
from natten_jax.execution import passes
from natten_jax.ops.attention_kwargs import checked_attention_kwargs
from natten_jax.performance import ATTENTION_NAMES, Performance, performance_of
from natten_jax.plan.request import Request
from natten_jax.problem import flattened, of_additional_tokens


class KeySet(enum.Enum):
    """What a sub-call attends to."""

    WINDOWS = "windows"  # the tokens, and the additional ones if the same kernel takes them
    WHOLE_LAYOUT = "whole layout"  # all tokens and all additional ones, flattened
    ADDITIONAL = "additional"  # the additional tokens alone, flattened


class SubCall(NamedTuple):
    """One attention call.

    Attributes:
        kind: What it attends to.
        request: What is asked of the backends.
    """

    kind: KeySet
    request: Request

    @property
    def keeps_tokens(self) -> bool:
        """Whether token dimensions can stay split over devices."""
        return self.kind is KeySet.WINDOWS


def sub_calls_of(
    request: Request, attention_kwargs: Mapping[str, Any] | None = None, try_fuse_additional_kv: bool | None = None
) -> tuple[SubCall, ...]:
    """The attention calls of a call of ``na1d``, ``na2d`` or ``na3d``.

    Args:
        request: The call.
        attention_kwargs: As the operator takes them.
        try_fuse_additional_kv: Likewise.

    Raises:
        ValueError: ``attention_kwargs`` breaks a rule of ``attention``, or ``backend`` is unknown.
        TypeError: ``attention_kwargs`` holds a wrong type.
    """
    problem = request.problem
    counterpart = backends.counterpart(request.backend)
    if attention_kwargs is None and not problem.additional_kv and not problem.is_attention:
        return (SubCall(KeySet.WINDOWS, request),)
    # Whatever runs the whole layout is told the call's own performance arguments, too.
    inherited = request.performance.flattened() if problem.is_attention else {}
    own = checked_attention_kwargs(attention_kwargs, inherited)
    speaks_of_it = bool(own)
    backend = own.pop("backend", counterpart)
    performance = _attention_performance({**inherited, **own})
    if problem.is_attention:
        return (
            SubCall(
                KeySet.WHOLE_LAYOUT,
                dataclasses.replace(request, problem=flattened(problem), performance=performance, backend=backend),
            ),
        )
    if try_fuse_additional_kv is None:
        try_fuse_additional_kv = not speaks_of_it
    if not problem.additional_kv or (try_fuse_additional_kv and passes.fuses_additional_kv(request)):
        return (SubCall(KeySet.WINDOWS, request),)
    windows = dataclasses.replace(request, problem=dataclasses.replace(problem, additional_kv=0))
    additional = dataclasses.replace(
        request, problem=of_additional_tokens(problem), performance=performance, backend=backend
    )
    return SubCall(KeySet.WINDOWS, windows), SubCall(KeySet.ADDITIONAL, additional)


def _attention_performance(arguments: Mapping[str, Any]) -> Performance:
    return performance_of(1, tile_suffix="size", **{ATTENTION_NAMES[name]: each for name, each in arguments.items()})
