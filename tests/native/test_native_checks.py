"""Native handlers trust nothing: what XLA never hands over, and arrays that are larger than the suite's machines."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a program says that calls the checks, line by line."""
    program = tmp_path_factory.mktemp("native") / "checks"
    compiler = (sysconfig.get_config_var("CXX") or "g++").split()[0]
    sources = [
        ROOT / "tests/native/native_checks.cpp",
        *(ROOT / "csrc/ffi" / f"{n}.cpp" for n in ("decode", "handler_support")),
    ]
    includes = [ROOT / "csrc", ROOT / "csrc/include", jax.ffi.include_dir()]
    command = [compiler, "-std=c++17", *(f"-I{each}" for each in includes), *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()


def test_arrays_begin_at_multiples_of_what_kernels_copy_at_a_time(answers: list[str]) -> None:
    rule = "past a multiple of 16 bytes, but must begin at such a multiple"
    assert answers[:6] == [
        "accepted",
        f"natten_jax: query begins 2 bytes {rule}",
        f"natten_jax: key begins 8 bytes {rule}",
        f"natten_jax: value begins 4 bytes {rule}",
        "accepted",
        f"natten_jax: result dkey begins 2 bytes {rule}",
    ]


def test_numbers_of_32_bits_hold_what_kernels_of_small_windows_count_in_them(answers: list[str]) -> None:
    token = "query has 8388608 heads, with which a token has 2^31 bytes or more"
    assert answers[6:] == [
        *("accepted", "accepted"),
        *(token, "accepted"),
        *("accepted", "query has 2^31 heads of all its tokens or more"),
        *("accepted", "additional_keys has 2^31 heads of all its tokens or more"),
    ]
