"""C++ test programs, each compiled together with the native sources that it tests."""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import pytest

from natten_jax.native import module as native

ROOT = Path(__file__).parents[2]
#: Mark that skips kernel tests if the native library is not built.
needs_native = pytest.mark.skipif(native.path() is None, reason="the native module is not built")
#: The C++ compiler of this Python's extension modules, without compiler options.
COMPILER = (sysconfig.get_config_var("CXX") or "g++").split()[0]


def output_of(
    name: str, sources: Iterable[str], folder: Path, *, includes: Iterable[str] = (), options: Iterable[str] = ()
) -> str:
    """Compile and run a program, and return its standard output.

    Args:
        name: Name of its source file in ``tests/native``, without suffix.
        sources: Library sources to compile with it, relative to ``csrc``.
        folder: Output folder of the program.
        includes: Include folders in addition to the library's.
        options: Compiler options.

    Raises:
        CalledProcessError: Compilation or the program fails.
    """
    program = folder / name
    files = [ROOT / f"tests/native/{name}.cpp", *(ROOT / "csrc" / source for source in sources)]
    headers = [f"-I{each}" for each in (ROOT / "csrc", ROOT / "csrc/include", *includes)]
    command = [COMPILER, "-std=c++17", *options, *headers, *map(str, files), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
