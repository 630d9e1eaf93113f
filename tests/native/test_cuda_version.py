"""Kernels that were compiled with another CUDA than JAX's plugin is for."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any

import pytest

from natten_jax.doctor import __main__ as doctor
from natten_jax.native import module
from natten_jax.native import module as native


def install(monkeypatch: pytest.MonkeyPatch, built: str | None, plugins: Sequence[str]) -> None:
    """Kernels that were compiled with a version of CUDA, and plugins of JAX."""
    entries = metadata.EntryPoints(metadata.EntryPoint(name, "nowhere", "jax_plugins") for name in plugins)
    info: dict[str, Any] = {"cuda_version": built, "cuda_architectures": []}
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: entries.select(group=group))
    monkeypatch.setattr(native, "build_info", lambda: info)


@pytest.mark.parametrize(
    ("built", "plugins"),
    [
        ("13.0.88", ["xla_cuda13"]),
        ("12.9.86", ["xla_cuda12"]),
        ("12.9.86", ["xla_cuda12", "xla_cuda13"]),
        ("13.0.88", []),
        ("13.0.88", ["xla_rocm7", "some_tpu"]),
        (None, ["xla_cuda13"]),
    ],
)
def test_nothing_is_said_where_versions_agree(
    built: str | None, plugins: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, built, plugins)
    assert module.mismatch() is None
    assert not [line for line in doctor._native_lines() if "Another CUDA" in line]


@pytest.mark.parametrize(("built", "plugin"), [("13.0.88", 12), ("12.9.86", 13)])
def test_the_doctor_says_which_versions_differ_and_what_to_do(
    built: str, plugin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, built, ["some_tpu", f"xla_cuda{plugin}"])
    monkeypatch.setattr(native, "load_error", None)
    (line,) = (line for line in doctor._native_lines() if "Another CUDA" in line)
    assert f"compiled with CUDA {built}" in line
    assert f"JAX is for CUDA {plugin}" in line
    assert f"NATTEN_JAX_CUDA={plugin}" in line
    assert ("driver may be too old" in line) == (plugin == 12)
