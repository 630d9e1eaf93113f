"""The command ``python -m natten_jax.doctor --check``, which checks the results of a backend."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax.arrays.operands import Differentiable, Operands
from natten_jax.backends import select
from natten_jax.backends.base import Platform
from natten_jax.backends.flex.backend import FlexBackend
from natten_jax.doctor import backend_check
from natten_jax.performance import PASSES
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan
from natten_jax.problem import problem_of
from tests.support import oracle
from tests.support.machine import Machine
from tests.support.plans import kernels_by_tiles
from tests.support.programs import run_command

PROBLEMS = {problem.describe(): problem for problem in (*backend_check._NEIGHBORHOOD, *backend_check._ATTENTION)}


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check only a few small problems."""
    small = problem_of((21,), 5, heads=2, head_dim=16)
    for name, problems in (
        ("_NEIGHBORHOOD", (small, problem_of((8, 9), 3, dilation=2, head_dim=8, additional_kv=3))),
        ("_ATTENTION", (problem_of((20,), operator="fmha", kv_layout=(31,), head_dim=8),)),
        ("_TIMED_NEIGHBORHOOD", (small,)),
        ("_TIMED_ATTENTION", (problem_of((20,), operator="fmha", head_dim=8),)),
    ):
        monkeypatch.setattr(backend_check, name, problems)
    monkeypatch.setattr(backend_check, "_TIMED_SECONDS", 0.0)


@pytest.fixture
def _untimed(_short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip timing, which would compile two additional programs."""
    monkeypatch.setattr(backend_check, "_TIMED_NEIGHBORHOOD", ())


def checked(name: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    status = backend_check.check(backend_check.id_of(name))
    return status, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_reference_is_right(name: str) -> None:
    problem = PROBLEMS[name]
    arrays = backend_check.arrays_of(problem)
    operands = oracle.Tensors(
        **{name: array.astype(np.float64) for name, array in backend_check.operands_of(arrays).items()}
    )
    if problem.operator == "fmha":
        (axis,) = problem.axes
        mask = oracle.attention_mask(axis.query_extent, axis.kv_extent, axis.is_causal)
    else:
        windows = problem.kernel_size, problem.stride, problem.dilation, problem.is_causal
        mask = oracle.neighborhood_mask(problem.query_layout, *windows)
    cotangents = arrays["out_cotangent"], arrays["logsumexp_cotangent"]
    expected = oracle.reference(operands, mask, problem.scale, *cotangents)
    found = backend_check.reference(problem, arrays)
    wanted = {"out": expected.forward.out, "lse": expected.forward.lse}
    wanted |= {f"d_{name}": getattr(expected.gradients, name) for name in backend_check.operands_of(arrays)}
    assert found.keys() == wanted.keys()
    for each, array in wanted.items():
        np.testing.assert_allclose(found[each], array, rtol=1e-11, atol=1e-12, err_msg=each)


def test_a_problem_of_gpus_has_rings_in_all_kernels() -> None:
    (problem,) = backend_check._NEIGHBORHOOD_OF_GPUS
    assert problem in backend_check.problems("fna", ("bfloat16",), is_gpu=True)
    assert problem not in backend_check.problems("fna", ("bfloat16",))
    problem = dataclasses.replace(problem, dtype="bfloat16")
    launches: list[str] = []
    for pass_ in PASSES:
        launches += next(kernels_by_tiles(problem, pass_))[1]
    assert len(launches) == 3 and all("with a ring" in kernel for kernel in launches), launches


def test_batch_entries_are_compared() -> None:
    problem = problem_of((5, 6), 3, batch=5, heads=2, head_dim=8)
    errors = backend_check.relative_errors(problem, "cpu-fna", with_gradients=True)
    assert errors.keys() == {"out", "lse", "d_query", "d_key", "d_value"}
    assert max(errors.values()) < backend_check.BOUNDS[problem.dtype]


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("name", ["cpu-fna", "cpu-fmha", "flex-fna"])
def test_a_right_backend(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = checked(name, capsys)
    results = [line for line in lines if "d_query" in line]
    assert status == 0 and len(results) >= 1
    assert all(": right: out " in line for line in results)
    other = "cpu-fna" if name == "flex-fna" else name.replace("cpu", "flex")
    (times,) = (line for line in lines if "with gradients" in line)
    assert re.search(rf"forward [0-9.e+-]+ \({other} [0-9.e+-]+, [0-9.]+ times as fast\)", times)
    (count,) = (line for line in lines if line.endswith("problems are correct"))
    assert count.split()[0] == count.split()[2] == str(len(results))
    runs = "cpu-fna" if name == "flex-fna" else name
    assert lines[-1] == (
        f"{name} runs here by default."
        if name == runs
        else f'backend="{name}" runs it; calls without a name run {runs}.'
    )


class ByName(FlexBackend):
    """A correct backend that runs only if a call names it."""

    family = "mine"
    capabilities = dataclasses.replace(FlexBackend.capabilities, is_by_name_only=True, is_slow_fallback=False)


class Short(ByName):
    """A backend that supports 8-bit arrays in the forward pass, but not in the backward pass."""

    capabilities = dataclasses.replace(ByName.capabilities, float8_dtypes=("float8_e4m3fn",))


@pytest.mark.usefixtures("_untimed")
def test_arrays_of_8_bits_are_compared_forward(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.knows(Short())
    status, lines = checked("mine-fna", capsys)
    (line,) = (line for line in lines if "float8_e4m3fn" in line)
    assert status == 0
    assert ": right: out " in line and "gradients are skipped: " in line and "d_query" not in line


class Blind(ByName):
    """A wrong backend: its windows are one key too short in each dimension."""

    def forward_differentiable(self, plan: Plan, operands: Operands) -> Differentiable:
        if plan.problem.operator == "fna":
            fewer = [axis.kernel_size - 1 for axis in plan.problem.axes]
            plan = dataclasses.replace(plan, problem=plan.problem.with_axes(kernel_size=fewer))
        return super().forward_differentiable(plan, operands)


class Unfinished(ByName):
    """A wrong backend: the last output element of each head remains NaN, as if it had not been written."""

    def forward_differentiable(self, plan: Plan, operands: Operands) -> Differentiable:
        result = super().forward_differentiable(plan, operands)
        return result._replace(out=result.out.at[..., -1].set(jnp.nan))


class Broken(ByName):
    """A backend that does not compile."""

    def forward_differentiable(self, plan: Plan, operands: Operands) -> Differentiable:
        raise NotImplementedError("no such\ninstruction")


@pytest.mark.usefixtures("_untimed")
def test_an_opt_in_backend_prints_how_to_enable_it_by_default(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.knows(ByName())
    status, lines = checked("mine-fna", capsys)
    assert status == 0
    assert f"{select.VARIABLE}=mine in the environment makes it the default" in lines[-2]
    assert "report the output above" in lines[-1]


@pytest.mark.usefixtures("_untimed")
@pytest.mark.parametrize(
    ("backend", "what"),
    [
        (Blind(), ": WRONG: out [0-9.]+e-0[12]"),
        (Unfinished(), ": WRONG: out inf"),
        (Broken(), ": FAILED: NotImplementedError: no such instruction"),
    ],
)
def test_a_wrong_one(backend: Any, what: str, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.knows(backend)
    status, lines = checked("mine-fna", capsys)
    assert status == 1
    assert sum(re.search(what, line) is not None for line in lines) >= 2
    assert lines[-2].startswith("0 of ")
    assert lines[-1] == "Do not use mine-fna on this device. Please report the output above."


class Elsewhere(ByName):
    """A backend for TPUs that does not support all test problems."""

    capabilities = dataclasses.replace(ByName.capabilities, platform=Platform("tpu"), largest_head_dim=8)


def test_unsupported_problems_are_skipped(machine: Machine) -> None:
    machine.knows(Elsewhere())
    id_ = backend_check.id_of("mine-fna")
    session = backend_check._Session(id_, Elsewhere(), Device("tpu"))
    assert "head_dim must be at most 8" in str(session.cannot_run())


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("tpu-fna", 1, "tpu-fna cannot be checked here: it runs on platform tpu only, not on cpu"),
        ("hopper-fmha", 1, "it runs on NVIDIA GPUs of compute capability 9.0 only, not on cpu"),
        ("cpu-fnaa", 2, "hoose None or one of"),
        ("cudnn-fmha", 2, "hoose None or one of"),
    ],
)
def test_other_devices_and_unknown_names_are_refused(name: str, status: int, message: str) -> None:
    done = run_command(["-m", "natten_jax.doctor", "--check", name], os.environ)
    assert done.returncode == status and done.stdout == ""
    assert name in done.stderr and message in done.stderr
    assert status == 2 or len(done.stderr.splitlines()) == 1
