"""C++ test programs (argument checks, denormals, small-window kernels), and linker options of the build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import jax
import pytest

from tests.support.native_programs import COMPILER, ROOT, output_of

# Argument checks of the native handlers, also for arguments that XLA never passes and for arrays that do not fit in
# memory.


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the lines that the program ``native_checks`` prints: the result of each check."""
    sources = [f"ffi/{name}.cpp" for name in ("decode", "handler_support")]
    folder = tmp_path_factory.mktemp("native")
    return output_of("native_checks", sources, folder, includes=[jax.ffi.include_dir()]).splitlines()


def test_arrays_are_aligned_to_the_copy_size_of_kernels(answers: list[str]) -> None:
    rule = "past a multiple of 16 bytes, but must begin at such a multiple"
    assert answers[:6] == [
        "accepted",
        f"natten_jax: query begins 2 bytes {rule}",
        f"natten_jax: key begins 8 bytes {rule}",
        f"natten_jax: value begins 4 bytes {rule}",
        "accepted",
        f"natten_jax: result dkey begins 2 bytes {rule}",
    ]


def test_counters_of_small_window_kernels_fit_32_bits(answers: list[str]) -> None:
    token = "query has 8388608 heads, with which a token has 2^31 bytes or more"
    assert answers[6:] == [
        *("accepted", "accepted"),
        *(token, "accepted"),
        *("accepted", "query has 2^31 heads of all its tokens or more"),
        *("accepted", "additional_keys has 2^31 heads of all its tokens or more"),
    ]


# The shared memory of small-window kernels is large enough for layouts of any length.


def test_boxes_and_tables_have_room_for_layouts_of_all_lengths(tmp_path: Path) -> None:
    """In short layouts, some keys are near both ends. They need the most memory, because the most queries see them."""
    sources = [f"cuda/small/{name}.cpp" for name in ("region", "region_shape", "region_time", "ring_shape")]
    regions, *too_small = map(int, output_of("region_boxes", sources, tmp_path, options=["-O1"]).split())
    assert regions > 1000
    assert too_small == [0, 0]


# The CTAs of a ring kernel process about equal numbers of slow strips. A strip is a part of the layout that extends
# from one end to the other.


def test_no_cta_has_many_of_the_strips_that_take_longest(tmp_path: Path) -> None:
    """Strips next to a border (border strips) take longer than others.

    The assignment of strips to CTAs rotates from round to round. The test counts the border strips of each CTA. The
    largest count must be at most the average, rounded up, plus one. For each layout, it must be at most the largest
    count without rotation. For some layouts, it must be smaller.
    """
    sources = [f"cuda/small/{name}.cpp" for name in ("ring_balance", "ring_shape")]
    output = output_of("ring_rotation", sources, tmp_path, options=["-O1"])
    layouts = [tuple(map(int, line.split())) for line in output.splitlines()]
    assert len(layouts) == 6
    for average, most, most_without, wrong in layouts:
        assert wrong == 0
        assert most <= most_without
        assert most <= average + 1
    assert any(most < most_without for _, most, most_without, _ in layouts)


# CPU kernels flush denormals on every thread that they use. Afterwards, they restore the floating-point mode of each
# thread.


#: Compiler command and emulator command for each target machine. The emulator runs the compiled program.
TOOLCHAINS = {"this": ([COMPILER], []), "aarch64": (["aarch64-linux-gnu-g++", "-static"], ["qemu-aarch64"])}


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


#: CMake definition of the only function of pybind11 that the build calls. pybind11 is installed only during builds.
PYBIND11 = "function(pybind11_add_module name)\n  add_library(${name} MODULE ${ARGN})\nendfunction()\n"

#: Strings that occur only in linker options for the GNU linker and GNU libraries.
GNU = ("-Wl,-z", "version-script", "gc-sections", "exclude-libs", "-static-libstdc++", "-static-libgcc", "$ORIGIN")

#: CMake code with settings that CMake would detect on a Mac.
ASKED = "".join(f"set(CMAKE_SHARED_LIBRARY_RUNTIME_{language}_FLAG -Wl,-rpath,)\n" for language in ("C", "CXX"))

#: CMake variables for macOS as the target. Programs for macOS cannot be linked on other systems. CMake's checks
#: therefore only build static libraries. ``true`` replaces the tool that edits installed libraries.
MACOS = {
    "CMAKE_SYSTEM_NAME": "Darwin",
    "CMAKE_SYSTEM_PROCESSOR": "arm64",
    "CMAKE_TRY_COMPILE_TARGET_TYPE": "STATIC_LIBRARY",
    "CMAKE_INSTALL_NAME_TOOL": "/bin/true",
}


def test_the_apple_linker_gets_no_gnu_options(tmp_path: Path) -> None:
    programs = str(Path(sys.executable).parent)
    cmake = shutil.which("cmake", path=os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]))
    if cmake is None:
        pytest.skip("cmake is not installed")
    (tmp_path / "pybind11Config.cmake").write_text(PYBIND11)
    (tmp_path / "asked.cmake").write_text(ASKED)
    definitions = {
        **MACOS,
        "CMAKE_PROJECT_INCLUDE": str(tmp_path / "asked.cmake"),
        "CMAKE_CXX_COMPILER": COMPILER,
        "NATTEN_JAX_FFI_INCLUDE_DIR": jax.ffi.include_dir(),
        "Python_EXECUTABLE": sys.executable,
        "Python_INCLUDE_DIR": sysconfig.get_path("include"),
        "pybind11_DIR": str(tmp_path),
    }
    build = tmp_path / "build"
    options = [f"-D{name}={value}" for name, value in definitions.items()]
    command = [cmake, "-G", "Unix Makefiles", f"-S{ROOT / 'csrc'}", f"-B{build}", *options]
    subprocess.run(command, check=True, capture_output=True, text=True)
    library_options, module_options = (
        (build / "CMakeFiles" / f"{target}.dir" / "link.txt").read_text() for target in ("natten_jax", "_native")
    )
    assert [option for option in GNU if option in library_options + module_options] == []
    assert "-dead_strip" in library_options and "-install_name @rpath/libnatten_jax.so" in library_options
    assert "-rpath,@loader_path" in module_options
    installed = (build / "cmake_install.cmake").read_text()
    assert "libnatten_jax.so" in installed and ".dylib" not in installed
