"""XLA options for test programs on the CPU. The programs run for microseconds, so the options minimize compile time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax

#: With XLA's defaults, compiling both passes of plain JAX in two dimensions takes 5.5 to 6.9 s of CPU time. With the
#: first option (no optimization), it takes 4.3 to 4.8 s. With the first two (the second avoids MLIR for fusions), it
#: takes 2.1 to 2.3 s. With all three (the third puts all code in one LLVM module), it takes 1.4 to 1.8 s.
QUICK_HOST_OPTIONS: Mapping[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
#: XLA's defaults for the options of QUICK_HOST_OPTIONS.
XLAS_OWN_OPTIONS: Mapping[str, Any] = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_use_fusion_emitters": True,
    "xla_cpu_parallel_codegen_split_count": 32,
}


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Format compiler options as they appear in ``XLA_FLAGS``."""
    return [f"--{name}={str(value).lower()}" for name, value in options.items()]


def without_quick_host_code(flags: str) -> str:
    """Return ``XLA_FLAGS`` without the fast-compilation flags, so that a process compiles with XLA's defaults."""
    return " ".join(flag for flag in flags.split() if flag not in flags_of(QUICK_HOST_OPTIONS))


def users_environment() -> dict[str, str]:
    """Return the environment of a program that compiles with XLA's defaults and prints the same text as for users."""
    return {**os.environ, "XLA_FLAGS": without_quick_host_code(os.environ.get("XLA_FLAGS", ""))}


def accepted_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those compiler options that the installed jaxlib supports. Releases support different options."""

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
