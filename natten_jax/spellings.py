"""Arguments of PyTorch's NATTEN that have no meaning here, or another name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from natten_jax.static_arguments import shown

#: For each the value that changes nothing, and what to do instead of giving another.
_FOREIGN: dict[str, tuple[Any, str]] = {
    "torch_compile": (False, "jax.jit compiles every call"),
    "backward_use_pt_reduction": (False, "here it is called backward_use_xla_reduction"),
}


def known_arguments(function: str, arguments: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The keyword arguments that a function knows, without those of NATTEN that change nothing.

    Args:
        function: Name of the function, for messages.
        arguments: What it was given.
        names: What it knows.

    Raises:
        TypeError: It was given something else.
    """
    known = set(names)
    for name, value in arguments.items():
        if name in known:
            continue
        if name not in _FOREIGN:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        neutral, instead = _FOREIGN[name]
        if value is not neutral:
            raise TypeError(f"{function}() takes {name}={neutral} only, got {shown(value)}: {instead}")
    return {name: value for name, value in arguments.items() if name in known}
