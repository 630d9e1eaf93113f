"""Backends for devices that this machine does not have: programs are lowered for them, and for others refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest

import natten_jax
from natten_jax.arrays.operands import Operands, Output
from natten_jax.backends.base import Platform, PureJaxBackend
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem
from tests.support.machine import Machine

ARRAY = jax.ShapeDtypeStruct((1, 12, 2, 8), jnp.float32)


class ConstantBackend(PureJaxBackend):
    """A backend that is for one platform, and which computes next to nothing: its plan is seen in programs' text."""

    family = "constant"
    dtypes = ("float32",)
    is_slow_fallback = False

    def __init__(self, platform: str) -> None:
        self.platform = Platform(platform)  # type: ignore[misc]

    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        tile = (1,) * problem.rank
        return [(tile, tile)]

    def largest_tiles(self, problem: Problem, device: Device, pass_: Pass) -> tuple[int, int]:
        return 1, 1

    def forward(self, plan: Plan, operands: Operands) -> Output:
        query, value = operands.inputs.query, operands.inputs.value
        return Output(query + value.sum(), query.sum(-1))


def attend(x: jax.Array, **arguments: Any) -> jax.Array:
    return natten_jax.na1d(x, x, x, 3, **arguments)


def gradient(x: jax.Array, **arguments: Any) -> jax.Array:
    return jax.grad(lambda x: attend(x, **arguments).sum())(x)


def exported(function: Callable[..., Any], *platforms: str) -> str:
    checks = natten_jax.EXPORT_CHECKS
    return str(jax.export.export(jax.jit(function), platforms=platforms, disabled_checks=checks)(ARRAY).mlir_module())


def is_of_it(text: str) -> bool:
    return "constant-fna" in text


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
@pytest.mark.parametrize("name", [None, "constant-fna"])
@pytest.mark.parametrize("function", [attend, gradient])
def test_it_is_lowered_for_its_platform(
    platform: str, name: str | None, function: Callable[..., Any], machine: Machine
) -> None:
    machine.knows(ConstantBackend(platform))
    assert is_of_it(exported(lambda x: function(x, backend=name), platform))


@pytest.mark.parametrize("function", [attend, gradient])
def test_it_is_refused_elsewhere(function: Callable[..., Any], machine: Machine) -> None:
    machine.knows(ConstantBackend("tpu"))
    for platform in "cpu", "cuda", "rocm":
        with pytest.raises(ValueError, match=rf"'constant-fna' cannot run .* on {platform}: it runs on platform tpu"):
            exported(lambda x: function(x, backend="constant-fna"), platform)
    with pytest.raises(ValueError, match=r"on cpu: it runs on platform tpu only, not on cpu\. Backends that can: cpu-"):
        attend(jnp.zeros(ARRAY.shape), backend="constant-fna")
    assert not any(is_of_it(exported(function, platform)) for platform in ("cpu", "cuda", "rocm"))


def test_one_program_for_several_platforms_has_what_each_prefers(machine: Machine) -> None:
    machine.knows(ConstantBackend("tpu"))
    text = exported(attend, "cpu", "tpu", "rocm")
    assert [text.count('natten_jax_plan = "{') > 0, is_of_it(text), "natten_jax_cpu_forward" in text] == [True] * 3


@pytest.mark.parametrize("platform", ["tpu", "rocm", "plugin"])
def test_it_is_what_its_own_machine_runs(platform: str, machine: Machine) -> None:
    """Traced on a machine with such a device, without a name or by it, and known to queries."""
    machine.knows(ConstantBackend(platform))
    machine.has(Device(platform))
    assert natten_jax.get_configs_for_constant_fna(ARRAY) == [((1,), (1,))]
    for name in None, "constant-fna":
        jax.eval_shape(lambda x, name=name: gradient(x, backend=name), ARRAY)
    with pytest.raises(ValueError, match=rf"'hopper-fna' cannot run .* on {platform}: "):
        jax.eval_shape(lambda x: attend(x, backend="hopper-fna"), ARRAY)


@pytest.mark.parametrize("fuses", [True, False])
def test_a_backend_may_leave_additional_tokens_to_another_call(fuses: bool, machine: Machine) -> None:
    class Backend(ConstantBackend):
        fuses_additional_kv = fuses

    machine.knows(Backend("tpu"))
    tokens = jnp.ones((1, 3, 2, 8))

    def with_additional(x: jax.Array) -> jax.Array:
        return attend(x, additional_keys=tokens, additional_values=tokens, backend="constant-fna")

    text = exported(with_additional, "tpu")
    assert is_of_it(text) and ("constant-fmha" in text) == (not fuses)
