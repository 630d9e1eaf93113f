"""What the gate's scripts do where a step fails, with stand-ins for the programs that they call."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ("tpu", "blackwell", "python-alone", "aarch64", "cuda12")
TOOLS = ("ccache", "aarch64-linux-gnu-g++", "qemu-aarch64")
#: Nothing else of this machine is on the path.
SYSTEM: tuple[str, ...] = ("ar", "bash", "cat", "chmod", "cp", "dirname", "env", "grep", "ls")
SYSTEM += ("mkdir", "mktemp", "mv", "realpath", "rm", "tail", "touch", "wc")
DEBIAN = "http://localhost/debian"
APT_GET = f"""
case "$*" in
  indextargets*) echo {DEBIAN}; echo {DEBIAN}-security ;;
  *download*) touch nvidia-cuda-toolkit.deb libnvvm4.deb ;;
esac
"""
DPKG = """
root=$3/usr programs=$3/usr/lib/nvidia-cuda-toolkit
mkdir -p $root/bin $root/lib/machine $programs/bin/crt $programs/libdevice
echo 'echo "release 12.4"' > $programs/bin/nvcc
chmod +x $programs/bin/nvcc
touch $root/bin/{ptxas,fatbinary,cudafe++,nvlink} $programs/bin/cicc $root/lib/machine/libnvvm.so.4
"""
PIP = """
while [ "$1" != --target ]; do shift; done
mkdir -p $2/nvidia/cuda_runtime/{include,lib}
touch $2/nvidia/cuda_runtime/include/cuda.h $2/nvidia/cuda_runtime/lib/lib{cudart_static,culibos}.a
"""


def stand_in(path: Path, script: str = "") -> Path:
    """A program that does what ``script`` says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\nset -e\n{script}\n")
    path.chmod(0o755)
    return path


def run(directory: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a script in a directory that has ``programs``, the path."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CUDA12_HOME", "CUDA_HOME")}
    environment["PATH"] = str(directory / "programs")
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the gate and nothing that it runs but stand-ins, on a machine with Debian's packages."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for program in SYSTEM:
        found = shutil.which(program)
        assert found is not None, program
        (programs / program).symlink_to(found)
    stand_in(programs / "make", 'mkdir -p dist; echo "make $*" >> made')
    stand_in(programs / "id", "echo 1000")
    stand_in(programs / "apt-get", APT_GET)
    stand_in(programs / "dpkg", DPKG)
    for tool in TOOLS:
        stand_in(programs / tool)
    stand_in(tmp_path / ".venv" / "bin" / "python", PIP)
    for script in SCRIPTS:
        stand_in(tmp_path / ".ci" / script, f"echo ran {script}")
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    return tmp_path


def made(tree: Path) -> list[str]:
    """The kinds of wheels that a run made."""
    lines = (tree / "made").read_text().splitlines()
    return [line.rpartition("KINDS=")[2] for line in lines if "KINDS=" in line]


def test_the_gate_makes_wheels_of_every_kind(tree: Path) -> None:
    stand_in(tree / ".venv" / "bin" / "python")
    done = run(tree, ".ci/run")
    assert done.returncode == 0, done.stderr
    assert made(tree) == ["python", "aarch64", "cuda13", "cuda12"]
    assert "left out" not in done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_step_that_fails_ends_the_gate(tree: Path, script: str) -> None:
    stand_in(tree / ".venv" / "bin" / "python")
    stand_in(tree / ".ci" / script, "exit 7")
    assert run(tree, ".ci/run").returncode == 7


def test_packages_that_debian_does_not_give_end_the_gate(tree: Path) -> None:
    stand_in(tree / "programs" / "id", "echo 0")
    stand_in(tree / "programs" / "apt-get", "echo no such package >&2; exit 100")
    (tree / "programs" / "qemu-aarch64").unlink()
    done = run(tree, ".ci/run")
    assert done.returncode == 100
    assert "no such package" in done.stderr


def test_what_a_machine_cannot_run_is_said_at_the_end(tree: Path) -> None:
    stand_in(tree / ".venv" / "bin" / "python", 'test "$1" != -c')
    stand_in(tree / "programs" / "apt-get", "echo http://localhost/ubuntu")
    done = run(tree, ".ci/run")
    assert done.returncode == 0, done.stderr
    assert made(tree) == ["python", "cuda13"]
    arm, cuda = done.stdout.splitlines()[-2:]
    assert arm.startswith("left out: tests for 64-bit ARM")
    assert cuda.startswith("left out: kernels with CUDA 12")


def test_a_toolkit_takes_the_place_of_an_earlier_one(tree: Path) -> None:
    toolkit = tree / "build" / "cuda-12"
    for _ in range(2):
        done = run(tree, ROOT / ".ci" / "cuda12", toolkit, tree / ".venv" / "bin" / "python")
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("release 12.4\n")
        assert not (toolkit / "earlier").exists()
        assert {path.name for path in toolkit.iterdir()} == {"bin", "include", "lib64", "nvvm"}
        assert (toolkit / "include" / "cuda.h").is_file()
        assert (toolkit / "lib64" / "libcudart_static.a").is_file()
        (toolkit / "earlier").touch()


def test_a_toolkit_that_cannot_be_made_is_an_error_that_names_its_directory(tree: Path) -> None:
    toolkit = tree / "build" / "cuda-12"
    toolkit.mkdir(parents=True)
    (toolkit / "earlier").touch()
    stand_in(tree / "programs" / "dpkg", "exit 2")
    done = run(tree, ROOT / ".ci" / "cuda12", toolkit, tree / ".venv" / "bin" / "python")
    assert done.returncode == 2
    assert f"no toolkit of CUDA 12 in {toolkit}" in done.stderr
    assert (toolkit / "earlier").exists()
