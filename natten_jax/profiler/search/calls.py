"""The passes that a function runs, found in its program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from natten_jax.plan.plan import Plan
from natten_jax.profiler.program import Program


def plans_of(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> tuple[Plan, ...]:
    """How each pass runs that a function calls, on the devices that it is lowered for; equal ones once.

    Args:
        function: What ``jax.jit`` takes, or has made.
        *arguments: Its arguments: arrays, or their shapes and types.
        **keywords: Its keyword arguments.

    Raises:
        TypeError: ``jax.jit`` cannot trace it.
    """
    traced: Any = function if hasattr(function, "lower") else jax.jit(function)
    lowered = traced.lower(*arguments, **keywords)
    if len(jax.local_devices()) > 1:  # what each of them has is known once the program is split
        program = Program.from_compiled(lowered.compile())
    else:
        module: Any = lowered.compiler_ir(dialect="hlo")
        program = Program.from_proto(module.as_serialized_hlo_module_proto())
    found = (instruction.plan for instruction in program.instructions.values())
    return tuple(dict.fromkeys(plan for plan in found if plan is not None))
