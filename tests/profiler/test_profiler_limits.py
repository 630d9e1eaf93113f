"""Problems that are too large for the memory of the machine or of the device."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any, NamedTuple

import jax
import pytest

from natten_jax.profiler import measure, parse

from .conftest import Profiler

TOO_LARGE = "the problem is too large for this machine: its operands and results take 524,288.0 GiB, and cpu has "


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        *((f"-i {2**40} -w 3 {more}", TOO_LARGE) for more in ("", "--backend flex-fna", "--compare xla", "--optimize")),
        (f"-i {2**62} -w 3", "the problem is too large for this machine"),
    ],
)
def test_problems_that_no_memory_holds_are_one_sentence(problem: str, message: str, profiler: Profiler) -> None:
    complaint = profiler(problem, status=1).err.splitlines()[-1]
    assert complaint.startswith("natten-jax-profiler: error: ") and message in complaint


class FakeDevice(NamedTuple):
    """A GPU with ``bytes_limit`` bytes of memory. It has only the attributes that the profiler reads."""

    bytes_limit: int
    platform: str = "gpu"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_in_use": 0, "bytes_limit": self.bytes_limit}


@pytest.mark.parametrize(
    ("problem", "elements"),
    [
        ("-i 8 12 -n 6 --heads-kv 2 -d 32 --dim-value 64", 96 * (6 * 32 + 2 * (32 + 64) + 6 * 64)),
        ("-i 96 -n 2 -d 16 --add-kv 5", 2 * 16 * (4 * 96 + 2 * 5)),
        ("-i 96 -n 2 -d 16 --add-kv 5 --backprop", 2 * 2 * 16 * (4 * 96 + 2 * 5)),
    ],
)
def test_operands_and_results_fit_the_memory_of_the_device(
    problem: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype, width in (("bf16", 2), ("fp32", 4)):
        options = parse([*problem.split(), "--dtype", dtype])
        needed = elements * width
        monkeypatch.setattr(measure, "default_jax_device", lambda needed=needed: FakeDevice(needed))
        measure.check_fits(options)
        monkeypatch.setattr(measure, "default_jax_device", lambda needed=needed: FakeDevice(needed - 1))
        with pytest.raises(MemoryError, match="its operands and results take"):
            measure.check_fits(options)


def test_devices_hold_their_share_and_parts_of_the_host_all(monkeypatch: pytest.MonkeyPatch) -> None:
    options = dataclasses.replace(parse(["-i", "64", "--batch-size", "4", "--dtype", "fp32"]), devices=4)
    array_bytes = 4 * 64 * 64 * 4
    mesh = jax.sharding.AbstractMesh((4,), ("devices",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))
    monkeypatch.setattr(measure, "sharding_of", lambda options, shape: sharding)
    with monkeypatch.context() as on_gpus:
        on_gpus.setattr(measure, "default_jax_device", lambda: FakeDevice(array_bytes))
        measure.check_fits(options)
    for pages, expected in (
        (4 * array_bytes, contextlib.nullcontext()),
        (4 * array_bytes - 1, pytest.raises(MemoryError)),
    ):
        monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": pages}.__getitem__)
        with expected:
            measure.check_fits(options)


@pytest.mark.parametrize("mode", ["", "--optimize", "--compare xla", "--backprop"])
def test_problems_that_do_not_fit_are_rejected_before_allocation(
    mode: str, profiler: Profiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("XLA was asked")

    monkeypatch.setattr(measure, "make_inputs", fail)
    monkeypatch.setattr(jax, "jit", fail)
    monkeypatch.setattr(measure, "default_jax_device", lambda: FakeDevice(1 << 10))
    complaint = profiler(f"-i 8 -w 3 {mode}", status=1).err.splitlines()[-1]
    assert complaint == (
        "natten-jax-profiler: error: the problem is too large for this machine: "
        "its operands and results take 0.0 GiB, and cpu has 0.0 GiB"
    )
