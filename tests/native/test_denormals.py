"""Host kernels flush denormals on every thread that takes part, and leave each thread as it was."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.native_programs import COMPILER, ROOT

#: By the machine that is compiled for: the compiler, how it links what runs here, and what runs that.
TOOLCHAINS = {
    "this": ([COMPILER], []),
    "aarch64": (["aarch64-linux-gnu-g++", "-static"], ["qemu-aarch64"]),
}


@pytest.mark.parametrize("machine", TOOLCHAINS)
def test_denormals_are_zero_in_kernels_and_nowhere_else(machine: str, tmp_path: Path) -> None:
    compiler, runner = TOOLCHAINS[machine]
    missing = [tool for tool in (compiler[0], *runner) if shutil.which(tool) is None]
    if machine != "this" and missing:
        pytest.skip(f"not on the path: {', '.join(missing)}")
    program = tmp_path / "denormals"
    sources = ROOT / "tests/native/denormals.cpp", ROOT / "csrc/cpu/executor.cpp"
    command = [*compiler, "-std=c++17", "-O2", "-pthread", f"-I{ROOT / 'csrc'}", *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    found = subprocess.run([*runner, str(program)], check=True, capture_output=True, text=True, timeout=120)
    assert found.stdout.splitlines() == ["zero zero kept kept"] * 2
