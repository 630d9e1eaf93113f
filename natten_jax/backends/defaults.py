"""Which backends run where a call names none: all but those by name, which the environment may ask for."""

from __future__ import annotations

import os
from collections.abc import Iterable

from natten_jax.backends.base import Backend

#: The environment variable: families, as in ``"tpu"``, with commas between them.
VARIABLE = "NATTEN_JAX_BY_DEFAULT"


def asked_for(registered: Iterable[Backend]) -> frozenset[str]:
    """The families by name that the environment wants by default.

    Args:
        registered: Every backend.

    Raises:
        ValueError: The variable names something else.
    """
    families = {family.strip() for family in os.environ.get(VARIABLE, "").split(",")} - {""}
    known = [backend.family for backend in registered if backend.is_by_name_only]
    if unknown := sorted(families.difference(known)):
        raise ValueError(
            f"the environment variable {VARIABLE} must name families that otherwise run only by name "
            f"({', '.join(known) or 'there are none'}), not {', '.join(map(repr, unknown))}"
        )
    return frozenset(families)
