"""XLA options for test programs on the CPU: they run for microseconds, so compile time matters more than speed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax

#: Both passes of plain JAX in two dimensions take 5.5 to 6.9 s of CPU time to compile with XLA's defaults, 4.3 to 4.8 s
#: without optimization, 2.1 to 2.3 s if XLA also emits fusions without MLIR, and 1.4 to 1.8 s if all code is one LLVM
#: module.
QUICK_HOST_OPTIONS: Mapping[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
#: XLA's defaults for these options.
XLAS_OWN_OPTIONS: Mapping[str, Any] = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_use_fusion_emitters": True,
    "xla_cpu_parallel_codegen_split_count": 32,
}


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Format compiler options as they appear in ``XLA_FLAGS``."""
    return [f"--{name}={str(value).lower()}" for name, value in options.items()]


def without_quick_host_code(flags: str) -> str:
    """Remove the fast-compilation flags from ``XLA_FLAGS``, so that a process compiles as a user's does."""
    return " ".join(flag for flag in flags.split() if flag not in flags_of(QUICK_HOST_OPTIONS))


def users_environment() -> dict[str, str]:
    """Return the environment of a program that compiles as a user's does, so that it prints what users read."""
    return {**os.environ, "XLA_FLAGS": without_quick_host_code(os.environ.get("XLA_FLAGS", ""))}


def accepted_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compiler options that the installed jaxlib supports; options differ between releases."""

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
    """Return compiler options for tests of XLA's output: XLA's defaults, as in a user's process."""
    return accepted_options(XLAS_OWN_OPTIONS) if jax.default_backend() == "cpu" else {}
