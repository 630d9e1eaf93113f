"""The native libraries as the dynamic linker sees them: what they offer, what they need, how they are hardened."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from natten_jax.native import module as native

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
