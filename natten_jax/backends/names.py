"""What is said of a name that no backend has: a misspelt one, or other libraries'."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

from natten_jax.arguments.static import shown
from natten_jax.backends.base import Backend
from natten_jax.plan.plan import BackendId
from natten_jax.problem import OPERATORS, Operator

#: Names of attention implementations in other libraries and in the profiler.
_OF_JAX = "an implementation of attention in JAX, which the profiler measures beside these"
_OF_PYTORCH = "an implementation of attention in PyTorch"
_OTHERS = MappingProxyType(
    {
        **dict.fromkeys(("cudnn", "xla", "pallas", "triton", "mosaic"), _OF_JAX),
        **dict.fromkeys(("xformers", "fav2", "fa2", "fa3", "flash", "flash-attention", "sdpa", "eager"), _OF_PYTORCH),
    }
)

_LONGEST = 64  # of a name that is looked at

_WHAT = {"fna": "neighborhood attention", "fmha": "attention"}


def unknown(name: Any, operator: Operator, registered: Iterable[Backend]) -> str:
    """The message for a name that no backend of the operator has."""
    registered = tuple(registered)
    choices = f"hoose None or one of {', '.join(str(BackendId(each.family, operator)) for each in registered)}"
    if not isinstance(name, str):
        return f"backend={shown(name)} is unknown; c{choices}"
    family, of = _parts(name)
    if family in _OTHERS:
        return f"backend={shown(name)} is unknown: {family} is {_OTHERS[family]}; c{choices}"
    meant = closest(name, operator, registered)
    if meant is None:
        return f"backend={shown(name)} is unknown; c{choices}"
    is_other = of not in (None, operator) and name == str(BackendId(meant.family, of))
    problem = f"is a backend of {_WHAT[of]}, and this is {_WHAT[operator]}" if of and is_other else "is unknown"
    return f"backend={shown(name)} {problem}: did you mean {str(meant)!r}? C{choices}"


def closest(name: str, operator: Operator, registered: Iterable[Backend]) -> BackendId | None:
    """The backend of the operator that was meant; ``None`` where no name is near."""
    families = [backend.family for backend in registered]
    found = difflib.get_close_matches(_parts(name)[0], families, 1, cutoff=0.7)
    return BackendId(found[0], operator) if found else None


def _parts(name: str) -> tuple[str, Operator | None]:
    """Family and operator of a name in any case, with any separators."""
    written = re.sub(r"[\s_]+", "-", name[:_LONGEST].strip().lower())
    for operator in OPERATORS:
        if written.endswith(f"-{operator}"):
            return written.removesuffix(f"-{operator}"), operator
    return written, None
