"""How a compiled program says which of its operations belong to a pass, and how that runs: what the profiler reads.

All operations of a pass are marked with a short name of its plan. The plan itself stands on one of them, which no
optimisation removes: it has hundreds of characters, and a pass in plain JAX hundreds of operations.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
from collections.abc import Iterator

from jax.experimental.xla_metadata import set_xla_metadata

from natten_jax.plan.plan import Plan

#: Attributes of operations: the name of their plan, and the plan as :meth:`.Plan.payload` writes it.
NAME_ATTRIBUTE, PLAN_ATTRIBUTE = "natten_jax", "natten_jax_plan"

_payload: contextvars.ContextVar[str | None] = contextvars.ContextVar("natten_jax_payload", default=None)


def name_of(plan: Plan) -> str:
    """The short name of a plan: the same in every process."""
    return hashlib.sha256(plan.payload().encode()).hexdigest()[:12]


@contextlib.contextmanager
def of_plan(plan: Plan, *, on_all: bool = False) -> Iterator[None]:
    """Mark the operations that are traced inside as those of a pass.

    Args:
        plan: The plan of the pass.
        on_all: Whether each of them has the plan, since none of them asks for it by :func:`carrying_plan`.
    """
    payload = plan.payload()
    token = _payload.set(payload)
    try:
        with set_xla_metadata(**{NAME_ATTRIBUTE: name_of(plan)}, **({PLAN_ATTRIBUTE: payload} if on_all else {})):
            yield
    finally:
        _payload.reset(token)


def carrying_plan() -> contextlib.AbstractContextManager[None]:
    """Put the plan of the pass that is being traced onto what is traced inside: one operation that stays as it is."""
    payload = _payload.get()
    return contextlib.nullcontext() if payload is None else set_xla_metadata(**{PLAN_ATTRIBUTE: payload})
