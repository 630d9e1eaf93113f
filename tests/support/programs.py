"""Run programs in separate processes, for tests of other devices, module imports, crashes or peak memory."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import textwrap
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import natten_jax
from tests.support.compilation import users_environment

ROOT = Path(__file__).parents[2]
PACKAGE = Path(natten_jax.__file__).parent
_DEVICES_FLAG = "--xla_force_host_platform_device_count"
#: Processes are forks of a server that has imported these modules. The imports take seconds, but a fork takes a tenth
#: of a second.
_PRELOADED = (
    "natten_jax.doctor.__main__",
    "natten_jax.profiler.__main__",
    "flax.nnx",
    "matplotlib.figure",
    "optax",
    "sklearn.datasets",
    "tests.support.programs",
)
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(list(_PRELOADED))
#: Environment variables that are read only after the imports, so a fork can change them. If any variable that is not in
#: this list has a different value in the server, the program runs in a new interpreter instead of a fork.
_READ_LATE = "XLA_FLAGS", "PYTEST_CURRENT_TEST", "PYTHONPATH", "COLUMNS", "MPLBACKEND"
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's threads would not exist in forks
_ENVIRONMENT = dict(os.environ)
warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)  # JAX warns because it has threads


def run_python(
    source: str,
    *arguments: str,
    devices: int | None = 1,
    quick: bool = True,
    paths: tuple[Path, ...] = (PACKAGE.parent, ROOT),
    environment: Mapping[str, str] | None = None,
    timeout: float = 300,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program on CPU devices in a separate process.

    Args:
        source: The program.
        *arguments: ``sys.argv[1:]`` of the program.
        devices: Number of CPU devices of JAX. If it is ``None``, the program sets the number.
        quick: True for fast compilation with the tests' XLA options. False for XLA's defaults, as in a user's process.
        paths: Value of PYTHONPATH, as a list of folders.
        environment: Environment variables to add or replace.
        timeout: In seconds.
        fresh: True to run in a new interpreter without imported modules, for programs that test imports or memory.
    """
    command = "-c", textwrap.dedent(source), *arguments
    variables = _environment(devices, paths, quick) | dict(environment or {})
    return run_command(command, variables, timeout, fresh=fresh)


def run_command(
    command: Sequence[str | Path],
    environment: Mapping[str, str],
    timeout: float = 300,
    folder: Path | None = None,
    *,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``python COMMAND...`` and return its exit status and output.

    Args:
        command: ``-c`` and a program, ``-m`` and a module, or a file. The program's arguments follow.
        environment: All environment variables of the process.
        timeout: In seconds.
        folder: Working directory. Default: the current folder.
        fresh: See :func:`run_python`.
    """
    words = list(map(str, command))
    if fresh or _started_with(environment) != _started_with(_ENVIRONMENT):
        line, variables = [sys.executable, *words], dict(environment)
        return subprocess.run(
            line, capture_output=True, text=True, env=variables, cwd=folder, timeout=timeout, check=False
        )
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory, name) for name in ("output", "errors")]
        request = words, dict(environment), str(folder or Path.cwd()), list(map(str, files))
        process = _FORKS.Process(target=_run, args=request)
        with contextlib.chdir(ROOT):  # this may start the server, which imports modules from its working directory
            process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout, *(file.read_bytes() for file in files))
        return subprocess.CompletedProcess(words, process.exitcode, *(file.read_text() for file in files))


def _started_with(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _READ_LATE}


def _run(words: list[str], environment: Mapping[str, str], folder: str, files: list[str]) -> None:
    """Run a program in this forked process, as ``python WORDS...`` would. Write its output to ``files``."""
    for number, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    kind, *arguments = words
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    if kind == "-m":
        module, *_ = sys.argv = arguments
        sys.path[:0] = [folder, *paths]
        sys.modules.pop(f"{module}.__main__", None)  # imported by the server, but not run as a program
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        source, *sys.argv[1:] = arguments
        sys.argv[0], sys.path[:0] = kind, ["", *paths]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(source, "<string>", "exec"), vars(main))
    else:
        sys.argv, sys.path[:0] = words, [str(Path(kind).parent), *paths]
        runpy.run_path(kind, run_name="__main__")


def run_processes(source: str, arguments: Sequence[Sequence[str]], timeout: float = 300) -> list[str]:
    """Run a program in several parallel processes. All of them must succeed.

    Args:
        source: The program.
        arguments: ``sys.argv[1:]`` of each process.
        timeout: In seconds.

    Returns:
        Standard output of each process.
    """

    def run(own: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return run_python(source, *own, devices=None, timeout=timeout, fresh=True)

    with concurrent.futures.ThreadPoolExecutor(len(arguments)) as threads:
        return [output_of(result) for result in threads.map(run, arguments)]


def output_of(result: subprocess.CompletedProcess[str]) -> str:
    """Check that a program succeeded, and return its standard output."""
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def _environment(devices: int | None, paths: tuple[Path, ...], quick: bool = True) -> dict[str, str]:
    environment = dict(os.environ) if quick else users_environment()
    flags = [flag for flag in environment.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICES_FLAG)]
    if devices is not None:
        flags.append(f"{_DEVICES_FLAG}={devices}")
    return {
        **environment,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
