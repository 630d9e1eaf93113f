"""The launcher that wraps the CUDA compiler in the native build, tested without compiling kernels."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
REFUSE_IGNORED = CSRC / "cuda" / "refuse_ignored.sh"


def test_the_compile_launcher_rejects_input_that_ptxas_ignores() -> None:
    launcher = "list(PREPEND CMAKE_CUDA_COMPILER_LAUNCHER sh ${CMAKE_CURRENT_SOURCE_DIR}/cuda/refuse_ignored.sh)"
    assert launcher in (CSRC / "CMakeLists.txt").read_text()


#: ptxas 13.0 prints this line if a kernel uses `setmaxnreg` and its launch bounds do not give a number of blocks per
#: multiprocessor.
IGNORED = "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count"
ACCEPTED = "ptxas info    : Used 168 registers, used 2 barriers"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize(("line", "status"), [(IGNORED, 0), (ACCEPTED, 0), (ACCEPTED, 3), (IGNORED, 3)])
def test_a_compilation_fails_if_ptxas_ignored_input(line: str, status: int, stream: str, tmp_path: Path) -> None:
    compiler = tmp_path / "nvcc"
    redirection = ">&2" if stream == "stderr" else ""
    compiler.write_text(f'#!/bin/sh\necho "{line}" {redirection}\necho object > "$4"\nexit {status}\n')
    compiler.chmod(0o755)
    built = tmp_path / "kernel file.o"
    command: list[str | Path] = ["sh", REFUSE_IGNORED, compiler, "-c", "kernel file.cu", "-o", built]
    # The launcher must pass arguments to the compiler unchanged, also if they contain spaces.
    compiler.write_text(compiler.read_text().replace('"$4"', '"$4"; test "$2" = "kernel file.cu" || exit 9'))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert line in done.stderr
    is_refused = line == IGNORED and status == 0
    assert done.returncode == (1 if is_refused else status)
    assert built.exists() == (not is_refused)
    assert ("ptxas ignored part of the source" in done.stderr) == is_refused
