"""Wheels to hand out, and the source distribution that they are built from.

    python release/wheels.py --pythons python3.11 python3.12 --cudas 0 13 --out dist

Each wheel is tagged with the oldest manylinux policy that auditwheel finds it to keep. Kernels are compiled once for a
version of CUDA: only the Python module differs between interpreters. Nothing is fetched but packages, through pip.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1].resolve()
#: Always the same place: CMake and ccache know what they compiled by its path.
WORK = ROOT / "build" / "wheels"
CUDAS = ("0", "12", "13")

_CALL_HOOK = """
import json, pathlib, sys
from setuptools import build_meta
answer, hook, *arguments = sys.argv[1:]
pathlib.Path(answer).write_text(json.dumps(getattr(build_meta, hook)(*arguments)), encoding="utf-8")
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", required=True, metavar="PYTHON", help="interpreters to build for")
    parser.add_argument("--cudas", nargs="+", required=True, choices=CUDAS, help="NATTEN_JAX_CUDA of each build")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the wheels go")
    options = parser.parse_args(arguments)
    pythons = [find_python(name) for name in options.pythons]
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(WORK, ignore_errors=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tools = install("tools", project["project"]["optional-dependencies"]["release"])
    # A build takes headers and programs from these, which serve every interpreter: what imports need may be missing.
    common = install("common", project["build-system"]["requires"], "--no-deps")
    # A build that lacks its compiler says so before another begins.
    environments = {cuda: build_environment(cuda, common, pythons[0]) for cuda in options.cudas}
    sources = source_distribution(common, pythons[0], out)
    for cuda, environment in environments.items():
        for python in pythons:
            start = time.perf_counter()
            wheel = repaired(build(cuda, environment, python, sources), tools, out)
            seconds = time.perf_counter() - start
            print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB in {seconds:.0f} s", flush=True)


def find_python(name: str) -> Path:
    """The interpreter that a command starts, which may be a launcher of several."""
    question = [name, "-c", "import sys; print(sys.executable)"]
    try:
        return Path(os.fsdecode(subprocess.run(question, capture_output=True, check=True).stdout.strip()))
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"--pythons: {name} does not run ({error}).") from None


def install(name: str, requirements: Sequence[str], *flags: str) -> Path:
    """Install packages into a directory of their own."""
    target = WORK / name
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), *flags, *requirements]
    subprocess.run(command, check=True)
    return target


def environment_with(*packages: Path, **variables: str) -> dict[str, str]:
    """This process's environment with the packages of these directories, and their programs."""
    programs = [str(directory / "bin") for directory in packages]
    return {
        # A compiler that was installed again, or a checkout elsewhere, is nothing new to ccache.
        "CCACHE_BASEDIR": str(ROOT),
        "CCACHE_COMPILERCHECK": "content",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, packages)),
        "PATH": os.pathsep.join([*programs, os.environ.get("PATH", os.defpath)]),
        **variables,
    }


def call_backend(python: Path, sources: Path, environment: dict[str, str], hook: str, *arguments: str) -> Any:
    """The answer of one of the build backend's hooks, called as every installer does."""
    answer = WORK / "answer.json"
    command = [str(python), "-c", _CALL_HOOK, str(answer), hook, *arguments]
    if subprocess.run(command, cwd=sources, env=environment, check=False).returncode:
        raise SystemExit(f"{hook} failed with {python}.")
    return json.loads(answer.read_text(encoding="utf-8"))


def build_environment(cuda: str, common: Path, python: Path) -> dict[str, str]:
    """The environment of builds for a version of CUDA, with what only they need."""
    variables = {"NATTEN_JAX_CUDA": cuda, "NATTEN_JAX_RELEASE": "1"}
    environment = environment_with(common, **variables)
    requirements = call_backend(python, ROOT, environment, "get_requires_for_build_wheel")
    if not requirements:
        return environment
    return environment_with(common, install(f"cuda{cuda}", requirements, "--no-deps"), **variables)


def source_distribution(common: Path, python: Path, out: Path) -> Path:
    """Write the source distribution and unpack it: what wheels are built from is what it holds."""
    # Its version is nobody's in particular: whoever builds from it chooses a version of CUDA then.
    environment = environment_with(common, NATTEN_JAX_CUDA="0", NATTEN_JAX_RELEASE="0")
    archive = out / call_backend(python, ROOT, environment, "build_sdist", str(out))
    with tarfile.open(archive) as members:
        members.extractall(WORK, filter="data")
    return WORK / archive.name.removesuffix(".tar.gz")


def build_settings(cuda: str, folder: Path) -> str:
    """The settings of a build: its directories, and that the version says its CUDA.

    Setuptools reads them last. A source distribution has settings of its own, which overrule what setup.py says.
    """
    directories = {"build_base": folder, "build_temp": folder / "cmake", "build_lib": folder / "lib"}
    lines = ["[build]", *(f"{name} = {directory}" for name, directory in directories.items())]
    return "\n".join([*lines, "[egg_info]", f"tag_build = {'' if cuda == '0' else f'+cu{cuda}'}", ""])


def build(cuda: str, environment: dict[str, str], python: Path, sources: Path) -> Path:
    """Build one wheel; interpreters share compilations."""
    folder = WORK / f"build-{cuda}"
    shutil.rmtree(folder / "lib", ignore_errors=True)
    folder.mkdir(exist_ok=True)
    settings = folder / "settings.cfg"
    settings.write_bytes(os.fsencode(build_settings(cuda, folder)))
    variables = {**environment, "DIST_EXTRA_CONFIG": str(settings)}
    return folder / call_backend(python, sources, variables, "build_wheel", str(folder))


def repaired(wheel: Path, tools: Path, out: Path) -> Path:
    """Tag a wheel with the policy that it keeps, and put it where wheels go.

    Raises:
        SystemExit: It keeps no policy.
    """
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(WORK / "repaired"), str(wheel)]
    if subprocess.run(command, env=environment_with(tools), check=False).returncode:
        raise SystemExit(f"{wheel.name} keeps no manylinux policy.")
    (result,) = (WORK / "repaired").iterdir()
    return Path(shutil.move(result, out / result.name))


if __name__ == "__main__":
    main()
