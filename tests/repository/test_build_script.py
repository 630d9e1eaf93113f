"""Test ``setup.py`` without building: detected tools, requirements, and options of the build."""

from __future__ import annotations

import os
import platform
import re
import runpy
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
import setuptools

from natten_jax import __version__
from tests.repository.test_packaging import copy_of_sources

ROOT = Path(__file__).parents[2]

#: GPU architectures that simulated CUDA toolkits support, by CUDA version.
ARCHITECTURES = {12: (80, 86, 90), 13: (80, 86, 90, 100, 120)}

#: Environment variables that affect builds and whose names do not begin with NATTEN_JAX_.
OTHER_VARIABLES = {"CUDA_HOME", "_PYTHON_HOST_PLATFORM", "SETUPTOOLS_EXT_SUFFIX"}


def put_program(path: Path, script: str = "exit 1") -> Path:
    """Write an executable shell script. By default, it exits with status 1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


class Build:
    """Functions and constants of setup.py, as the dictionary ``names`` and as attributes.

    setup.py is run without building. ``PATH`` names a folder without programs, until a test adds programs.

    Attributes:
        names: Functions and constants of setup.py, by name.
        patch: Changes the environment until the end of the test.
        folder: Temporary folder for files.
        nvccs: Simulated nvcc programs, by CUDA version. Their folders are not in ``PATH``.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self.folder = patch, folder
        for variable in {name for name in os.environ if name.startswith("NATTEN_JAX_")} | OTHER_VARIABLES:
            patch.delenv(variable, raising=False)
        patch.setenv("NATTEN_JAX_CUDA", "0")
        self.names, _ = self.run()
        patch.setenv("PATH", str(folder / "empty"))
        self.nvccs = {}
        for cuda, architectures in ARCHITECTURES.items():
            codes = "; ".join(f"echo sm_{number}" for number in architectures)
            answers = f"case $1 in --version) echo 'tools, release {cuda}.4, V{cuda}.4.131';; *) {codes};; esac"
            self.nvccs[cuda] = put_program(folder / f"cuda-{cuda}" / "bin" / "nvcc", answers)

    def __getattr__(self, name: str) -> Any:
        return self.names[name]

    def run(self) -> tuple[dict[str, Any], list[str]]:
        """Run setup.py. Return its functions and constants, and the names of the extensions that it would build."""
        given: dict[str, Any] = {}
        self.patch.setattr(setuptools, "setup", given.update)
        names = runpy.run_path(str(ROOT / "setup.py"))
        return names, [extension.name for extension in given["ext_modules"]]

    def put_on_path(self, *programs: Path) -> None:
        self.patch.setenv("PATH", os.pathsep.join(str(program.parent) for program in programs))


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Build:
    return Build(monkeypatch, tmp_path)


@pytest.mark.parametrize("entry", ["", ".", "sub/../"])
def test_relative_path_entries_find_no_program_in_the_current_directory(build: Build, entry: str) -> None:
    for name in ("nvcc", "nvidia-smi", "ccache", "cmake", "ninja"):
        put_program(build.folder / "here" / name)
    (build.folder / "here" / "sub").mkdir()
    build.patch.chdir(build.folder / "here")
    build.patch.delenv("CUDA_HOME", raising=False)
    build.patch.setenv("PATH", os.pathsep.join([entry, str(build.folder / "empty"), entry]))
    assert build.find_installed_nvcc() is None
    assert [build.find_program(name) for name in ("nvcc", "nvidia-smi", "ccache", "cmake", "ninja")] == ([None] * 5)
    assert build.launcher_options() == []
    named = put_program(build.folder / "toolkit" / "nvcc")
    build.patch.setenv("PATH", os.pathsep.join([entry, str(named.parent)]))
    assert build.find_installed_nvcc() == named


@pytest.mark.parametrize("spelling", ["", ".", "absolute"])
def test_no_packaged_compiler_is_found_in_the_current_directory(build: Build, spelling: str) -> None:
    here, packages = build.folder / "here", build.folder / "site-packages"
    for folder in (here, packages):
        put_program(folder / "nvidia" / "cu13" / "bin" / "nvcc")
    build.patch.chdir(here)
    entry = str(here) if spelling == "absolute" else spelling
    build.patch.setattr(sys, "path", [entry])
    assert build.find_packaged_nvcc() is None
    build.patch.setattr(sys, "path", [entry, str(packages)])
    assert build.find_packaged_nvcc() == packages / "nvidia" / "cu13" / "bin" / "nvcc"


def test_every_build_requirement_has_an_upper_bound(build: Build) -> None:
    static = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    requirements = [*static, *build.CUDA_TOOLKIT_REQUIREMENTS, build.CUTLASS_REQUIREMENT]
    assert len(requirements) > 8
    for requirement in requirements:
        specifiers = re.findall(r"(==|<=|<|~=|>=|>|!=)\s*([\w.*]+)", requirement)
        assert any(operator in ("==", "<", "<=", "~=") for operator, _ in specifiers), requirement


@pytest.mark.parametrize("first", [12, 13])
def test_the_toolkit_of_the_requested_version_is_found(build: Build, first: int) -> None:
    second = 25 - first
    build.put_on_path(build.nvccs[first], build.nvccs[second])
    for choice, expected in (("1", first), ("12", 12), ("13", 13)):
        build.patch.setenv("NATTEN_JAX_CUDA", choice)
        assert build.find_installed_nvcc() == build.nvccs[expected]
        assert build.setup_requirements() == [build.CUTLASS_REQUIREMENT]
    build.patch.setenv("CUDA_HOME", str(build.nvccs[second].parents[1]))
    for choice, expected in (("1", second), ("12", 12), ("13", 13)):
        build.patch.setenv("NATTEN_JAX_CUDA", choice)
        assert build.find_installed_nvcc() == build.nvccs[expected]


def test_cuda_13_comes_from_packages_if_only_another_toolkit_is_installed(build: Build) -> None:
    build.put_on_path(build.nvccs[12])
    build.patch.setenv("NATTEN_JAX_CUDA", "13")
    assert set(build.CUDA_TOOLKIT_REQUIREMENTS) < set(build.setup_requirements())


def test_cuda_12_without_a_toolkit_is_refused_with_what_was_found(build: Build) -> None:
    build.patch.setenv("NATTEN_JAX_CUDA", "12")
    with pytest.raises(SystemExit, match="needs nvcc of CUDA 12 in CUDA_HOME or on the path; found: none"):
        build.setup_requirements()
    build.put_on_path(build.nvccs[13])
    put_program(build.folder / "nvidia" / "cu13" / "bin" / "nvcc")
    build.patch.setattr(sys, "path", [str(build.folder)])
    for step in ("setup_requirements", "cuda_options"):
        with pytest.raises(SystemExit, match=rf"found: {build.nvccs[13]} \(CUDA 13\)"):
            getattr(build, step)()


@pytest.mark.parametrize(("cuda", "is_release"), [(12, False), (12, True), (13, False), (13, True)])
def test_default_architectures_are_limited_to_nvcc(
    build: Build, cuda: int, is_release: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    build.patch.setenv("NATTEN_JAX_RELEASE", str(int(is_release)))
    wanted = getattr(build, f"{'RELEASE' if is_release else 'DEFAULT'}_CUDA_ARCHITECTURES").split(";")
    chosen = build.cuda_architectures(build.nvccs[cuda]).split(";")
    assert chosen == [name for name in wanted if int(name.rstrip("af")) in ARCHITECTURES[cuda]]
    left_out = ", ".join(name for name in wanted if name not in chosen)
    assert bool(left_out) == (is_release and cuda == 12)
    message = capsys.readouterr().err
    assert ("WARNING" in message and f"architectures {left_out}:" in message) if left_out else not message


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("80;120", r"cannot compile for the CUDA architectures 120; it can compile for 80, 86, 90\."),
        ("80,90a", "must be architectures as in '80;90a', got '80,90a'"),
        ("80;", "must be architectures"),
        ("sm_80", "must be architectures"),
    ],
)
def test_requested_architectures_are_not_skipped(build: Build, chosen: str, message: str) -> None:
    build.patch.setenv("NATTEN_JAX_CUDA_ARCHS", "80;90a")
    assert build.cuda_architectures(build.nvccs[12]) == "80;90a"
    build.patch.setenv("NATTEN_JAX_CUDA_ARCHS", chosen)
    with pytest.raises(SystemExit, match=message):
        build.cuda_architectures(build.nvccs[12])


@pytest.mark.parametrize(
    ("variable", "reader"),
    [
        ("NATTEN_JAX_CUDA", "wants_cuda"),
        ("NATTEN_JAX_RELEASE", "is_release"),
        ("NATTEN_JAX_CUDA_SAMPLE", "is_sample"),
        ("NATTEN_JAX_NATIVE", "wants_native"),
        ("NATTEN_JAX_MACHINE", "other_machine"),
    ],
)
def test_wrong_choices_are_refused(build: Build, variable: str, reader: str) -> None:
    build.patch.setenv(variable, "yes")
    with pytest.raises(SystemExit, match=f"{variable} must be .* got 'yes'"):
        getattr(build, reader)()


@pytest.mark.parametrize("system", ["linux", "darwin"])
@pytest.mark.parametrize("choice", [None, "1", "0"])
def test_the_library_is_built_on_linux_and_elsewhere_on_request(build: Build, system: str, choice: str | None) -> None:
    is_wanted = choice == "1" or (choice is None and system == "linux")
    if choice is not None:
        build.patch.setenv("NATTEN_JAX_NATIVE", choice)
    build.patch.setattr(sys, "platform", system)
    assert build.wants_native() == is_wanted
    assert build.run()[1] == ["natten_jax._native"] * is_wanted


@pytest.fixture
def visible_gpu(build: Build) -> None:
    """Simulate a machine with an NVIDIA GPU, and unset the option that selects CUDA."""
    build.put_on_path(put_program(build.folder / "driver" / "nvidia-smi", "exit 0"))
    build.patch.delenv("NATTEN_JAX_CUDA")


@pytest.mark.parametrize(
    ("capabilities", "are_built"),
    [
        ("7.5", False),  # T4
        ("8.0", True),
        ("7.5\n9.0", True),
        ("[N/A]", True),
        ("", True),
    ],
)
def test_gpu_kernels_are_built_if_a_visible_gpu_is_supported(build: Build, capabilities: str, are_built: bool) -> None:
    answers = f'case "$1" in --query-gpu=compute_cap) echo "{capabilities}" ;; -L) echo "GPU 0" ;; esac'
    build.put_on_path(put_program(build.folder / "driver" / "nvidia-smi", answers))
    build.patch.delenv("NATTEN_JAX_CUDA")
    assert build.wants_cuda() == are_built
    build.patch.setenv("NATTEN_JAX_CUDA", "1")
    assert build.wants_cuda()


@pytest.mark.parametrize(("variable", "choice"), [("NATTEN_JAX_NATIVE", "0"), ("NATTEN_JAX_MACHINE", "aarch64")])
def test_builds_that_have_no_kernels_for_gpus(build: Build, variable: str, choice: str, visible_gpu: None) -> None:
    build.patch.setattr(platform, "machine", lambda: "x86_64")
    assert build.wants_cuda()
    build.patch.setenv(variable, choice)
    assert not build.wants_cuda()
    assert build.setup_requirements() == []
    for cuda in ("1", "12", "13"):
        build.patch.setenv("NATTEN_JAX_CUDA", cuda)
        with pytest.raises(SystemExit, match=f"(NATTEN_JAX_CUDA={cuda} needs the native library|got '{cuda}')"):
            build.setup_requirements()


def test_a_build_for_this_machine_is_no_other_build(build: Build, visible_gpu: None) -> None:
    build.patch.setattr(platform, "machine", lambda: "aarch64")
    build.patch.setenv("NATTEN_JAX_MACHINE", "aarch64")
    assert build.other_machine() is None
    assert build.cross_options() == []
    assert build.wants_cuda()


def test_another_machine_has_its_compiler_and_names_of_its_own(build: Build) -> None:
    build.patch.setattr(platform, "machine", lambda: "x86_64")
    build.patch.setattr(sysconfig, "get_config_var", {"EXT_SUFFIX": ".cpython-311-x86_64-linux-gnu.so"}.get)
    build.patch.setenv("NATTEN_JAX_MACHINE", "aarch64")
    build.patch.setenv("PATH", str(build.folder))
    with pytest.raises(SystemExit, match=r"NATTEN_JAX_MACHINE=aarch64 needs aarch64-linux-gnu-g\+\+, which is not"):
        build.cross_options()
    compiler = put_program(build.folder / "aarch64-linux-gnu-g++")
    options = dict(option.removeprefix("-D").split("=", 1) for option in build.cross_options())
    assert options["CMAKE_SYSTEM_PROCESSOR"] == "aarch64" and options["CMAKE_CXX_COMPILER"] == str(compiler)
    assert options["PYTHON_MODULE_EXTENSION"] == ".cpython-311-aarch64-linux-gnu.so"
    assert (Path(options["Python_INCLUDE_DIR"]) / "Python.h").is_file()
    # Only a run of setuptools sets these variables, and only if it builds for another machine.
    assert not {"_PYTHON_HOST_PLATFORM", "SETUPTOOLS_EXT_SUFFIX"} & set(os.environ)
    assert build.run()[1] == ["natten_jax._native"]
    assert os.environ.pop("_PYTHON_HOST_PLATFORM") == "linux-aarch64"
    assert os.environ.pop("SETUPTOOLS_EXT_SUFFIX") == ".cpython-311-aarch64-linux-gnu.so"
    build.patch.delenv("NATTEN_JAX_MACHINE")
    build.build_for_other_machine()
    assert not {"_PYTHON_HOST_PLATFORM", "SETUPTOOLS_EXT_SUFFIX"} & set(os.environ)


def test_the_version_of_a_wheel_names_its_cuda_and_marks_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = copy_of_sources(tmp_path)
    # Wheels are built from source distributions, which contain this file.
    (sources / "setup.cfg").write_text("[egg_info]\ntag_build = \ntag_date = 0\n")
    build_settings = runpy.run_path(str(ROOT / "release" / "wheels.py"))["build_settings"]
    settings = tmp_path / "settings.cfg"
    for kind, is_sample, suffix in (
        *(("python", 0, ""), ("cpu", 1, ""), ("aarch64", 0, "")),
        *(("cuda12", 0, "+cu12"), ("cuda13", 0, "+cu13"), ("cuda13", 1, "+cu13.sample")),
    ):
        monkeypatch.setenv("NATTEN_JAX_CUDA_SAMPLE", str(is_sample))
        settings.write_text(build_settings(kind, tmp_path / "build"))
        environment = {**os.environ, "DIST_EXTRA_CONFIG": str(settings), "NATTEN_JAX_CUDA": "0"}
        command = [sys.executable, "setup.py", "egg_info"]
        subprocess.run(command, cwd=sources, env=environment, capture_output=True, check=True)
        metadata = (sources / "natten_jax.egg-info" / "PKG-INFO").read_text()
        assert f"\nVersion: {__version__}{suffix}\n" in metadata, (kind, is_sample)


def test_every_package_is_distributed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "natten_jax").rglob("*.py")}
    elsewhere = {"natten_jax.autotuning.measured", "natten_jax.cost_model.calibrations", "natten_jax.flax_modules"}
    assert sorted(listed) == sorted({".".join(folder.parts) for folder in folders} | elsewhere)
