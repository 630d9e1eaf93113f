"""Native handlers trust nothing: what XLA never hands over, and arrays that are larger than the suite's machines."""

from __future__ import annotations

import jax
import pytest

from tests.support.native_programs import output_of


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a program says that calls the checks, line by line."""
    sources = [f"ffi/{name}.cpp" for name in ("decode", "handler_support")]
    folder = tmp_path_factory.mktemp("native")
    return output_of("native_checks", sources, folder, includes=[jax.ffi.include_dir()]).splitlines()


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
