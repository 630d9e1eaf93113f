"""Sources and launchers of the native build. Nothing is compiled here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
REFUSE_IGNORED = CSRC / "cuda" / "refuse_ignored.sh"
INSTANCE = re.compile(r'#define NATTEN_JAX_INSTANCE (\w+)\n(?:#define NATTEN_JAX_FEATURE \w+\n)?#include "(.*)"\n')

#: Runs CMakeLists.txt as a script: commands that need a compiler do nothing, except that sources are printed.
SCRIPT = """
cmake_minimum_required(VERSION 3.24)
foreach(name project option enable_language find_package install pybind11_add_module check_cxx_source_compiles
        add_compile_options add_link_options target_include_directories target_compile_definitions
        target_compile_options target_link_options target_link_libraries set_target_properties
        set_source_files_properties)
  cmake_language(EVAL CODE "function(${name})\\nendfunction()")
endforeach()
macro(include)
endmacro()
function(add_library target kind)
  message(NOTICE "${target} ${ARGN}")
endfunction()
function(target_sources target visibility)
  message(NOTICE "${target} ${ARGN}")
endfunction()
set(HAS_STATIC_CXX ON)
set(CMAKE_CURRENT_SOURCE_DIR ${CSRC})
_include(${CSRC}/CMakeLists.txt)
message(NOTICE "launcher ${CMAKE_CUDA_COMPILER_LAUNCHER}")
"""


def printed(directory: Path, *, is_sample: bool) -> dict[str, list[str]]:
    """The sources of each target, and the launcher of CUDA compilations, without a compiler cache."""
    for header in ("include/xla/ffi/api/ffi.h", "include/cute/tensor.hpp"):
        (directory / header).parent.mkdir(parents=True, exist_ok=True)
        (directory / header).touch()
    cmake = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert cmake is not None
    (directory / "script.cmake").write_text(SCRIPT)
    include = directory / "include"
    definitions = {
        "CSRC": CSRC,
        "NATTEN_JAX_CUDA": "ON",
        "NATTEN_JAX_CUDA_ARCHS": "80;90a",
        "NATTEN_JAX_CUDA_SAMPLE": "ON" if is_sample else "OFF",
        "NATTEN_JAX_FFI_INCLUDE_DIR": include,
        "NATTEN_JAX_CUTLASS_INCLUDE_DIR": include,
    }
    options = [f"-D{name}={value}" for name, value in definitions.items()]
    command = [cmake, *options, "-P", "script.cmake"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True)
    sources: dict[str, list[str]] = {}
    for target, words in re.findall(r"^(\w+) (.*)$", done.stderr, re.MULTILINE):
        sources.setdefault(target, []).extend(words.split(";"))
    return sources


def instances(sources: list[str]) -> list[tuple[str, str]]:
    """The file of the template and the element type of every source that instantiates kernels."""
    texts = [Path(source).read_text() for source in sources if source.endswith(".cu") and Path(source).is_absolute()]
    matches = [INSTANCE.fullmatch(text) for text in texts]
    assert None not in matches
    return [(match[2], match[1]) for match in matches if match is not None]


def test_a_sample_has_every_kernel_template_once_and_every_other_source(tmp_path: Path) -> None:
    whole = printed(tmp_path / "whole", is_sample=False)
    sample = printed(tmp_path / "sample", is_sample=True)
    assert whole.keys() == sample.keys() > {"natten_jax", "kernels_sm80", "kernels_sm90"}
    sampled: list[str] = []
    templates: set[str] = set()
    for target, sources in whole.items():
        assert {each for each in sources if not Path(each).is_absolute()} == {
            each for each in sample[target] if not Path(each).is_absolute()
        }
        templates |= {template for template, _ in instances(sources)}
        sampled += [template for template, _ in instances(sample[target])]
        assert set(instances(sample[target])) <= set(instances(sources))
    files = {path.relative_to(CSRC).as_posix() for path in CSRC.rglob("*_instances.cuh")}
    assert templates == files and len(files) > 15
    assert sorted(sampled) == sorted(files)


def test_kernels_are_compiled_by_a_launcher_that_refuses_what_ptxas_ignores(tmp_path: Path) -> None:
    assert printed(tmp_path, is_sample=False)["launcher"] == ["sh", str(REFUSE_IGNORED)]


#: Output of ptxas 13.0 for `setmaxnreg` in a kernel without a number of blocks per multiprocessor.
IGNORED = "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count"
ACCEPTED = "ptxas info    : Used 168 registers, used 2 barriers"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize(("line", "status"), [(IGNORED, 0), (ACCEPTED, 0), (ACCEPTED, 3), (IGNORED, 3)])
def test_a_compilation_fails_where_ptxas_ignored_something(line: str, status: int, stream: str, tmp_path: Path) -> None:
    compiler = tmp_path / "nvcc"
    redirection = ">&2" if stream == "stderr" else ""
    compiler.write_text(f'#!/bin/sh\necho "{line}" {redirection}\necho object > "$4"\nexit {status}\n')
    compiler.chmod(0o755)
    built = tmp_path / "kernel file.o"
    command: list[str | Path] = ["sh", REFUSE_IGNORED, compiler, "-c", "kernel file.cu", "-o", built]
    # Arguments reach the compiler as they are.
    compiler.write_text(compiler.read_text().replace('"$4"', '"$4"; test "$2" = "kernel file.cu" || exit 9'))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert line in done.stderr
    is_refused = line == IGNORED and status == 0
    assert done.returncode == (1 if is_refused else status)
    assert built.exists() == (not is_refused)
    assert ("ptxas ignored part of the source" in done.stderr) == is_refused
