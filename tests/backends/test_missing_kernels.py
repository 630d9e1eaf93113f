"""The warning about kernels that this build lacks.

It appears once, only if the kernels are missing, and names a remedy.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import natten_jax
from natten_jax import MissingKernelsWarning, backends, source_tree
from natten_jax.backends import select
from natten_jax.backends.select import resolve
from natten_jax.doctor.__main__ import report
from natten_jax.native import module as native
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Request
from natten_jax.problem import problem_of
from tests.support.machine import Machine
from tests.support.programs import run_command

HOPPER = Device("cuda", (9, 0))
AMPERE = Device("cuda", (8, 6))
BROKEN = "the native module natten_jax._native cannot be loaded (ImportError: broken)"
#: Remedy that the warning names if the package is imported from a clone, as in these tests.
REMEDY = f"Run `pip install --editable .` in {Path(__file__).parents[2]}"
BLOCKED = "import sys; sys.modules['natten_jax._native'] = None\n"


@pytest.fixture(autouse=True)
def _nobody_was_warned(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_was_warned", False)


@pytest.fixture
def no_native_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_module", None)
    monkeypatch.setattr(native, "load_error", BROKEN)


@pytest.fixture
def host_only_build(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def registrations() -> dict[str, Any]:
            return {"natten_jax_cpu_forward": None, "natten_jax_cpu_backward": None}

        @staticmethod
        def build_info() -> dict[str, Any]:
            return {"cuda_architectures": []}

        @staticmethod
        def estimate_of_small_windows(*_: Any, **__: Any) -> None:
            return None

    monkeypatch.setattr(native, "_module", Module)
    monkeypatch.setattr(native, "load_error", None)


def choose(device: Device, requested: str | None = None, **problem: Any) -> tuple[str, list[str]]:
    """Choose a backend for a forward pass. Return its family and the messages of warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = resolve(Request(problem_of((64,), 8, **problem), backend=requested), device, "forward")
    assert all(each.category is MissingKernelsWarning for each in caught)
    return plan.backend.family, [str(each.message) for each in caught]


def test_an_operator_warns_once_without_the_native_module(no_native_module: None) -> None:
    x = jnp.ones((1, 64, 1, 8))
    message = rf"cannot be loaded .*broken.*\. {re.escape(REMEDY)}; python"
    with pytest.warns(MissingKernelsWarning, match=message) as found:
        jax.vmap(jax.jit(jax.grad(lambda x: natten_jax.na1d(x, x, x, 8).sum())))(x[None])
    assert [each.filename for each in found] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        natten_jax.na1d(x[:, :32], x[:, :32], x[:, :32], 8)
        natten_jax.attention(x, x, x)


def test_naming_the_portable_backend_does_not_warn(no_native_module: None) -> None:
    x = jnp.ones((1, 64, 1, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(lambda x: natten_jax.na1d(x, x, x, 8, backend="flex-fna").sum())(x)
        natten_jax.attention(x, x, x, backend="flex-fmha")


@pytest.mark.parametrize(
    ("device", "architectures"), [(HOPPER, "80;90a"), (AMPERE, "86"), (Device("cuda", (12, 0)), "120")]
)
@pytest.mark.parametrize(("plugins", "cuda"), [((), 1), ((12,), 12), ((12, 13), 13)])
def test_a_gpu_that_the_build_has_no_kernels_for(
    plugins: tuple[int, ...],
    cuda: int,
    device: Device,
    architectures: str,
    host_only_build: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "plugins", lambda: plugins)
    family, (message,) = choose(device)
    assert family == "flex"
    assert "CUDA architectures: none" in message
    assert (
        f"Run `NATTEN_JAX_CUDA={cuda} NATTEN_JAX_CUDA_ARCHS='{architectures}' pip install --editable .` in" in message
    )
    assert "python -m natten_jax.doctor" in message
    assert choose(device) == ("flex", [])


def test_a_gpu_whose_architecture_the_build_does_not_cover(
    host_only_build: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = native._module
    monkeypatch.setattr(module, "registrations", lambda: dict.fromkeys(backends.export_targets()))
    monkeypatch.setattr(module, "build_info", lambda: {"cuda_architectures": ["90a"]})
    family, (message,) = choose(AMPERE)
    assert family == "flex"
    assert "no code for compute capability 8.6" in message
    assert "NATTEN_JAX_CUDA_ARCHS='86'" in message
    assert choose(HOPPER)[1] == []


@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize(
    ("device", "requested", "problem"),
    [
        (HOPPER, "flex-fna", {}),
        (HOPPER, None, {"dtype": "float64"}),
        (HOPPER, None, {"head_dim": 260}),  # no kernel supports this head dimension
        (Device("cuda", (7, 5)), None, {}),
        (Device("cuda"), None, {}),  # an unknown compute capability
        (Device("cuda", (9, 0), is_present=False), "flex-fna", {}),
        (Device("tpu"), None, {}),
        (Device("cpu"), None, {"dtype": "float64"}),
    ],
)
def test_problems_that_no_build_supports_do_not_warn(
    device: Device, requested: str | None, problem: dict[str, Any], is_broken: bool, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("no_native_module" if is_broken else "host_only_build")
    assert choose(device, requested, **problem) == ("flex", [])


def test_the_host_does_not_need_kernels_for_gpus(host_only_build: None) -> None:
    assert choose(Device("cpu")) == ("cpu", [])


def test_the_doctor_reports_missing_kernels_under_a_heading(no_native_module: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lines = list(report())
    heading = lines.index("Missing kernels")
    assert lines[heading + 1] == f"  cpu: {BROKEN}. {REMEDY}"


@pytest.mark.skipif(native.path() is None, reason="the native module is not built")
def test_the_doctor_has_no_heading_if_no_kernels_are_missing() -> None:
    assert "Missing kernels" not in list(report())


@pytest.mark.parametrize("filters", [[], ["-W", "ignore::UserWarning"]])
def test_a_process_without_the_library_warns_on_use_and_not_on_import(filters: list[str]) -> None:
    code = (
        f"{BLOCKED}import natten_jax, jax.numpy as jnp\nprint('imported', file=sys.stderr)\n"
        "x = jnp.ones((1, 64, 1, 8))\nfor size in (2, 4, 8): natten_jax.na1d(x, x, x, size)"
    )
    finished = run_command([*filters, "-c", code], os.environ, fresh=True)
    before, after = finished.stderr.split("imported\n")
    assert "MissingKernelsWarning" not in before
    assert after.count("MissingKernelsWarning: attention runs on the slow portable backend") == (not filters)


@pytest.fixture
def python_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Simulate an installed package without a native library, and return its folder."""
    monkeypatch.setattr(source_tree, "ROOT", None)
    monkeypatch.setattr(source_tree, "_PACKAGE", tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(native, "_module", None)
    with pytest.raises(ModuleNotFoundError) as raised:
        source_tree.find_library()
    monkeypatch.setattr(native, "load_error", str(raised.value))
    return tmp_path


@pytest.mark.parametrize(
    ("platform", "device", "remedy"),
    [
        ("linux", Device("cpu"), "Install natten_jax from its sources, without NATTEN_JAX_NATIVE=0;"),
        ("linux", AMPERE, "Install natten_jax from its sources, with NATTEN_JAX_CUDA=1 NATTEN_JAX_CUDA_ARCHS='86';"),
        ("darwin", Device("cpu"), "Install natten_jax from its sources, with NATTEN_JAX_NATIVE=1;"),
    ],
)
def test_the_remedy_for_the_python_only_build(
    platform: str, device: Device, remedy: str, python_alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "plugins", lambda: ())
    monkeypatch.setattr(sys, "platform", platform)
    family, (message,) = choose(device)
    assert family == "flex"
    assert f"the natten_jax installed in {python_alone} is the Python-only build" in message and remedy in message


@pytest.mark.parametrize(
    ("platform", "device"), [("win32", Device("cpu")), ("linux", Device("tpu")), ("linux", Device("rocm"))]
)
def test_the_python_only_build_is_complete_on_machines_without_kernels(
    platform: str, device: Device, python_alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert choose(device) == ("flex", [])
