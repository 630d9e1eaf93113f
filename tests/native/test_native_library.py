"""The native libraries: symbols, CUDA version, calls whose results alias operands, and memory for bias gradients."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax import backends
from natten_jax.doctor import __main__ as doctor
from natten_jax.native import module as native
from natten_jax.native.module import ResultType, axis_rows, call
from natten_jax.performance import PASSES, Pass
from natten_jax.plan.devices import Device
from natten_jax.problem import problem_of
from natten_jax.windows import Edge
from tests.support import oracle

# Dynamic linking of the native libraries: exported symbols, dependencies, and hardening.


SOURCES = Path(__file__).parents[2] / "csrc"

LIBRARIES = ("_native", "libnatten_jax")


def file_of(library: str) -> Path:
    """Return the path of an installed native library."""
    path = native.path()
    assert path is not None, native.load_error
    return Path(path) if library == "_native" else Path(path).with_name("libnatten_jax.so")


def readelf(library: str, *options: str) -> str:
    """Return the output of ``readelf`` for a library. ``readelf`` is installed with every compiler."""
    command = ["readelf", "--wide", *options, str(file_of(library))]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def dynamic_symbols(library: str) -> dict[str, bool]:
    """Return the library's dynamic symbols by name: True if the library defines the symbol, False if it imports it."""
    symbols = {}
    for line in readelf(library, "--dyn-syms").splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].rstrip(":").isdigit():
            symbols[fields[7].partition("@")[0]] = fields[6] != "UND"
    return symbols


@pytest.mark.parametrize("library", LIBRARIES)
def test_only_required_symbols_are_exported(library: str) -> None:
    """Libraries export only the symbols in ``allowed``.

    Exported weak symbols of C++ standard library templates would be shared with all other libraries in the process.
    """
    exported = [name for name, is_defined in dynamic_symbols(library).items() if is_defined]
    allowed = r"PyInit__native" if library == "_native" else r"_ZN10natten_jax(7targets|10build_info|12cuda_devices)\w*"
    assert exported
    assert [name for name in exported if not re.fullmatch(allowed, name)] == []


def test_kernels_share_no_cpp_library() -> None:
    """The kernel library must not contain or load a C++ standard library.

    In earlier builds, each native library contained a copy. Code that formatted error messages then used the streams of
    the copy that the process had loaded first, and crashed.
    """
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
    """A module must declare that it needs no GIL. Otherwise, a free-threaded interpreter enables the GIL on import.

    The test reads the source code, because only modules for free-threaded interpreters contain the declaration.
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


# Kernels compiled with one CUDA version, and JAX plugins for the same or another CUDA version.


def install(monkeypatch: pytest.MonkeyPatch, built: str | None, plugins: Sequence[str]) -> None:
    """Simulate kernels that were compiled with CUDA ``built``, and the installed JAX ``plugins``."""
    entries = metadata.EntryPoints(metadata.EntryPoint(name, "nowhere", "jax_plugins") for name in plugins)
    info: dict[str, Any] = {"cuda_version": built, "cuda_architectures": []}
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: entries.select(group=group))
    monkeypatch.setattr(native, "build_info", lambda: info)


@pytest.mark.parametrize(
    ("built", "plugins"),
    [
        ("13.0.88", ["xla_cuda13"]),
        ("12.9.86", ["xla_cuda12"]),
        ("12.9.86", ["xla_cuda12", "xla_cuda13"]),
        ("13.0.88", []),
        ("13.0.88", ["xla_rocm7", "some_tpu"]),
        (None, ["xla_cuda13"]),
    ],
)
def test_matching_versions_print_no_message(
    built: str | None, plugins: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, built, plugins)
    assert native.mismatch() is None
    assert not [line for line in doctor._native_lines() if "Another CUDA" in line]


@pytest.mark.parametrize(("built", "plugin"), [("13.0.88", 12), ("12.9.86", 13)])
def test_the_doctor_reports_version_mismatches_with_a_remedy(
    built: str, plugin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, built, ["some_tpu", f"xla_cuda{plugin}"])
    monkeypatch.setattr(native, "load_error", None)
    (line,) = (line for line in doctor._native_lines() if "Another CUDA" in line)
    assert f"compiled with CUDA {built}" in line
    assert f"JAX is for CUDA {plugin}" in line
    assert f"NATTEN_JAX_CUDA={plugin}" in line
    assert ("driver may be too old" in line) == (plugin == 12)


# Calls whose results alias operands.


@pytest.mark.parametrize("replaces", [None, 0])
def test_in_place_results_are_not_slices_of_other_arrays(replaces: int | None) -> None:
    def function(array: jax.Array) -> jax.Array:
        part = array[:1]
        (result,) = call("natten_jax_nothing", [ResultType(part.shape, part.dtype, replaces)], part)
        return array.at[:1].set(result)

    text = jax.jit(function).lower(jnp.zeros((4, 8))).as_text()
    before, after = text.split("stablehlo.custom_call")
    expected = 0 if replaces is None else 1
    assert before.count("optimization_barrier") == after.count("optimization_barrier") == expected


# Memory for relative biases in small-window kernels. A record holds the sums of logit gradients of a query tile: one
# sum per offset between a query and a key. It has room for all offsets of a tile. The lanes of a warp read entries of
# the bias table from different banks.


#: Number of words in the header of a record.
_HEADER = 4


def offsets_of_tiles(mask: np.ndarray, tile: int) -> list[int]:
    """Return, for each query tile, the number of different offsets from its queries to the keys that they see."""
    found = []
    for first in range(0, len(mask), tile):
        queries, keys = np.nonzero(mask[first : first + tile])
        offsets = keys - queries
        found.append(int(offsets.max() - offsets.min() + 1))
    return found


@pytest.mark.parametrize("tile", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("edges", ["shift", "cut"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_records_cover_the_keys_that_tiles_see(tile: int, edges: Edge, is_causal: bool) -> None:
    if is_causal and edges == "cut":
        pytest.skip("causal windows are cut as they are")
    for extent, kernel_size, stride in itertools.product((7, 12, 33), (1, 2, 5, 7, 12, 31), (1, 2, 3, 5)):
        if kernel_size > extent or stride > kernel_size:
            continue
        problem = problem_of((extent,), kernel_size, stride, is_causal=is_causal, edges=edges)
        mask = oracle.line_mask(extent, kernel_size, stride, 1, is_causal, edges)
        found = native.bias_sums(axis_rows(problem), (1, 1, extent), (1, 1, tile), (1, 1, 8))
        # A record needs room for (number of offsets + 1) numbers: some queries store their gradients one position
        # later than the other queries.
        assert found.record - _HEADER >= max(offsets_of_tiles(mask, tile)) + 1
        assert found.tiles == -(-extent // tile)
        assert found.record <= 2 * kernel_size + 16 + _HEADER


def test_tiles_of_all_dilation_groups_are_counted() -> None:
    problem = problem_of((13, 20), (5, 3), dilation=(2, 3))
    found = native.bias_sums(axis_rows(problem), (1, 13, 20), (1, 4, 4), (1, 1, 8))
    assert found.tiles == 2 * 2 * 3 * 2
    assert found.parts == 1


@pytest.mark.parametrize("pass_", PASSES)
def test_tiles_do_not_extend_a_dimension_of_one_token(pass_: Pass) -> None:
    """Tiles have extent 1 in dimensions of one token.

    A larger tile would contain nonexistent queries, and would add the gradients of their logits to the sums.
    """
    backend, device = backends.find("cutlass-fna", "fna"), Device("cuda", (9, 0), is_present=False)
    rows = 0 if pass_ == "forward" else 1
    for layout, kernel_size in (((1, 1, 40), (1, 1, 7)), ((1, 12, 9), (1, 3, 5)), ((40, 1), (7, 1))):
        problem = dataclasses.replace(problem_of(layout, kernel_size, head_dim=32), relative_bias=True)
        assert backend.rejection(problem, device, pass_) is None
        for pair in backend.tile_pairs(problem, device, pass_):
            assert all(tile == 1 for tile, extent in zip(pair[rows], layout, strict=True) if extent == 1)


def reads_of_warp(line: int, lines: int, tile: tuple[int, ...], group: tuple[int, ...], order: tuple[int, ...]) -> int:
    """Return the maximum number of words that a warp reads from one bank of shared memory.

    The warp reads a word for each of 8 rows and each pair of columns.
    """
    pitch = (line * lines, line, 1)
    words = set()
    for row, column in itertools.product(range(8), range(0, 8, 2)):
        word = 0
        for d in order:
            word += pitch[d] * (column % group[d] - row % tile[d])
            row, column = row // tile[d], column // group[d]
        words.add(word)
    return max(collections.Counter(word % 32 for word in words).values())


@pytest.mark.parametrize(
    ("kernel_size", "tile", "group", "order", "expected"),
    [
        ((7, 7), (1, 2, 8), (1, 8, 1), (1, 2, 0), 20),
        ((7, 7), (1, 8, 2), (1, 1, 8), (2, 1, 0), 24),
        ((7, 7), (1, 4, 4), (1, 1, 8), (2, 1, 0), 13),
        ((13, 13), (1, 4, 4), (1, 1, 8), (2, 1, 0), 42),
        ((4, 5, 6), (1, 4, 4), (1, 1, 8), (2, 1, 0), None),
    ],
)
def test_lanes_find_entries_in_different_banks(
    kernel_size: tuple[int, ...],
    tile: tuple[int, ...],
    group: tuple[int, ...],
    order: tuple[int, ...],
    expected: int | None,
) -> None:
    problem = problem_of((40,) * len(kernel_size), kernel_size)
    line = native.bias_line(axis_rows(problem), tile, group)
    *_, plane_offsets, own = (2 * k - 1 for k in kernel_size)
    assert expected is None or line == expected
    assert reads_of_warp(line, plane_offsets, tile, group, order) == 1
    assert all(reads_of_warp(shorter, plane_offsets, tile, group, order) > 1 for shorter in range(own, line))


def test_lines_of_one_line_are_not_filled_up() -> None:
    assert native.bias_line(axis_rows(problem_of((300,), 40)), (1, 1, 16), (1, 1, 8)) == 79
