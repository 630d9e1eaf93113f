"""Tests compile quickly for the host, and a user's program as it does for the user."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import pytest

from tests.support.compilation import (
    QUICK_HOST_OPTIONS,
    as_users_do,
    flags_of,
    known,
    users_environment,
    without_quick_host_code,
)
from tests.support.programs import output_of, run_python

is_of_the_host = pytest.mark.skipif(jax.default_backend() != "cpu", reason="is of the host")


@is_of_the_host
def test_this_process_and_those_it_starts_compile_quickly() -> None:
    flags = known(flags_of(QUICK_HOST_OPTIONS))
    assert "--xla_backend_optimization_level=0" in flags
    assert set(flags) <= set(os.environ["XLA_FLAGS"].split())
    assert set(flags) <= set(output_of(run_python("import os; print(os.environ['XLA_FLAGS'])")).split())


def test_flags_that_jaxlib_lacks_are_left_out() -> None:
    level = flags_of({"xla_backend_optimization_level": 0})
    assert known([*level, "--xla_no_such_flag=1"]) == level


def test_a_users_program_keeps_all_other_flags() -> None:
    flags = " ".join(["--xla_dump_to=/nowhere", *flags_of(QUICK_HOST_OPTIONS), "--xla_backend_optimization_level=2"])
    assert without_quick_host_code(flags) == "--xla_dump_to=/nowhere --xla_backend_optimization_level=2"
    assert not set(flags_of(QUICK_HOST_OPTIONS)) & set(users_environment()["XLA_FLAGS"].split())


COMPILED = """
import jax, jax.numpy as jnp
print(jax.jit(lambda x: jnp.exp(jnp.sin(x) + 1).sum()).lower(jnp.ones(99)).compile().as_text())
"""


@is_of_the_host
def test_options_of_users_are_those_of_their_processes() -> None:
    users = output_of(run_python(COMPILED, quick=False))
    lowered = jax.jit(lambda x: jnp.exp(jnp.sin(x) + 1).sum()).lower(jnp.ones(99))
    assert instructions(lowered.compile(compiler_options=as_users_do()).as_text()) == instructions(users)


def instructions(text: str | None) -> list[str]:
    """The opcodes of a compiled program, in turn."""
    assert text is not None
    return [line.split(" = ")[1].split("(")[0] for line in text.splitlines() if " = " in line]
