"""C++ programs of tests, which call the native sources that they are compiled with."""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import pytest

from natten_jax.native import module as native

ROOT = Path(__file__).parents[2]
#: Skips tests of kernels in a build without the native library.
needs_native = pytest.mark.skipif(native.path() is None, reason="the native module is not built")
#: The compiler of this Python's extension modules, without its options.
COMPILER = (sysconfig.get_config_var("CXX") or "g++").split()[0]


def output_of(
    name: str, sources: Iterable[str], folder: Path, *, includes: Iterable[str] = (), options: Iterable[str] = ()
) -> str:
    """What a program prints.

    Args:
        name: The name of its source, in ``tests/native``.
        sources: Those of the library that it is compiled with, below ``csrc``.
        folder: For the program.
        includes: Folders of headers besides the library's own.
        options: The options of the compiler.

    Raises:
        CalledProcessError: It does not compile, or fails.
    """
    program = folder / name
    files = [ROOT / f"tests/native/{name}.cpp", *(ROOT / "csrc" / source for source in sources)]
    headers = [f"-I{each}" for each in (ROOT / "csrc", ROOT / "csrc/include", *includes)]
    command = [COMPILER, "-std=c++17", *options, *headers, *map(str, files), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
