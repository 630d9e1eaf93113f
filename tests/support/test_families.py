"""Tests of which families a device runs."""

from __future__ import annotations

import pytest

from natten_jax.plan.devices import Device
from tests.support.families import FAMILIES


@pytest.mark.parametrize(
    ("device", "kernels"),
    [
        (Device("cpu", None), {"cpu"}),
        (Device("cuda", (7, 5)), set()),
        (Device("cuda", (8, 0)), {"cutlass"}),
        (Device("cuda", (9, 0)), {"cutlass", "hopper"}),
        (Device("cuda", (10, 0)), {"cutlass", "blackwell"}),
    ],
)
def test_a_device_runs_its_kernels_and_plain_jax(device: Device, kernels: set[str]) -> None:
    assert {family.name for family in FAMILIES if family.runs_on(device)} == {"flex", *kernels}
