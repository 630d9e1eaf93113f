"""``--devices`` and ``--split``: a problem sharded over several devices, and its collectives."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from natten_jax.profiler import Row, capture, parse, report, symbols
from natten_jax.profiler.capture import CaptureError, Event
from natten_jax.profiler.program import Program
from tests.support.meshes import mesh_of, put
from tests.support.native_programs import needs_native
from tests.support.traces import rows_by_module

from .conftest import Profiler

PROBLEM = "-i 6 8 -w 3 5 -b 8 -n 8 -d 16 --dtype fp32 --warmup-steps 1 --iterations 3"

#: Each row: flags, sizes of a device's shard (batch, heads, key/value heads), and kinds of collectives in an iteration.
RUNS: tuple[tuple[str, tuple[int, int, int], Iterable[str]], ...] = (
    ("--devices 8 --backprop", (1, 8, 8), {}),
    ("--devices 4 --split heads --backprop", (8, 2, 2), {}),
    # The only key/value head is on every device, so its gradients are summed over the devices.
    ("--devices 4 --split heads --heads-kv 1 --backprop", (8, 2, 1), {"all-reduce"}),
    ("--devices 4 --split heads --heads-kv 2 --backprop --add-kv 3", (8, 2, 1), {"all-reduce"}),
    ("--devices 2 --split heads --heads-kv 1", (8, 4, 1), {}),
    ("--devices 4 --backend flex-fna", (2, 8, 8), {}),
    ("--devices 8 --split heads --compare xla", (8, 1, 1), {}),
    ("--devices 6 --split H,W --backprop", (8, 8, 8), {"collective-permute"}),
)
#: Index of the element of ``RUNS`` whose trace is kept.
TRACED = 2


@needs_native
def test_a_problem_is_split_over_the_hosts_devices(tmp_path: Path, profiler: Profiler) -> None:
    for i, (flags, share, collectives) in enumerate(RUNS):
        output, _, found = profiler(f"{PROBLEM} {flags}" + f" --trace-dir {tmp_path}" * (i == TRACED))
        options = parse([*PROBLEM.split(), *flags.split()])
        each = options.sub_calls_per_device()[0].request.problem
        assert (each.batch, each.heads, each.heads_kv) == share
        assert (found["devices"]["count"], found["devices"]["split"]) == (options.devices, options.split)
        assert f"{options.devices} devices, split over {options.split}" in output
        assert f"device {found['devices']['busiest']}, the busiest of {options.devices}" in output
        collective_operations = {row["operation"] for row in found["rows"] if row["category"] == "collective"}
        assert collective_operations == set(collectives), flags
        assert ("Collectives: none" in output) == (not collectives)
        check_times(found, options.devices)
        # The rows show one device, which launches every kernel once per iteration.
        kernels = {row["operation"]: row["calls"] for row in found["rows"] if row["category"] == "attention"}
        assert set(kernels.values()) <= {1}
        if "flex" not in flags:
            assert set(kernels) == {"FnaForward", "FnaBackward"} if options.backprop else {"FnaForward"}
    message = profiler(f"{PROBLEM} -b 9 --devices 9", status=1).err.splitlines()[-1]
    assert "--devices 9 is more than there are here: 8 (cpu)" in message
    assert "JAX_NUM_CPU_DEVICES=9" in message
    # The kept trace has three iterations, and its rows show one device.
    calls = {row.name.operation: row.calls for row in rows_by_module(tmp_path)["jit_profiled_0"]}
    assert [calls[name] for name in ("FnaForward", "FnaBackward", "all-reduce")] == [3, 3, 3]


def check_times(found: dict[str, Any], devices: int) -> None:
    times, busiest = found["devices"]["iteration_times"], str(found["devices"]["busiest"])
    assert len(times) == devices and all(len(each) == 3 for each in times.values())
    medians = {device: statistics.median(each) for device, each in times.items()}
    assert medians[busiest] == max(medians.values()) == found["totals"]["median"]
    assert found["iteration_times"] == times[busiest]
    rows = [math.fsum(runtimes) for runtimes in zip(*(row["runtimes"] for row in found["rows"]), strict=True)]
    assert rows == pytest.approx(found["iteration_times"])


# Traces.


def gpu_profile(devices: int) -> Any:
    """Return a profile in which each GPU runs two iterations of a kernel, an all-reduce and copies.

    Kernel times increase with the GPU index.
    """

    def event(name: str, start: float, end: float, instruction: str) -> Any:
        stats = [("hlo_op", instruction), ("hlo_module", "jit_f")]
        return SimpleNamespace(name=name, start_ns=start, end_ns=end, duration_ns=end - start, stats=stats)

    def plane(device: int) -> Any:
        kernels, exchanges = [], []
        for start in (0.0, 1000.0):
            end = start + 100 * (device + 1)
            kernels.append(event("natten_jax_fna_forward", start, end, "ffi_call.0"))
            exchanges.append(event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(Args)", end, end + 50, "all-reduce-start"))
            exchanges.append(event("MemcpyP2P", end + 50, end + 60, "collective-permute-start.1"))
            exchanges.append(event("MemcpyD2D", end + 60, end + 90, "copy.1"))
        lines = [SimpleNamespace(name="Stream #1", events=kernels), SimpleNamespace(name="Stream #2", events=exchanges)]
        return SimpleNamespace(name=f"/device:GPU:{device}", lines=lines)

    return SimpleNamespace(planes=[*map(plane, range(devices)), SimpleNamespace(name="/host:CPU", lines=[])])


def captured(monkeypatch: pytest.MonkeyPatch, devices: int, expected: int) -> capture.Devices:
    monkeypatch.setattr(capture.time, "sleep", lambda _: None)
    monkeypatch.setattr(capture, "_trace", lambda *_: gpu_profile(devices))
    launch = capture.Launch(lambda: None, Program("jit_f", {}, expected))
    (found,) = capture.capture_by_device([launch], 2, "cuda")
    return found


def test_gpus_are_read_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    found = captured(monkeypatch, 4, 4)
    assert sorted(found) == [0, 1, 2, 3]
    for device, iterations in found.items():
        for launched in iterations:
            assert [each.duration for each in launched] == [100.0 * (device + 1), 50.0, 10.0]
    assert capture.busiest(found) == 3


def test_a_trace_that_lacks_devices_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CaptureError, match="18 events cannot be attributed to 2 iterations on 8 devices"):
        captured(monkeypatch, 3, 8)


def test_the_busiest_device_is_that_of_the_longest_median() -> None:
    def iterations(*times: float) -> list[list[Event]]:
        return [[Event("a", "a", "", 0.0, time / 2), Event("b", "b", "", 0.0, time / 2)] for time in times]

    assert capture.busiest({0: iterations(1, 1, 90), 3: iterations(2, 2, 2), 7: iterations(9, 1, 1)}) == 3


def test_programs_report_their_number_of_devices() -> None:
    split = put(jnp.ones((8, 8)), mesh_of("Auto", d=4), "d")
    functions = (jax.jit(jnp.sin), jnp.ones(8)), (jax.jit(jnp.sin), split), (jax.pmap(jnp.sin), jnp.ones(8))
    compiled = [function.lower(array).compile() for function, array in functions]
    assert [Program.from_compiled(each).devices for each in compiled] == [1, 4, 8]


def test_collectives_stay_in_tables_that_are_cut() -> None:
    names = [symbols.Name("XLA", "elementwise", "-", f"step {i}") for i in range(30)]
    names.append(symbols.Name("NCCL", "collective", "-", "all-reduce"))
    rows = tuple(Row(name, 1, (1.0 / (i + 1),), ()) for i, name in enumerate(names))
    table = report.rows_table(rows, "Trace", cut=True)
    assert len(table.rows) == 20
    assert "all-reduce" in {row[3] for row in table.rows}


@pytest.mark.parametrize(
    ("split", "described"), [("heads", "8 devices, split over heads"), ("T,W", "8 devices, split over T,W (T in ")]
)
def test_simulates_several_devices(split: str, described: str, profiler: Profiler) -> None:
    video = "-i 32 48 80 -n 24 -d 128 -w 6 24 8 --simulate --compute-capability 9.0 --backprop"
    output, _, saved = profiler(f"{video} --devices 8 --split {split}")
    output = " ".join(output.split())
    assert described in output and "an efficiency of" in output
    assert (saved["devices"]["count"], saved["devices"]["split"]) == (8, split)
    for pass_, figures in saved["devices"]["passes"].items():
        one = saved["passes"][pass_]["predicted_seconds"]
        assert one / 9 < figures["predicted_seconds"] < one / 2
        assert (figures["received"] > 0) == (split != "heads")
