"""The Blackwell backend from outside: by name alone, and on its GPUs alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import natten_jax
from natten_jax.backends import find, registered, select
from natten_jax.backends.pallas.blackwell import BlackwellBackend
from natten_jax.backends.select import resolve, runnable
from natten_jax.performance import PASSES, Pass, Performance
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Request
from natten_jax.problem import problem_of
from tests.support.machine import Machine

B200, B300 = (Device("cuda", (10, minor), is_present=False) for minor in (0, 3))
PROBLEM = problem_of((256, 256), 80, 16, heads=24, head_dim=128)


def families(**performance: Any) -> list[str]:
    """What runs both passes."""
    request = Request(PROBLEM, **performance)
    return [resolve(request, B200, pass_).backend.family for pass_ in PASSES]


@pytest.mark.parametrize("device", [B200, B300], ids=str)
@pytest.mark.parametrize("pass_", PASSES)
def test_its_gpus_are_two(device: Device, pass_: Pass) -> None:
    assert find("blackwell-fna", "fna").rejection(PROBLEM, device, pass_) is None


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (11, 0), (12, 0)])
def test_other_gpus_refuse_it_in_a_sentence(capability: tuple[int, int]) -> None:
    device = Device("cuda", capability, is_present=False)
    reason = find("blackwell-fna", "fna").rejection(PROBLEM, device, "forward")
    assert reason == f"it runs on NVIDIA GPUs of compute capability 10.0 or 10.3 only, not on {device}"


def test_the_default_is_the_portable_kernels(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    assert "blackwell" not in families()
    assert families(backend="blackwell-fna") == ["blackwell", "blackwell"]
    machine.forget()
    monkeypatch.setenv(select.VARIABLE, "blackwell")
    assert families() == ["blackwell", "blackwell"]


@pytest.mark.parametrize("pass_", PASSES)
def test_it_can_run_both_passes(pass_: Pass) -> None:
    assert [backend.family for backend in runnable(PROBLEM, B200, pass_)].count("blackwell") == 1


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        ({"dtype": "float32"}, "float16, bfloat16"),
        ({"head_dim": 136}, "at most 128"),
        ({"head_dim_v": 192}, "at most 128"),
        ({"edges": "wrap"}, "edges"),
    ],
)
def test_what_it_does_not_take(facts: dict[str, Any], part: str) -> None:
    reason = find("blackwell-fna", "fna").rejection(problem_of((64, 64), 7, **facts), B200, "forward")
    assert reason is not None and part in reason


@pytest.mark.parametrize(
    ("widths", "width"), [((8, 8), 32), ((32, 8), 32), ((40, 64), 64), ((64, 72), 128), ((128, 1), 128)]
)
def test_heads_are_filled_up_to_one_width(widths: tuple[int, int], width: int) -> None:
    problem = BlackwellBackend.with_wide_heads(problem_of((64,), 7, head_dim=widths[0], head_dim_v=widths[1]))
    assert (problem.head_dim, problem.head_dim_v) == (width, width)


def test_queries_of_natten_list_tiles_that_are_taken() -> None:
    tokens = jax.ShapeDtypeStruct((1, 30, 48, 80, 24, 128), jnp.bfloat16)
    configurations = natten_jax.get_configs_for_cutlass_blackwell_fna(
        tokens, kernel_size=(18, 24, 24), stride=(16, 8, 8), compute_capability="10.0"
    )
    assert ((4, 8, 8), (2, 8, 8)) in configurations
    backend = BlackwellBackend()
    for q_tile, kv_tile in configurations:
        assert backend.offers(problem_of((30, 48, 80), 18), B200, "forward", (q_tile, kv_tile))
    sizes = natten_jax.get_configs_for_cutlass_blackwell_fmha(
        jax.ShapeDtypeStruct((1, 4096, 24, 128), jnp.float16), compute_capability=(10, 3)
    )
    assert sorted(sizes) == [(128, 128), (256, 128)]
    of_gradients = natten_jax.get_bwd_configs_for_cutlass_blackwell_fna(
        tokens, kernel_size=(18, 24, 24), stride=(16, 8, 8), compute_capability="10.0"
    )
    assert ((2, 8, 8), (2, 8, 8)) in of_gradients
    for pair in of_gradients:
        assert backend.offers(problem_of((30, 48, 80), 18), B200, "backward", pair)


def test_tiles_of_two_halves_are_the_forward_passs_alone() -> None:
    pair = (16, 16), (16, 8)
    backend = BlackwellBackend()
    assert backend.offers(PROBLEM, B200, "forward", pair) and not backend.offers(PROBLEM, B200, "backward", pair)


@pytest.mark.parametrize("pair", [((16, 16), (16, 4)), ((16, 8), (12, 8)), ((64, 4), (16, 8)), ((8, 8), (16, 8))])
def test_other_tiles_are_refused_with_some_that_are_not(pair: Any) -> None:
    request = Request(PROBLEM, Performance(q_tile_shape=pair[0], kv_tile_shape=pair[1]), "blackwell-fna")
    with pytest.raises(ValueError, match=r"natten_jax\.get_configs_for_cutlass_blackwell_fna lists them"):
        resolve(request, B200, "forward")


def test_a_gpu_without_portable_kernels_still_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that nobody named is no kernel that runs by default."""
    here = Device("cuda", (10, 0))
    for backend in registered():
        if backend.targets:
            monkeypatch.setattr(
                type(backend),
                "rejection",
                lambda self, problem, device, pass_: "no code" if device.is_present else None,
            )
    reason = select.missing_kernels_of(registered(), PROBLEM, here, "forward")
    assert reason is not None and reason.startswith("no code. ")


def test_older_jax_is_said_to_be_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("natten_jax.backends.pallas.blackwell.missing_in_jax", lambda: "it is old")
    here = Device("cuda", (10, 0))
    assert find("blackwell-fna", "fna").rejection(PROBLEM, here, "forward") == "it is old"
    assert find("blackwell-fna", "fna").rejection(PROBLEM, B200, "forward") is None
