"""What the build asks of compilers and linkers on macOS, as CMake writes it down; nothing is compiled here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import jax
import pytest

from tests.support.native_programs import COMPILER, ROOT

#: In place of pybind11, which only builds have.
PYBIND11 = "function(pybind11_add_module name)\n  add_library(${name} MODULE ${ARGN})\nendfunction()\n"

#: Options of GNU's linker and libraries.
GNU = ("-Wl,-z", "version-script", "gc-sections", "exclude-libs", "-static-libstdc++", "-static-libgcc", "$ORIGIN")


#: What CMake finds out by asking a Mac, as lines of its language.
ASKED = "".join(f"set(CMAKE_SHARED_LIBRARY_RUNTIME_{language}_FLAG -Wl,-rpath,)\n" for language in ("C", "CXX"))

#: No program for macOS can be linked here, and none is changed afterwards.
MACOS = {
    "CMAKE_SYSTEM_NAME": "Darwin",
    "CMAKE_SYSTEM_PROCESSOR": "arm64",
    "CMAKE_TRY_COMPILE_TARGET_TYPE": "STATIC_LIBRARY",
    "CMAKE_INSTALL_NAME_TOOL": "/bin/true",
}


def link_commands(folder: Path, **system: str) -> dict[str, str]:
    """How the libraries are linked on this system, or on another one."""
    programs = str(Path(sys.executable).parent)
    cmake = shutil.which("cmake", path=os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]))
    if cmake is None:
        pytest.skip("cmake is not installed")
    (folder / "pybind11Config.cmake").write_text(PYBIND11)
    definitions = {
        **system,
        "CMAKE_CXX_COMPILER": COMPILER,
        "NATTEN_JAX_FFI_INCLUDE_DIR": jax.ffi.include_dir(),
        "Python_EXECUTABLE": sys.executable,
        "Python_INCLUDE_DIR": sysconfig.get_path("include"),
        "pybind11_DIR": str(folder),
    }
    command = [cmake, "-G", "Unix Makefiles", f"-S{ROOT / 'csrc'}", f"-B{folder / 'build'}"]
    subprocess.run(
        [*command, *(f"-D{name}={value}" for name, value in definitions.items())],
        check=True,
        capture_output=True,
        text=True,
    )
    targets = ("natten_jax", "_native")
    return {name: (folder / "build/CMakeFiles" / f"{name}.dir" / "link.txt").read_text() for name in targets}


def test_apples_linker_is_given_none_of_gnus_options(tmp_path: Path) -> None:
    asked = tmp_path / "asked.cmake"
    asked.write_text(ASKED)
    commands = link_commands(tmp_path, **MACOS, CMAKE_PROJECT_INCLUDE=str(asked))
    assert [option for command in commands.values() for option in GNU if option in command] == []
    assert "-dead_strip" in commands["natten_jax"]
    assert "-install_name @rpath/libnatten_jax.so" in commands["natten_jax"]
    assert "-rpath,@loader_path" in commands["_native"]
    installed = (tmp_path / "build" / "cmake_install.cmake").read_text()
    assert "libnatten_jax.so" in installed and ".dylib" not in installed


def test_the_same_is_said_to_gnus_linker(tmp_path: Path) -> None:
    """Or else the test above would look for what nobody writes."""
    commands = link_commands(tmp_path)
    assert [option for option in GNU if option not in commands["natten_jax"] + commands["_native"]] == []
