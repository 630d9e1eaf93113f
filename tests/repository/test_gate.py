"""Run the gate's scripts with stand-ins for the programs that they call."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = ("tpu", "blackwell", "python-alone", "aarch64", "oldest")
SCRIPTS = (*STEPS, "cuda12")
TOOLS = ("ccache", "aarch64-linux-gnu-g++", "qemu-aarch64")
#: Nothing else of this machine is on the path.
SYSTEM: tuple[str, ...] = ("ar", "bash", "cat", "chmod", "cp", "dirname", "env", "grep", "ls")
SYSTEM += ("mkdir", "mktemp", "mv", "realpath", "renice", "rm", "sed", "sleep", "tail", "tee", "touch", "uname", "wc")
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
#: Notes how it was called, and with which of the variables that choose a build; writes what a later part is given.
MAKE = """
mkdir -p dist
echo "make $* sample=$NATTEN_JAX_CUDA_SAMPLE distributions=$NATTEN_JAX_DISTRIBUTIONS" >> made
case "$*" in *KINDS=*) touch dist/natten_jax-1.tar.gz ;; esac
"""
#: A machine with Python 3.11 and 3.13.
FIND_PYTHON = """
case "$1" in 11) echo /stand-in/python3.11 ;; 12) echo /stand-in/python3.13 ;; esac
"""


def stand_in(path: Path, script: str = "") -> Path:
    """A program that does what ``script`` says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\nset -e\n{script}\n")
    path.chmod(0o755)
    return path


def environment_of(directory: Path) -> dict[str, str]:
    """An environment with the programs of a directory, and no home."""
    removed = ("CUDA12_HOME", "CUDA_HOME", "HOME", "PYENV_ROOT", "NATTEN_JAX_CUDA_SAMPLE", "NATTEN_JAX_DISTRIBUTIONS")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    environment["PATH"] = str(directory / "programs")
    return environment


def run(directory: Path, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a directory that has ``programs``, the path."""
    environment = environment_of(directory) | variables
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the gate and nothing that it runs but stand-ins, on a machine with Debian's packages."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for program in SYSTEM:
        found = shutil.which(program)
        assert found is not None, program
        (programs / program).symlink_to(found)
    stand_in(programs / "make", MAKE)
    stand_in(programs / "id", "echo 1000")
    stand_in(programs / "apt-get", APT_GET)
    stand_in(programs / "dpkg", DPKG)
    for tool in TOOLS:
        stand_in(programs / tool)
    stand_in(tmp_path / "python", PIP)
    stand_in(tmp_path / ".ci" / "find-python", FIND_PYTHON)
    for script in SCRIPTS:
        stand_in(tmp_path / ".ci" / script, f'echo "ran {script} $*"')
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def made(tree: Path) -> list[str]:
    """The kinds of wheels that a run made."""
    lines = (tree / "made").read_text().splitlines()
    return [line.partition(" sample=")[0].partition("KINDS=")[2] for line in lines if "KINDS=" in line]


def line_with(text: str, words: str) -> str:
    """The only line of a text that has these words."""
    (line,) = (line for line in text.splitlines() if words in line)
    return line


def test_the_gate_makes_wheels_of_every_kind(tree: Path) -> None:
    done = run(tree, ".ci/run")
    assert done.returncode == 0, done.stderr
    assert sorted(kind.partition(" ")[0] for kind in made(tree)) == ["aarch64", "cuda12", "cuda13", "python"]
    assert "left out" not in done.stdout
    assert all(f"ran {script} " in done.stdout for script in SCRIPTS)


def test_cuda_13_is_compiled_whole_and_cuda_12_as_a_sample_away_from_other_wheels(tree: Path) -> None:
    assert run(tree, ".ci/run").returncode == 0
    text = (tree / "made").read_text()
    whole, sample = line_with(text, "KINDS=cuda13"), line_with(text, "KINDS=cuda12")
    assert "sample= " in whole and "OUT=" not in whole
    assert "sample=1 " in sample and "OUT=build/cuda12-sample" in sample
    assert "SDIST=dist/natten_jax-1.tar.gz" in whole and "SDIST=dist/natten_jax-1.tar.gz" in sample


def test_the_suite_runs_on_the_newest_python_and_a_core_on_the_oldest(tree: Path) -> None:
    done = run(tree, ".ci/run")
    text = (tree / "made").read_text()
    for target in ("setup", "lint", "docs", "test-all", "fuzz"):
        line = line_with(text, f"make {target} ")
        assert "PYTHON=/stand-in/python3.13 VENV=build/suite" in line
    assert f"distributions={tree}/dist" in line_with(text, "make test-all ")
    line = line_with(done.stdout, "ran oldest")
    assert line.startswith("ran oldest build/oldest /stand-in/python3.11 0.10.0 dist/natten_jax-")
    for tests in line.split()[-4:]:
        assert tests.startswith("tests/") and (ROOT / tests).exists()
    assert "PYTHONS=/stand-in/python3.11" in line_with(text, "KINDS=aarch64")


def test_times_of_all_parts_are_the_last_lines(tree: Path) -> None:
    lines = run(tree, ".ci/run").stdout.splitlines()
    table = lines[lines.index("times of the parts, of which the kernels ran beside the others:") + 1 :]
    assert all(" min " in line and " s  " in line for line in table)
    names = {line.partition(" s  ")[2] for line in table}
    assert {"tests", "kernels with CUDA 13", "a sample of the kernels with CUDA 12", "lint", "in all"} <= names
    assert table[-1].endswith("  in all") and len(names) == len(table) == 17


@pytest.mark.parametrize("script", STEPS)
def test_a_step_that_fails_ends_the_gate(tree: Path, script: str) -> None:
    stand_in(tree / ".ci" / script, "exit 7")
    done = run(tree, ".ci/run")
    assert done.returncode == 7
    assert done.stdout.splitlines()[-1].endswith("  in all")


@pytest.mark.parametrize("target", ["setup", "lint", "docs", "test-all", "fuzz", "wheels"])
def test_a_target_of_make_that_fails_ends_the_gate(tree: Path, target: str) -> None:
    stand_in(tree / "programs" / "make", f'{MAKE}\nif [ "$1" = {target} ]; then exit 6; fi')
    assert run(tree, ".ci/run").returncode == 6


@pytest.mark.parametrize("kind", ["cuda13", "cuda12"])
def test_kernels_that_do_not_compile_beside_other_parts_end_the_gate_with_what_was_printed(
    tree: Path, kind: str
) -> None:
    failing = f'case "$*" in *KINDS={kind}*) echo "no such instruction"; echo "error: 3" >&2; exit 5 ;; esac'
    stand_in(tree / "programs" / "make", f"{MAKE}\n{failing}")
    done = run(tree, ".ci/run")
    assert done.returncode == 5
    assert "no such instruction" in done.stdout and "error: 3" in done.stdout
    assert "ran aarch64" not in done.stdout or "the rest of the kernels" in done.stdout


def test_a_toolkit_that_fails_beside_other_parts_ends_the_gate(tree: Path) -> None:
    stand_in(tree / ".ci" / "cuda12", "exit 4")
    assert run(tree, ".ci/run").returncode == 4
    assert all(not kind.startswith("cuda12") for kind in made(tree))


def test_parts_after_a_failure_beside_them_are_not_begun(tree: Path) -> None:
    waiting = """
case "$*" in
  *KINDS=cuda13*) touch failed; exit 5 ;;
  lint*) while [ ! -e failed ]; do sleep 0.1; done; sleep 1 ;;
esac
"""
    stand_in(tree / "programs" / "make", f"{MAKE}\n{waiting}")
    done = run(tree, ".ci/run")
    assert done.returncode == 5
    assert "make docs" not in (tree / "made").read_text()


@pytest.mark.parametrize("ending", ["failure", "signal"])
def test_nothing_is_left_running_where_the_gate_ends_early(tree: Path, ending: str) -> None:
    """Compilers in the background end with the gate."""
    compiling = 'case "$*" in *KINDS=cuda13*) echo $BASHPID > compiler; exec sleep 1000 ;; esac'
    checking = "while [ ! -e compiler ]; do sleep 0.1; done; touch checking; " + (
        "exit 3" if ending == "failure" else "exec sleep 1000"
    )
    stand_in(tree / "programs" / "make", f'{MAKE}\n{compiling}\nif [ "$1" = lint ]; then {checking}; fi')
    with subprocess.Popen(
        [".ci/run"], cwd=tree, env=environment_of(tree), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as gate:
        if ending == "signal":
            wait_until(lambda: (tree / "checking").exists())
            os.killpg(gate.pid, signal.SIGTERM)
        gate.communicate(timeout=60)
    assert gate.returncode in ((3,) if ending == "failure" else (-signal.SIGTERM, 128 + signal.SIGTERM))
    compiler = Path(f"/proc/{(tree / 'compiler').read_text().strip()}")
    wait_until(lambda: not compiler.exists() or "\nState:\tZ" in (compiler / "status").read_text())


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, for a minute at most."""
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("this did not happen in a minute")


def test_packages_that_debian_does_not_give_end_the_gate(tree: Path) -> None:
    stand_in(tree / "programs" / "id", "echo 0")
    stand_in(tree / "programs" / "apt-get", "echo no such package >&2; exit 100")
    (tree / "programs" / "qemu-aarch64").unlink()
    done = run(tree, ".ci/run")
    assert done.returncode == 100
    assert "no such package" in done.stderr


def test_what_a_machine_without_python_3_11_and_debian_cannot_run_is_said_at_the_end(tree: Path) -> None:
    stand_in(tree / ".ci" / "find-python", 'test "$1" = 12; echo /stand-in/python3.13')
    stand_in(tree / "programs" / "apt-get", "echo http://localhost/ubuntu")
    done = run(tree, ".ci/run")
    assert done.returncode == 0, done.stderr
    assert [kind.partition(" ")[0] for kind in made(tree)] == ["python", "cuda13"]
    cuda, arm, oldest = done.stdout.splitlines()[-3:]
    assert cuda.startswith("left out: kernels with CUDA 12")
    assert arm.startswith("left out: tests for 64-bit ARM")
    assert oldest.startswith("left out: tests with JAX 0.10.0")


def test_the_whole_suite_runs_on_an_old_python_if_there_is_no_other(tree: Path) -> None:
    stand_in(tree / ".ci" / "find-python", 'test "$1" = 11; echo /stand-in/python3.11')
    done = run(tree, ".ci/run")
    assert done.returncode == 0, done.stderr
    assert "PYTHON=/stand-in/python3.11 VENV=build/suite" in line_with((tree / "made").read_text(), "make test-all ")
    newest, blackwell = done.stdout.splitlines()[-2:]
    assert newest.startswith("left out: tests with the newest JAX") and "/stand-in/python3.11" in newest
    assert blackwell.startswith("left out: the Blackwell kernels")
    assert "ran oldest" not in done.stdout and "ran aarch64" in done.stdout


def test_the_gate_needs_some_python(tree: Path) -> None:
    stand_in(tree / ".ci" / "find-python", "exit 1")
    done = run(tree, ".ci/run")
    assert done.returncode == 1 and "no Python 3.11 to 3.14" in done.stderr
    assert not (tree / "made").exists()


#: A stand-in for an interpreter: it prints its path if its version is the requested one.
INTERPRETER = """
for version; do :; done
if [ "$version" = {minor} ]; then echo "$0"; else exit 1; fi
"""


def test_the_newest_python_is_found_on_the_path_and_among_versions_of_pyenv(tree: Path) -> None:
    find = ROOT / ".ci" / "find-python"
    home = tree / "home"
    variables = {"HOME": str(home)}
    assert run(tree, find, "11", "14", **variables).returncode == 1
    eleven = stand_in(tree / "programs" / "python3", INTERPRETER.format(minor=11))
    assert run(tree, find, "11", "14", **variables).stdout == f"{eleven}\n"
    assert run(tree, find, "12", "14", **variables).returncode == 1
    # A shim of pyenv whose version is not chosen, and the version itself.
    stand_in(tree / "programs" / "python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
    thirteen = stand_in(home / ".pyenv" / "versions" / "3.13.0" / "bin" / "python3.13", INTERPRETER.format(minor=13))
    assert run(tree, find, "11", "14", **variables).stdout == f"{thirteen}\n"
    # An interpreter without header files or venv is skipped.
    fourteen = stand_in(tree / "programs" / "python3.14", "exit 1")
    assert run(tree, find, "11", "14", **variables).stdout == f"{thirteen}\n"
    stand_in(fourteen, INTERPRETER.format(minor=14))
    assert run(tree, find, "11", "14", **variables).stdout == f"{fourteen}\n"
    assert run(tree, find, "11", "13", **variables).stdout == f"{thirteen}\n"
    assert run(tree, find, "11", "11", **variables).stdout == f"{eleven}\n"


def test_a_toolkit_takes_the_place_of_an_earlier_one(tree: Path) -> None:
    toolkit = tree / "build" / "cuda-12"
    for _ in range(2):
        done = run(tree, ROOT / ".ci" / "cuda12", toolkit, tree / "python")
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
    done = run(tree, ROOT / ".ci" / "cuda12", toolkit, tree / "python")
    assert done.returncode == 2
    assert f"no toolkit of CUDA 12 in {toolkit}" in done.stderr
    assert (toolkit / "earlier").exists()
