"""How XLA compiles for the host what tests run a few times, for microseconds: quickly, not for speed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax

#: Both passes of plain JAX in two dimensions: 5.5 to 6.9 s of processor time with XLA's own choices, 4.3 to 4.8 without
#: optimisation, 2.1 to 2.3 if XLA also emits a fusion of operations without MLIR, and 1.4 to 1.8 if all code is one
#: module of LLVM's.
QUICK_HOST_OPTIONS: Mapping[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
#: What XLA chooses where nobody asks for anything else.
XLAS_OWN_OPTIONS: Mapping[str, Any] = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_use_fusion_emitters": True,
    "xla_cpu_parallel_codegen_split_count": 32,
}


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Compiler options as ``XLA_FLAGS`` has them."""
    return [f"--{name}={str(value).lower()}" for name, value in options.items()]


def without_quick_host_code(flags: str) -> str:
    """``XLA_FLAGS`` of a process that compiles as a user's does."""
    return " ".join(flag for flag in flags.split() if flag not in flags_of(QUICK_HOST_OPTIONS))


def users_environment() -> dict[str, str]:
    """Environment variables of a program that compiles as a user's does, so that it prints what a user reads."""
    return {**os.environ, "XLA_FLAGS": without_quick_host_code(os.environ.get("XLA_FLAGS", ""))}


def accepted_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those compiler options that the installed jaxlib has: they come and go."""

    def is_accepted(name: str, value: Any) -> bool:
        try:
            jax.jit(lambda x: x).lower(0).compile(compiler_options={name: value})
        except jax.errors.JaxRuntimeError as error:
            if name not in str(error):
                raise
            return False
        return True

    return {name: value for name, value in options.items() if is_accepted(name, value)}


def as_users_do() -> dict[str, Any]:
    """Compiler options of a test of what XLA makes of a program: those that a user's process has."""
    return accepted_options(XLAS_OWN_OPTIONS) if jax.default_backend() == "cpu" else {}
