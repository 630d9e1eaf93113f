"""Build wheels from the source distribution, and run an installed wheel outside the sources."""

from __future__ import annotations

import email
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from natten_jax import __version__
from tests.support.programs import output_of

ROOT = Path(__file__).parents[2]
CALIBRATIONS = {str(path.relative_to(ROOT)) for path in (ROOT / "natten_jax").rglob("*.json")}

PROGRAM = """
import pathlib, sys
import jax.numpy as jnp
import natten_jax
from natten_jax.native import module as native
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


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that must succeed, without this process's Python paths and virtual environment."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    environment["JAX_PLATFORMS"] = "cpu"
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    return output_of(result)


def require_package_index() -> None:
    """Skip the test if pip finds no version of the build requirement auditwheel."""
    options = "--dry-run", "--ignore-installed", "--no-deps", "--retries", "0", "--timeout", "10"
    command = [sys.executable, "-m", "pip", "install", *options, "auditwheel"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode:
        pytest.skip(f"pip finds no auditwheel in a package index: {' '.join(asked.stderr.split())[-300:]}")


def copy_of_sources(folder: Path) -> Path:
    """Copy the sources without the products of earlier builds, because a wheel must not contain them."""
    leftovers = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__")
    return shutil.copytree(ROOT, folder / "sources", ignore=leftovers)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that contains the source distribution and the wheels built from it for this interpreter.

    If the environment variable NATTEN_JAX_DISTRIBUTIONS names a folder, return that folder instead. It must contain
    distributions, and may contain wheels for several interpreters.
    """
    built = os.environ.get("NATTEN_JAX_DISTRIBUTIONS")
    if built:
        return Path(built)
    require_package_index()
    folder = tmp_path_factory.mktemp("distributions")
    program = copy_of_sources(folder) / "release" / "wheels.py"
    run(sys.executable, program, "--pythons", sys.executable, "--kinds", "cpu", "python", "--out", folder, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    """Return the wheel with compiled kernels, for this interpreter and this machine."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    (built,) = distributions.glob(f"natten_jax-{__version__}-{tag}-*linux*_{platform.machine()}.whl")
    return built


@pytest.fixture(scope="module")
def python_alone(distributions: Path) -> Path:
    """Return the wheel without kernels."""
    (built,) = distributions.glob("natten_jax-*-any.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment that contains only the wheel and its requirements."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    interpreter = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    # With this process's pip and `--no-compile`, installing JAX and its requirements takes 5 s of CPU time. The new
    # environment's pip would compile every module, and take 28 s.
    pip = sys.executable, "-m", "pip", "--python", interpreter
    run(*pip, "install", "--quiet", "--no-compile", wheel, cwd=folder)
    return interpreter


@pytest.mark.slow
def test_wheel_holds_only_the_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"natten_jax"}
    libraries = [name for name in names if name.endswith(".so")]
    assert any(name.startswith("natten_jax/_native.") for name in libraries)
    assert "natten_jax/libnatten_jax.so" in libraries
    assert "natten_jax/py.typed" in names
    assert "natten_jax/flax_modules/__init__.py" in names
    assert CALIBRATIONS and {name for name in names if name.endswith(".json")} == CALIBRATIONS
    assert not [name for name in names if "test" in name or name.endswith((".cpp", ".cu", ".h"))]


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the package's files in a wheel by name, except native libraries."""
    archive = zipfile.ZipFile(wheel)
    names = (name for name in archive.namelist() if name.startswith("natten_jax/") and not name.endswith((".so", "/")))
    return {name: archive.read(name) for name in names}


@pytest.mark.slow
def test_the_python_only_wheel_is_portable_and_lacks_only_the_library(wheel: Path, python_alone: Path) -> None:
    assert python_alone.name == f"natten_jax-{__version__}-py3-none-any.whl"
    archive = zipfile.ZipFile(python_alone)
    assert contents(python_alone) == contents(wheel)
    assert not [name for name in archive.namelist() if name.endswith(".so")]
    (tags,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
    assert "Root-Is-Purelib: true" in archive.read(tags).decode()


@pytest.mark.slow
def test_source_distribution_holds_sources_and_no_build_products(distributions: Path) -> None:
    (archive,) = distributions.glob("*.tar.gz")
    assert archive.name == f"natten_jax-{__version__}.tar.gz"
    with tarfile.open(archive) as members:
        names = {name.partition("/")[2] for name in members.getnames()}
    assert {"setup.py", "pyproject.toml", "csrc/CMakeLists.txt", "flax_modules/__init__.py"} < names
    native = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert native <= names and names >= CALIBRATIONS
    assert not [name for name in names if name.startswith("tests/") or name.endswith((".so", ".o", ".pyc"))]


@pytest.mark.slow
def test_tag_is_of_a_c_library_that_has_every_symbol(wheel: Path, tmp_path: Path) -> None:
    tag = re.search(r"manylinux_2_(\d+)_\w+\.whl$", wheel.name)
    assert tag is not None, wheel.name
    zipfile.ZipFile(wheel).extractall(tmp_path)
    versions = set()
    for library in tmp_path.rglob("*.so"):
        needed = subprocess.run(["readelf", "--version-info", library], capture_output=True, text=True, check=True)
        versions |= {int(version) for version in re.findall(r"Name: GLIBC_2\.(\d+)", needed.stdout)}
        sections = subprocess.run(["readelf", "--sections", library], capture_output=True, text=True, check=True)
        assert ".dynsym" in sections.stdout and ".symtab" not in sections.stdout, f"{library.name} is not stripped"
    assert max(versions) == int(tag[1])


@pytest.mark.slow
def test_wheel_metadata_lists_requirements_and_omits_undecided_fields(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    fields = email.message_from_bytes(archive.read(name))
    assert fields["Name"] == "natten_jax" and fields["Version"] == __version__
    assert fields["Requires-Python"] == ">=3.11" and fields["Summary"] and fields.get_payload()
    assert {"cuda12", "cuda13", "flax", "plot", "profiler"} <= set(fields.get_all("Provides-Extra", []))
    for cuda in ("cuda12", "cuda13"):
        assert f'jax[{cuda}]>=0.10; extra == "{cuda}"' in fields.get_all("Requires-Dist", [])
    assert not {"License", "License-Expression", "Home-page", "Project-URL"} & set(fields.keys())


@pytest.mark.slow
def test_installed_wheel_works_without_a_compiler(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "No broken requirements" in run(sys.executable, "-m", "pip", "--python", python, "check", cwd=tmp_path)
    monkeypatch.setenv("PATH", str(python.parent))
    assert run(python, "-c", PROGRAM, cwd=tmp_path).strip() == __version__
    assert "usage" in run(python, "-m", "natten_jax.profiler", "--help", cwd=tmp_path).lower()
    report = run(python, "-m", "natten_jax.doctor", cwd=tmp_path)
    assert all(name in report for name in ("cpu-fna", "cpu-fmha", "flex-fna", "flex-fmha"))
    assert "not available" not in report


@pytest.mark.slow
def test_installed_library_serves_the_clone_that_it_was_built_from(python: Path, tmp_path: Path) -> None:
    clone = copy_of_sources(tmp_path)
    report = run(python, "-m", "natten_jax.doctor", cwd=clone)
    assert "of the installed natten_jax, built from the same csrc" in report
    assert "Missing kernels" not in report and "not available" not in report
