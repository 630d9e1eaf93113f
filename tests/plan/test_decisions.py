"""A decision about a pass is made once, however often a call and its gradient ask."""

from __future__ import annotations

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import natten_jax
from natten_jax.backends import select
from natten_jax.performance import PASSES
from tests.support.machine import Machine
from tests.support.programs import output_of, run_python


@pytest.fixture
def decisions(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> collections.Counter[Any]:
    """How often each decision is made: by device, pass, and what of a layout it is for."""
    made: collections.Counter[Any] = collections.Counter()
    decide = select.decided.__wrapped__

    @functools.lru_cache
    def counted(request: Any, device: Any, pass_: Any, registered: Any) -> Any:
        made[device, pass_, request.parts] += 1
        return decide(request, device, pass_, registered)

    monkeypatch.setattr(select, "decided", counted)
    return made


def loss(x: jax.Array, **arguments: Any) -> jax.Array:
    return natten_jax.na2d(x, x, x, 5, **arguments).sum()


@pytest.mark.parametrize("name", [None, "flex-fna"])
@pytest.mark.parametrize("times", [1, 3])
def test_each_pass_is_decided_once_for_a_device(
    name: str | None, times: int, decisions: collections.Counter[Any]
) -> None:
    def layers(x: jax.Array) -> jax.Array:
        return jnp.stack([loss(x, backend=name) for _ in range(times)]).sum()

    jax.jit(jax.grad(layers)).lower(jax.ShapeDtypeStruct((2, 16, 16, 2, 8), jnp.float32))
    assert set(decisions.values()) == {1}
    assert {pass_ for device, pass_, _ in decisions if device.platform == "cpu"} >= {"forward"}


@pytest.mark.usefixtures("without_stored_programs")
def test_a_gradient_over_a_mesh_decides_once_for_the_layout_and_once_for_its_parts() -> None:
    program = """
    import collections, functools
    import jax, jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    import natten_jax
    from natten_jax.backends import select

    made, decide = collections.Counter(), select.decided.__wrapped__

    @functools.lru_cache
    def counted(request, device, pass_, registered):
        made[str(device), pass_, request.parts] += 1
        return decide(request, device, pass_, registered)

    select.decided = counted
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(None, "d"))
    function = jax.jit(jax.grad(lambda x: natten_jax.na2d(x, x, x, 5).sum()), in_shardings=sharding)
    function.lower(jax.ShapeDtypeStruct((2, 16, 16, 2, 8), jnp.float32)).compile()
    for key, count in sorted(made.items()):
        print(*key, count, sep=";")
    """
    found = output_of(run_python(program, devices=2)).split("\n")
    expected = [f"cpu;{pass_};{parts};1" for pass_ in sorted(PASSES) for parts in ("()", "(2, 1)")]
    assert sorted(filter(None, found)) == sorted(expected)


def test_what_is_refused_is_refused_each_time(decisions: collections.Counter[Any]) -> None:
    x = jax.ShapeDtypeStruct((2, 16, 16, 2, 8), jnp.float32)
    said = []
    for _ in range(3):
        with pytest.raises(ValueError, match="hopper-fna") as caught:
            jax.eval_shape(lambda x: loss(x, backend="hopper-fna"), x)
        said.append(str(caught.value))
    assert len(set(said)) == 1 and set(decisions.values()) == {1}
