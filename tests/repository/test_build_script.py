"""What ``setup.py`` looks up, asks for and decides; nothing is built here."""

from __future__ import annotations

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
import setuptools

from natten_jax import __version__

ROOT = Path(__file__).parents[2]

#: What two toolkits can compile for, as they say it.
ARCHITECTURES = {12: (80, 86, 90), 13: (80, 86, 90, 100, 120)}

#: What the fixture of that name leaves unset.
UNSET = (
    "NATTEN_JAX_NATIVE",
    "NATTEN_JAX_MACHINE",
    "NATTEN_JAX_RELEASE",
    "NATTEN_JAX_CUDA_ARCHS",
    "NATTEN_JAX_CUTLASS_INCLUDE_DIR",
    "NATTEN_JAX_CUDA_SAMPLE",
    "CUDA_HOME",
    "_PYTHON_HOST_PLATFORM",
    "SETUPTOOLS_EXT_SUFFIX",
)


@pytest.fixture
def build_script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names in setup.py, which builds nothing here."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setenv("NATTEN_JAX_CUDA", "0")
    for variable in UNSET:
        monkeypatch.delenv(variable, raising=False)
    return runpy.run_path(str(ROOT / "setup.py"))


def extensions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the extensions that setup.py has setuptools build in this environment."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path(str(ROOT / "setup.py"))
    return [extension.name for extension in given["ext_modules"]]


def put_program(path: Path, script: str = "exit 1") -> Path:
    """An executable file; by default it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def toolkits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, Path]:
    """An nvcc of each version of CUDA, none of them on the path."""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    nvccs = {}
    for cuda, architectures in ARCHITECTURES.items():
        codes = "; ".join(f"echo sm_{number}" for number in architectures)
        answers = f"case $1 in --version) echo 'tools, release {cuda}.4, V{cuda}.4.131';; *) {codes};; esac"
        nvccs[cuda] = put_program(tmp_path / f"cuda-{cuda}" / "bin" / "nvcc", answers)
    return nvccs


def put_on_path(monkeypatch: pytest.MonkeyPatch, *nvccs: Path) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join(str(nvcc.parent) for nvcc in nvccs))


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


@pytest.mark.parametrize("first", [12, 13])
def test_the_toolkit_of_the_version_asked_for_is_taken_wherever_it_stands(
    first: int, build_script: dict[str, Any], toolkits: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    second = 25 - first
    put_on_path(monkeypatch, toolkits[first], toolkits[second])
    for choice, expected in (("1", first), ("12", 12), ("13", 13)):
        monkeypatch.setenv("NATTEN_JAX_CUDA", choice)
        assert build_script["find_installed_nvcc"]() == toolkits[expected]
        assert build_script["setup_requirements"]() == [build_script["CUTLASS_REQUIREMENT"]]
    monkeypatch.setenv("CUDA_HOME", str(toolkits[second].parents[1]))
    for choice, expected in (("1", second), ("12", 12), ("13", 13)):
        monkeypatch.setenv("NATTEN_JAX_CUDA", choice)
        assert build_script["find_installed_nvcc"]() == toolkits[expected]


def test_cuda_13_comes_from_packages_where_only_another_toolkit_is_installed(
    build_script: dict[str, Any], toolkits: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_path(monkeypatch, toolkits[12])
    monkeypatch.setenv("NATTEN_JAX_CUDA", "13")
    assert set(build_script["CUDA_TOOLKIT_REQUIREMENTS"]) < set(build_script["setup_requirements"]())


def test_cuda_12_without_a_toolkit_is_refused_with_what_was_found(
    build_script: dict[str, Any], toolkits: dict[int, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NATTEN_JAX_CUDA", "12")
    with pytest.raises(SystemExit, match="needs nvcc of CUDA 12 in CUDA_HOME or on the path; found: none"):
        build_script["setup_requirements"]()
    put_on_path(monkeypatch, toolkits[13])
    put_program(tmp_path / "nvidia" / "cu13" / "bin" / "nvcc")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for step in ("setup_requirements", "cuda_options"):
        with pytest.raises(SystemExit, match=rf"found: {toolkits[13]} \(CUDA 13\)"):
            build_script[step]()


@pytest.mark.parametrize(("cuda", "is_release"), [(12, False), (12, True), (13, False), (13, True)])
def test_default_architectures_are_those_that_nvcc_has(
    cuda: int,
    is_release: bool,
    build_script: dict[str, Any],
    toolkits: dict[int, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NATTEN_JAX_RELEASE", str(int(is_release)))
    wanted = build_script["RELEASE_CUDA_ARCHITECTURES" if is_release else "DEFAULT_CUDA_ARCHITECTURES"].split(";")
    chosen = build_script["cuda_architectures"](toolkits[cuda]).split(";")
    assert chosen == [name for name in wanted if int(name.rstrip("af")) in ARCHITECTURES[cuda]]
    left_out = ", ".join(name for name in wanted if name not in chosen)
    assert bool(left_out) == (is_release and cuda == 12)
    message = capsys.readouterr().err
    assert ("WARNING" in message and f"architectures {left_out}:" in message) if left_out else not message


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("80;120", r"cannot compile for the CUDA architectures 120; it can for 80, 86, 90\."),
        ("80,90a", "must be architectures as in '80;90a', got '80,90a'"),
        ("80;", "must be architectures"),
        ("sm_80", "must be architectures"),
    ],
)
def test_architectures_that_were_asked_for_are_not_left_out(
    chosen: str, message: str, build_script: dict[str, Any], toolkits: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATTEN_JAX_CUDA_ARCHS", "80;90a")
    assert build_script["cuda_architectures"](toolkits[12]) == "80;90a"
    monkeypatch.setenv("NATTEN_JAX_CUDA_ARCHS", chosen)
    with pytest.raises(SystemExit, match=message):
        build_script["cuda_architectures"](toolkits[12])


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
def test_wrong_choices_are_refused(
    variable: str, reader: str, build_script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "yes")
    with pytest.raises(SystemExit, match=f"{variable} must be .* got 'yes'"):
        build_script[reader]()


@pytest.mark.parametrize(
    ("system", "choice", "is_wanted"),
    [
        ("linux", None, True),
        ("linux", "1", True),
        ("linux", "0", False),
        ("darwin", None, False),
        ("darwin", "1", True),
        ("darwin", "0", False),
        ("win32", None, False),
    ],
)
def test_the_library_is_built_on_linux_and_elsewhere_when_asked_for(
    system: str, choice: str | None, is_wanted: bool, build_script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if choice is not None:
        monkeypatch.setenv("NATTEN_JAX_NATIVE", choice)
    monkeypatch.setattr(sys, "platform", system)
    assert build_script["wants_native"]() == is_wanted
    assert extensions(monkeypatch) == ["natten_jax._native"] * is_wanted


@pytest.fixture
def visible_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has an NVIDIA GPU, where nobody says whether to build for it."""
    put_on_path(monkeypatch, put_program(tmp_path / "driver" / "nvidia-smi", "exit 0"))
    monkeypatch.delenv("NATTEN_JAX_CUDA")


@pytest.mark.parametrize(
    ("capabilities", "are_built"),
    [
        ("7.5", False),  # T4
        ("7.0\n7.0", False),
        ("8.0", True),
        ("7.5\n9.0", True),
        ("12.0", True),
        ("[N/A]", True),
        ("", True),
    ],
)
def test_kernels_for_gpus_are_built_where_a_visible_one_has_any(
    capabilities: str,
    are_built: bool,
    build_script: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = f'case "$1" in --query-gpu=compute_cap) echo "{capabilities}" ;; -L) echo "GPU 0" ;; esac'
    put_on_path(monkeypatch, put_program(tmp_path / "driver" / "nvidia-smi", answers))
    monkeypatch.delenv("NATTEN_JAX_CUDA")
    assert build_script["wants_cuda"]() == are_built
    monkeypatch.setenv("NATTEN_JAX_CUDA", "1")
    assert build_script["wants_cuda"]()


@pytest.mark.parametrize(("variable", "choice"), [("NATTEN_JAX_NATIVE", "0"), ("NATTEN_JAX_MACHINE", "aarch64")])
def test_builds_that_have_no_kernels_for_gpus(
    variable: str,
    choice: str,
    build_script: dict[str, Any],
    visible_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert build_script["wants_cuda"]()
    monkeypatch.setenv(variable, choice)
    assert not build_script["wants_cuda"]()
    assert build_script["setup_requirements"]() == []
    for cuda in ("1", "12", "13"):
        monkeypatch.setenv("NATTEN_JAX_CUDA", cuda)
        with pytest.raises(SystemExit, match=f"(NATTEN_JAX_CUDA={cuda} needs the native library|got '{cuda}')"):
            build_script["setup_requirements"]()


def test_a_build_for_this_machine_is_no_other_build(
    build_script: dict[str, Any], visible_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setenv("NATTEN_JAX_MACHINE", "aarch64")
    assert build_script["other_machine"]() is None
    assert build_script["cross_options"]() == []
    assert build_script["wants_cuda"]()


def test_another_machine_has_its_compiler_and_names_of_its_own(
    build_script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(sysconfig, "get_config_var", {"EXT_SUFFIX": ".cpython-311-x86_64-linux-gnu.so"}.get)
    monkeypatch.setenv("NATTEN_JAX_MACHINE", "aarch64")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"NATTEN_JAX_MACHINE=aarch64 needs aarch64-linux-gnu-g\+\+, which is not"):
        build_script["cross_options"]()
    compiler = put_program(tmp_path / "aarch64-linux-gnu-g++")
    options = dict(option.removeprefix("-D").split("=", 1) for option in build_script["cross_options"]())
    assert options["CMAKE_SYSTEM_PROCESSOR"] == "aarch64" and options["CMAKE_CXX_COMPILER"] == str(compiler)
    assert options["PYTHON_MODULE_EXTENSION"] == ".cpython-311-aarch64-linux-gnu.so"
    assert (Path(options["Python_INCLUDE_DIR"]) / "Python.h").is_file()
    # Nothing of this is decided before setuptools is told, or by a build for the machine at hand.
    assert not {"_PYTHON_HOST_PLATFORM", "SETUPTOOLS_EXT_SUFFIX"} & set(os.environ)
    assert extensions(monkeypatch) == ["natten_jax._native"]
    assert os.environ.pop("_PYTHON_HOST_PLATFORM") == "linux-aarch64"
    assert os.environ.pop("SETUPTOOLS_EXT_SUFFIX") == ".cpython-311-aarch64-linux-gnu.so"
    monkeypatch.delenv("NATTEN_JAX_MACHINE")
    build_script["build_for_other_machine"]()
    assert not {"_PYTHON_HOST_PLATFORM", "SETUPTOOLS_EXT_SUFFIX"} & set(os.environ)


@pytest.mark.parametrize(
    ("kind", "suffix"), [("python", ""), ("cpu", ""), ("aarch64", ""), ("cuda12", "+cu12"), ("cuda13", "+cu13")]
)
@pytest.mark.parametrize("is_sample", [False, True])
def test_the_version_of_a_wheel_says_its_cuda_and_that_it_is_a_sample(
    kind: str, suffix: str, is_sample: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATTEN_JAX_CUDA_SAMPLE", str(int(is_sample)))
    leftovers = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__")
    sources = shutil.copytree(ROOT, tmp_path / "sources", ignore=leftovers)
    # What source distributions hold, which is where wheels are built from.
    (sources / "setup.cfg").write_text("[egg_info]\ntag_build = \ntag_date = 0\n")
    settings = tmp_path / "settings.cfg"
    settings.write_text(runpy.run_path(str(ROOT / "release" / "wheels.py"))["build_settings"](kind, tmp_path / "build"))
    environment = {**os.environ, "DIST_EXTRA_CONFIG": str(settings), "NATTEN_JAX_CUDA": "0"}
    command = [sys.executable, "setup.py", "egg_info"]
    subprocess.run(command, cwd=sources, env=environment, capture_output=True, check=True)
    metadata = sources / "natten_jax.egg-info" / "PKG-INFO"
    sample = ".sample" if is_sample and suffix else ""
    assert f"\nVersion: {__version__}{suffix}{sample}\n" in metadata.read_text()


def test_every_package_is_distributed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "natten_jax").rglob("*.py")}
    elsewhere = {"natten_jax.autotuning.measured", "natten_jax.cost_model.calibrations", "natten_jax.flax_modules"}
    assert sorted(listed) == sorted({".".join(folder.parts) for folder in folders} | elsewhere)
