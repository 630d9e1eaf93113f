"""The compute capabilities that configuration queries answer for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import natten_jax
from natten_jax.ops.config_queries import target_device
from natten_jax.plan.devices import Device, default_device, parse_compute_capability
from tests.support.families import Family

ACCEPTED = {
    "text": ("9.0", (9, 0)),
    "two-digits": ("10.3", (10, 3)),
    "tuple": ((9, 0), (9, 0)),
    "list": ([9, 0], (9, 0)),
    "numpy": (np.array([12, 1]), (12, 1)),
    "jax": (jnp.array([8, 6]), (8, 6)),
    "numpy-integers": ((np.int32(9), np.int8(0)), (9, 0)),
    "float": (9.0, (9, 0)),
    "decimal": (12.1, (12, 1)),
    "float32": (np.float32(8.6), (8, 6)),
    "float64": (np.float64(10.3), (10, 3)),
}
REFUSED = {
    "letter": "x",
    "empty": "",
    "no-minor": "9",
    "target": "90",
    "arch": "sm_90",
    "suffix": "9.0a",
    "blank": " 9.0",
    "comma": "9,0",
    "trailing-dot": "9.",
    "leading-dot": ".9",
    "long-minor": "9.75",
    "three": "9.0.1",
    "underscore": "1_0.0",
    "other-digits": "\u0669.\u0660",
    "sign": "-9.0",
    "zero": "0.9",
    "huge": "9" * 5000 + ".0",
    "int": 9,
    "target-int": 90,
    "huge-int": 10**5000,
    "bool": True,
    "bytes": b"9.0",
    "nan": float("nan"),
    "inf": float("inf"),
    "negative": -9.0,
    "fraction": 8.65,
    "tiny": 1e-9,
    "one": (9,),
    "none-of-it": (),
    "three-of-them": (9, 0, 0),
    "minor-of-two-digits": (9, 10),
    "negative-minor": (9, -1),
    "zero-major": (0, 0),
    "huge-major": (10**9, 0),
    "floats": (9.0, 0.0),
    "float-array": np.array([9.0, 0.0]),
    "strings": ("9", "0"),
    "bools": (True, False),
    "nested": ((9, 0),),
    "mapping": {"major": 9, "minor": 0},
    "set": {9, 0},
    "type": Device,
}


@pytest.mark.parametrize(("value", "expected"), ACCEPTED.values(), ids=ACCEPTED)
def test_unambiguous_ones_are_accepted(value: Any, expected: tuple[int, int]) -> None:
    device = target_device(value)
    assert device == Device("cuda", expected, is_present=False)
    assert hash(device) == hash(Device("cuda", expected, is_present=False))


def test_none_is_the_default_device() -> None:
    assert target_device(None) == default_device()


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_all_else_is_refused_in_one_sentence(value: Any, family: Family) -> None:
    array = jax.ShapeDtypeStruct((1, 40, 2, 16), jnp.dtype(family.dtype))
    for operator in ("fna", "fmha"):
        with pytest.raises(
            (TypeError, ValueError), match=r"^compute_capability must be .*\"9\.0\".*\(9, 0\)"
        ) as caught:
            family.query(operator, "forward")(array, compute_capability=value)
        assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_types_are_type_errors_and_values_value_errors() -> None:
    array = jax.ShapeDtypeStruct((1, 40, 2, 16), jnp.float16)
    for value, error in (
        (b"9.0", TypeError),
        ({}, TypeError),
        ((9.0, 0), TypeError),
        (9, TypeError),
        ("x", ValueError),
    ):
        with pytest.raises(error):
            natten_jax.get_configs_for_cutlass_fna(array, compute_capability=value)


@given(st.integers(1, 99), st.integers(0, 9))
def test_all_spellings_are_equal(major: int, minor: int) -> None:
    text = f"{major}.{minor}"
    assert parse_compute_capability(text) == (major, minor)
    values: tuple[Any, ...] = (text, float(text), np.float32(text), (major, minor), [major, minor])
    for value in (*values, np.array([major, minor])):
        assert target_device(value).compute_capability == (major, minor)


@given(st.text(max_size=8))
def test_text_is_parsed_or_refused(text: str) -> None:
    try:
        major, minor = parse_compute_capability(text)
    except ValueError as error:
        assert repr(text) in str(error)
    else:
        assert text == f"{major}.{minor}"
