"""The native libraries as the dynamic linker sees them: what they offer, what they need, how they are hardened."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from natten_jax.native import module as native

SOURCES = Path(__file__).parents[2] / "csrc"
LIBRARIES = ("_native", "libnatten_jax")


def file_of(library: str) -> Path:
    """Where a library of this installation lies."""
    module = native.path()
    assert module is not None, native.load_error
    return Path(module) if library == "_native" else Path(module).with_name("libnatten_jax.so")


def readelf(library: str, *options: str) -> str:
    """What binutils, a part of every compiler, say of a library."""
    command = ["readelf", "--wide", *options, str(file_of(library))]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def dynamic_symbols(library: str) -> dict[str, bool]:
    """Names, and whether the library defines them."""
    symbols = {}
    for line in readelf(library, "--dyn-syms").splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].rstrip(":").isdigit():
            symbols[fields[7].partition("@")[0]] = fields[6] != "UND"
    return symbols


@pytest.mark.parametrize("library", LIBRARIES)
def test_nothing_needless_is_exported(library: str) -> None:
    """Weak copies of the C++ library's templates would be shared with every other library of the process."""
    exported = [name for name, is_defined in dynamic_symbols(library).items() if is_defined]
    allowed = r"PyInit__native" if library == "_native" else r"_ZN10natten_jax(7targets|10build_info|12cuda_devices)\w*"
    assert exported
    assert [name for name in exported if not re.fullmatch(allowed, name)] == []


def test_kernels_share_no_cpp_library() -> None:
    """Its error messages went through the streams of whichever copy a process had loaded first, and crashed."""
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("libnatten_jax", "--dynamic"))
    assert needed
    assert not [name for name in needed if "stdc++" in name or "gcc_s" in name]
    foreign = [name for name, is_defined in dynamic_symbols("libnatten_jax").items() if not is_defined]
    assert not [name for name in foreign if name.startswith(("_ZNSt", "_ZSt", "_ZNKSt", "__cxa_throw"))]


@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_are_hardened(library: str) -> None:
    assert "GNU_RELRO" in readelf(library, "--program-headers")
    assert re.search(r"GNU_STACK(\s+0x\w+){5}\s+RW\s", readelf(library, "--program-headers"))
    assert re.search(r"BIND_NOW|\(FLAGS_1\).*NOW", readelf(library, "--dynamic"))
    assert "__stack_chk_fail" in dynamic_symbols(library)


@pytest.mark.skipif(not SOURCES.is_dir(), reason="there is no clone")
def test_every_module_declares_that_it_needs_no_gil() -> None:
    """A free-threaded interpreter enables its GIL again when it imports a module without this declaration.

    Modules for other interpreters do not have it in their machine code, so that this reads the source.
    """
    texts = [path.read_text() for path in SOURCES.rglob("*.cpp")]
    modules = [options for text in texts for options in re.findall(r"^PYBIND11_MODULE\((.*)\) \{", text, re.MULTILINE)]
    assert len(modules) == 1
    assert all(module.endswith(", py::mod_gil_not_used()") for module in modules)


@pytest.mark.skipif(getattr(sys, "_is_gil_enabled", lambda: True)(), reason="this interpreter has a GIL")
def test_a_free_threaded_interpreter_stays_without_a_gil() -> None:
    program = (
        "import importlib.util, sys",
        "spec = importlib.util.spec_from_file_location('_native', sys.argv[1])",
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))",
        "assert not sys._is_gil_enabled()",
    )
    subprocess.run([sys.executable, "-c", "\n".join(program), str(file_of("_native"))], check=True)
