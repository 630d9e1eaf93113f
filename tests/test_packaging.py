"""The wheel that users install: built from scratch, installed alone, and used away from the sources."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).parents[1]
CALIBRATIONS = {str(path.relative_to(ROOT)) for path in (ROOT / "natten_jax").rglob("*.json")}

PROGRAM = """
import pathlib, sys
import jax.numpy as jnp
import natten_jax
from natten_jax import native
assert pathlib.Path(natten_jax.__file__).is_relative_to(sys.prefix), natten_jax.__file__
assert native.load_error is None, native.load_error
x = jnp.ones((1, 6, 7, 2, 8))
for backend in ("cpu-fna", "flex-fna", None):
    window = {"kernel_size": (3, 5), "stride": (1, 2), "is_causal": (True, False)}
    out, lse = natten_jax.na2d(x, x, x, **window, backend=backend, return_lse=True)
    assert jnp.allclose(out, 1.0, atol=1e-6) and bool(jnp.isfinite(lse).all())
import natten_jax.profiler
print(natten_jax.__version__)
"""


def of_the_wheel(test: Any) -> Any:
    """Marks a test as slow, and as one of those that one process runs: another would build a wheel of its own."""
    return pytest.mark.slow(pytest.mark.xdist_group("wheel")(test))


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that must succeed, without this checkout or this environment in its way."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    environment["JAX_PLATFORMS"] = "cpu"
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def copy_of_sources(folder: Path) -> Path:
    """The sources without what an earlier build left beside them, which must not get into a wheel."""
    leftovers = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__")
    return shutil.copytree(ROOT, folder / "sources", ignore=leftovers)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built in an isolated environment."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = copy_of_sources(folder)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, sources, cwd=folder)
    (built,) = folder.glob("natten_jax-*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment in which only the wheel and what it needs is installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    interpreter = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    # For JAX and what it needs 5 s of processor time, where a pip of its own that compiles every module takes 28.
    pip = sys.executable, "-m", "pip", "--python", interpreter
    run(*pip, "install", "--quiet", "--no-compile", wheel, cwd=folder)
    return interpreter


@of_the_wheel
def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"natten_jax"}
    libraries = [name for name in names if name.endswith(".so")]
    assert any(name.startswith("natten_jax/_native.") for name in libraries)
    assert "natten_jax/libnatten_jax.so" in libraries
    assert "natten_jax/py.typed" in names
    assert "natten_jax/flax_modules/__init__.py" in names
    assert CALIBRATIONS and {name for name in names if name.endswith(".json")} == CALIBRATIONS
    assert not [name for name in names if "test" in name or name.endswith((".cpp", ".cu", ".h"))]


def test_every_folder_of_data_is_a_package_to_the_build(tmp_path: Path) -> None:
    """Or else the build warns that it would be ignored, as some day it will be."""
    sources = copy_of_sources(tmp_path)
    built = tmp_path / "built"
    command = [sys.executable, "setup.py", "build_py", "--build-lib", str(built)]
    environment = {**os.environ, "NATTEN_JAX_CUDA": "0"}
    finished = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True, check=True)
    assert "`packages`" not in finished.stderr, finished.stderr
    assert CALIBRATIONS and {str(path.relative_to(built)) for path in built.rglob("*.json")} == CALIBRATIONS


@of_the_wheel
def test_installed_wheel_runs_every_host_backend(python: Path, tmp_path: Path) -> None:
    assert run(python, "-c", PROGRAM, cwd=tmp_path).strip()


@of_the_wheel
def test_installed_doctor_reports_the_backends(python: Path, tmp_path: Path) -> None:
    report = run(python, "-m", "natten_jax.doctor", cwd=tmp_path)
    for name in ("cpu-fna", "cpu-fmha", "flex-fna", "flex-fmha"):
        assert name in report
    assert "not available" not in report


@of_the_wheel
def test_installed_profiler_shows_its_help(python: Path, tmp_path: Path) -> None:
    assert "usage" in run(python, "-m", "natten_jax.profiler", "--help", cwd=tmp_path).lower()


# What a build looks up and asks for.


@pytest.fixture
def build_script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names in setup.py, which builds nothing here."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setenv("NATTEN_JAX_CUDA", "0")
    return runpy.run_path(str(ROOT / "setup.py"))


def put_program(path: Path) -> Path:
    """An executable file that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("entry", ["", ".", "sub/../"])
def test_no_program_is_taken_from_the_current_directory_by_an_entry_of_the_path(
    entry: str, build_script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvcc", "nvidia-smi", "ccache", "cmake", "ninja"):
        put_program(tmp_path / "here" / name)
    (tmp_path / "here" / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", os.pathsep.join([entry, str(tmp_path / "empty"), entry]))
    assert build_script["find_installed_nvcc"]() is None
    assert [build_script["find_program"](name) for name in ("nvcc", "nvidia-smi", "ccache", "cmake", "ninja")] == (
        [None] * 5
    )
    assert build_script["launcher_options"]() == []
    named = put_program(tmp_path / "toolkit" / "nvcc")
    monkeypatch.setenv("PATH", os.pathsep.join([entry, str(named.parent)]))
    assert build_script["find_installed_nvcc"]() == named


@pytest.mark.parametrize("spelling", ["", ".", "absolute"])
def test_no_packaged_compiler_is_taken_from_the_current_directory(
    spelling: str, build_script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, packages = tmp_path / "here", tmp_path / "site-packages"
    for folder in (here, packages):
        put_program(folder / "nvidia" / "cu13" / "bin" / "nvcc")
    monkeypatch.chdir(here)
    entry = str(here) if spelling == "absolute" else spelling
    monkeypatch.setattr(sys, "path", [entry])
    assert build_script["find_packaged_nvcc"]() is None
    monkeypatch.setattr(sys, "path", [entry, str(packages)])
    assert build_script["find_packaged_nvcc"]() == packages / "nvidia" / "cu13" / "bin" / "nvcc"


def test_every_build_requirement_has_an_upper_bound(build_script: dict[str, Any]) -> None:
    static = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    requirements = [*static, *build_script["CUDA_TOOLKIT_REQUIREMENTS"], build_script["CUTLASS_REQUIREMENT"]]
    assert len(requirements) > 8
    for requirement in requirements:
        specifiers = re.findall(r"(==|<=|<|~=|>=|>|!=)\s*([\w.*]+)", requirement)
        assert any(operator in ("==", "<", "<=", "~=") for operator, _ in specifiers), requirement
