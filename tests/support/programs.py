"""Programs that tests run in a fresh interpreter: other devices, other modules, crashes, peak memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import natten_jax
from tests.support.compilation import users_environment
from tests.support.warm_programs import run_warm

ROOT = Path(__file__).parents[2]
PACKAGE = Path(natten_jax.__file__).parent
#: What examples and pages import: two seconds of processor time, once for all of them.
OF_EXAMPLES = "flax.nnx", "matplotlib.figure", "optax", "sklearn.datasets"
_DEVICES_FLAG = "--xla_force_host_platform_device_count"


def run_python(
    source: str,
    *arguments: str,
    devices: int | None = 1,
    quick: bool = True,
    paths: tuple[Path, ...] = (PACKAGE.parent, ROOT),
    environment: Mapping[str, str] | None = None,
    timeout: float = 300,
    modules: Sequence[str] = (),
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program on the host's devices, in a process of its own.

    Args:
        source: The program.
        *arguments: Its ``sys.argv[1:]``.
        devices: How many devices JAX sees; ``None`` leaves that to the program.
        quick: Whether XLA compiles quickly, as in tests, or as for users.
        paths: Where it finds modules before the environment's own.
        environment: More environment variables.
        timeout: In seconds.
        modules: What is imported besides before it begins.
        fresh: Whether nothing is imported when it begins, for programs that are about imports or memory.
    """
    command = "-c", textwrap.dedent(source), *arguments
    variables = _environment(devices, paths, quick) | dict(environment or {})
    return run_command(command, variables, timeout, modules=modules, fresh=fresh)


def run_command(
    command: Sequence[str | Path],
    environment: Mapping[str, str],
    timeout: float = 300,
    folder: Path | None = None,
    modules: Sequence[str] = (),
    *,
    fresh: bool = False,
    encoding: str = "utf-8",
) -> subprocess.CompletedProcess[str]:
    """What ``python COMMAND...`` does.

    Args:
        command: ``-c`` and a program, ``-m`` and a module, or a file; with arguments.
        environment: All environment variables.
        timeout: In seconds.
        folder: Where it runs, if not here.
        modules: As for :func:`run_python`.
        fresh: As for :func:`run_python`.
        encoding: In which it prints.
    """
    if fresh:
        every = [sys.executable, *map(str, command)]
        done = subprocess.run(
            every, capture_output=True, env=dict(environment), cwd=folder, timeout=timeout, check=False
        )
    else:
        done = run_warm(command, environment, timeout, folder, modules)
    output, errors = (stream.decode(encoding) for stream in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, output, errors)


def run_processes(source: str, arguments: Sequence[Sequence[str]], directory: Path, timeout: float = 300) -> list[str]:
    """Run a program in several processes at a time, all of which must succeed.

    If one fails, or the time is up, all are killed.

    Args:
        source: The program.
        arguments: ``sys.argv[1:]`` of each process.
        directory: For files with what they print.
        timeout: In seconds, for all together.

    Returns:
        What each printed.
    """
    environment = _environment(None, (PACKAGE.parent, ROOT))
    files = [directory / f"process{i}.txt" for i in range(len(arguments))]
    processes = []
    deadline = time.monotonic() + timeout
    try:
        for file, own in zip(files, arguments, strict=True):
            command = [sys.executable, "-c", textwrap.dedent(source), *own]
            with file.open("w") as output:
                processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment))
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline or any(process.returncode for process in processes):
                break
            time.sleep(0.1)
        statuses = ["still running" if process.returncode is None else process.returncode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    outputs = [file.read_text() for file in files]
    report = "\n".join(f"process {i}: {each}\n{outputs[i]}" for i, each in enumerate(statuses))
    assert statuses == [0] * len(arguments), f"not all succeeded within {timeout} s\n{report}"
    return outputs


def output_of(result: subprocess.CompletedProcess[str]) -> str:
    """What a program that must succeed printed."""
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
