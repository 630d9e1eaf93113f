"""Build wheels for distribution, and the source distribution that they are built from.

    python release/wheels.py --pythons python3.11 python3.12 --kinds python cpu cuda13 --out dist

Set the environment variable NATTEN_JAX_WHEELS_WORK to use another directory for intermediate files.

A wheel of the kind ``python`` contains no compiled code, so a single wheel works on every machine and interpreter.
auditwheel tags each wheel of the other kinds with the oldest manylinux policy that the wheel satisfies. Kernels are
compiled once per kind, because the wheels for several interpreters differ only in the Python extension module. The
program downloads only Python packages, through pip.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1].resolve()
#: Directory of intermediate files. By default, all runs use the same path, because CMake and ccache identify
#: compilations by their paths. Concurrent runs need separate directories.
WORK = ROOT / os.environ.get("NATTEN_JAX_WHEELS_WORK", "build/wheels")
PYTHON_ALONE = "python"
#: Environment variables of ``setup.py`` that select each kind of build.
KINDS: Mapping[str, Mapping[str, str]] = {
    PYTHON_ALONE: {"NATTEN_JAX_NATIVE": "0", "NATTEN_JAX_CUDA": "0"},
    "cpu": {"NATTEN_JAX_CUDA": "0"},
    "aarch64": {"NATTEN_JAX_MACHINE": "aarch64", "NATTEN_JAX_CUDA": "0"},
    "cuda12": {"NATTEN_JAX_CUDA": "12"},
    "cuda13": {"NATTEN_JAX_CUDA": "13"},
}

_CALL_HOOK = """
import json, pathlib, sys
from setuptools import build_meta
answer, hook, *arguments = sys.argv[1:]
pathlib.Path(answer).write_text(json.dumps(getattr(build_meta, hook)(*arguments)), encoding="utf-8")
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the wheels that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", required=True, metavar="PYTHON", help="interpreters to build for")
    parser.add_argument("--kinds", nargs="+", required=True, choices=KINDS, help="kinds of wheels to build")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="output folder of the wheels")
    parser.add_argument("--sdist", type=Path, help="build from this source distribution; write none")
    options = parser.parse_args(arguments)
    pythons = [find_python(name) for name in options.pythons]
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(WORK, ignore_errors=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tools = install("tools", project["project"]["optional-dependencies"]["release"])
    # Builds use only the headers and programs in these packages. Headers and programs work with every interpreter, and
    # without the packages' dependencies.
    common = install("common", project["build-system"]["requires"], "--no-deps")
    sources = unpacked(options.sdist or source_distribution(common, pythons[0], out))
    # All environments are made before the first build, so that a missing compiler is reported early.
    environments = {kind: build_environment(kind, common, pythons[0], sources) for kind in options.kinds}
    for kind, environment in environments.items():
        is_native = kind != PYTHON_ALONE
        for python in pythons if is_native else pythons[:1]:
            start = time.perf_counter()
            wheel = build(kind, environment, python, sources)
            wheel = repaired(wheel, tools, out) if is_native else Path(shutil.move(wheel, out / wheel.name))
            seconds = time.perf_counter() - start
            print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB in {seconds:.0f} s", flush=True)


def find_python(name: str) -> Path:
    """Return the path of the interpreter that a command starts; the command can be a launcher, such as a shim."""
    question = [name, "-c", "import sys; print(sys.executable)"]
    try:
        return Path(os.fsdecode(subprocess.run(question, capture_output=True, check=True).stdout.strip()))
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"--pythons: {name} does not run ({error}).") from None


def install(name: str, requirements: Sequence[str], *flags: str) -> Path:
    """Install packages into the directory ``name`` of :data:`WORK`, and return the directory."""
    target = WORK / name
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(target)]
    subprocess.run([*command, *flags, *requirements], check=True)
    return target


def environment_with(*packages: Path, **variables: str) -> dict[str, str]:
    """Return this process's environment variables, extended by the packages and programs in these directories."""
    programs = [str(directory / "bin") for directory in packages]
    return {
        # With these settings, ccache also has hits after the compiler is reinstalled, and in another checkout.
        "CCACHE_BASEDIR": str(ROOT),
        "CCACHE_COMPILERCHECK": "content",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, packages)),
        "PATH": os.pathsep.join([*programs, os.environ.get("PATH", os.defpath)]),
        **variables,
    }


def call_backend(python: Path, sources: Path, environment: dict[str, str], hook: str, *arguments: str) -> Any:
    """Call a hook of the build backend in the same way as installers, and return its result."""
    answer = WORK / "answer.json"
    command = [str(python), "-c", _CALL_HOOK, str(answer), hook, *arguments]
    if subprocess.run(command, cwd=sources, env=environment, check=False).returncode:
        raise SystemExit(f"{hook} failed with {python}.")
    return json.loads(answer.read_text(encoding="utf-8"))


def build_environment(kind: str, common: Path, python: Path, sources: Path) -> dict[str, str]:
    """Return the environment for builds of a kind, with the additional packages that these builds need."""
    # Clear variables that select other kinds, because this process's environment can contain them.
    unchosen = {variable: "" for choices in KINDS.values() for variable in choices}
    variables = {**unchosen, **KINDS[kind], "NATTEN_JAX_RELEASE": "1"}
    environment = environment_with(common, **variables)
    requirements = call_backend(python, sources, environment, "get_requires_for_build_wheel")
    if not requirements:
        return environment
    return environment_with(common, install(f"for-{kind}", requirements, "--no-deps"), **variables)


def source_distribution(common: Path, python: Path, out: Path) -> Path:
    """Write the source distribution, and return its path."""
    # The version of a source distribution does not name CUDA: the CUDA version is selected when a wheel is built.
    environment = environment_with(common, **KINDS[PYTHON_ALONE], NATTEN_JAX_RELEASE="0")
    return out / call_backend(python, ROOT, environment, "build_sdist", str(out))


def unpacked(archive: Path) -> Path:
    """Unpack the source distribution, and return its directory.

    Wheels are built from this directory, so builds fail if the source distribution lacks a file.
    """
    with tarfile.open(archive) as members:
        members.extractall(WORK, filter="data")
    return WORK / archive.name.removesuffix(".tar.gz")


def build_settings(kind: str, folder: Path) -> str:
    """Return the Setuptools settings of a build: its directories, and the label that is added to the version.

    The label names the CUDA version, and marks builds that contain only a sample of the kernels. Setuptools reads these
    settings last, so that the setup.cfg in a source distribution cannot override them.
    """
    directories = {"build_base": folder, "build_temp": folder / "cmake", "build_lib": folder / "lib"}
    lines = ["[build]", *(f"{name} = {directory}" for name, directory in directories.items())]
    cuda = KINDS[kind]["NATTEN_JAX_CUDA"]
    sample = ".sample" if os.environ.get("NATTEN_JAX_CUDA_SAMPLE") == "1" else ""
    return "\n".join([*lines, "[egg_info]", f"tag_build = {'' if cuda == '0' else f'+cu{cuda}{sample}'}", ""])


def build(kind: str, environment: dict[str, str], python: Path, sources: Path) -> Path:
    """Build one wheel. Builds of the same kind for several interpreters share compiled kernels."""
    folder = WORK / f"build-{kind}"
    shutil.rmtree(folder / "lib", ignore_errors=True)
    folder.mkdir(exist_ok=True)
    settings = folder / "settings.cfg"
    settings.write_bytes(os.fsencode(build_settings(kind, folder)))
    variables = {**environment, "DIST_EXTRA_CONFIG": str(settings)}
    return folder / call_backend(python, sources, variables, "build_wheel", str(folder))


def repaired(wheel: Path, tools: Path, out: Path) -> Path:
    """Tag a wheel with the manylinux policy that it satisfies, and move it to the output folder.

    Raises:
        SystemExit: The wheel satisfies no manylinux policy.
    """
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(WORK / "repaired"), str(wheel)]
    if subprocess.run(command, env=environment_with(tools), check=False).returncode:
        raise SystemExit(f"{wheel.name} satisfies no manylinux policy.")
    (result,) = (WORK / "repaired").iterdir()
    return Path(shutil.move(result, out / result.name))


if __name__ == "__main__":
    main()
