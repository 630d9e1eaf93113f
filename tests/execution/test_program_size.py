"""How much of a program a layer is: what XLA compiles, and what the profiler reads in it."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from natten_jax import na2d
from natten_jax.plan.plan import NAME_ATTRIBUTE, PLAN_ATTRIBUTE
from natten_jax.profiler.program import Program
from tests.support.compilation import as_users_do
from tests.support.families import Family


def layers(count: int, backend: str, layout: tuple[int, int] = (16, 24), dtype: str = "float32") -> jax.stages.Lowered:
    """A program of equal layers and their gradients."""
    tokens = jax.ShapeDtypeStruct((1, *layout, 2, 16), dtype)

    def run(query: jax.Array, key: jax.Array) -> jax.Array:
        for _ in range(count):
            query = na2d(query, key, key, kernel_size=5, backend=backend)
        return jnp.sum(query.astype("float32"))

    return jax.jit(jax.grad(run, argnums=(0, 1))).lower(tokens, tokens)


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """The program that users have; only the machine's code for it is not optimised, which nobody looks at here."""
    options: dict[str, Any] = {**as_users_do(), "xla_backend_optimization_level": 0}
    return lowered.compile(compiler_options=options)


def instructions(text: str) -> int:
    return len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", text, re.MULTILINE))


def test_a_plan_stands_once_in_each_pass(family: Family) -> None:
    """Equal layers share their passes in what is traced; what is compiled has a pass for each."""
    lowered = layers(3, family.fna, dtype=family.dtype)
    assert lowered.as_text().count(f"{PLAN_ATTRIBUTE} =") == 2
    program = compiled(lowered)
    text = program.as_text()
    assert text is not None
    names = set(re.findall(rf'{NAME_ATTRIBUTE}="([0-9a-f]+)"', text))
    assert len(names) == 2
    plans = [each.plan for each in Program.from_compiled(program).instructions.values() if each.plan is not None]
    assert {plan.pass_ for plan in plans} == {"forward", "backward"}
    assert all(str(plan.backend) == family.fna for plan in plans)


def test_loops_of_a_pass_are_marked(pure_family: Family) -> None:
    program = Program.from_compiled(compiled(layers(1, pure_family.fna))).instructions.values()
    loops = [each for each in program if each.opcode == "while"]
    assert loops and all(each.plan is not None for each in loops)


@pytest.mark.parametrize("layout", [(16, 24), (128, 256)])
def test_a_layer_in_plain_jax_is_small(layout: tuple[int, int]) -> None:
    """XLA takes about 0.2 milliseconds to compile an instruction, and 24 layers with gradients are to take seconds."""
    one, two = (compiled(layers(count, "flex-fna", layout)).as_text() for count in (1, 2))
    assert one is not None and two is not None
    assert instructions(two) - instructions(one) < 1600
