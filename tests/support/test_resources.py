"""Test processes share the machine."""

from __future__ import annotations

import pytest

from tests.support.programs import output_of, run_python
from tests.support.resources import COMPILER_FLAG, is_known, limits, threads_each


@pytest.mark.parametrize(("processors", "processes", "threads"), [(2, 1, 4), (2, 2, 2), (16, 12, 3), (4, 64, 2)])
def test_threads_keep_the_processors_busy_and_are_never_one(processors: int, processes: int, threads: int) -> None:
    assert threads_each(processors, processes) == threads


def test_one_process_has_all_processors() -> None:
    assert limits({}, 16, 1) == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def test_limits_leave_what_is_set() -> None:
    given = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "PJRT_NPROC": "7", "XLA_FLAGS": "--xla_dump_to=/nowhere"}
    found = limits(given, 16, 8)
    assert found.pop("XLA_FLAGS", "").split()[0] == "--xla_dump_to=/nowhere"
    assert found == {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    assert "XLA_FLAGS" not in limits({"XLA_FLAGS": "--xla_gpu_force_compilation_parallelism=4"}, 16, 8)


def test_unknown_flags_of_xla_are_told_from_known_ones() -> None:
    assert not is_known("--xla_no_such_flag=1")
    assert is_known("--xla_cpu_multi_thread_eigen=true")


def test_limits_are_in_force() -> None:
    found = limits({}, 4, 4)
    program = "import jax, os; jax.devices(); print(sum('XLAEigen' in open(f'/proc/self/task/{t}/comm').read()"
    program += " for t in os.listdir('/proc/self/task')))"
    assert COMPILER_FLAG in found.get("XLA_FLAGS", "") or not is_known(COMPILER_FLAG)
    for threads in ("2", "5"):
        environment = {**found, "PJRT_NPROC": threads}
        assert int(output_of(run_python(program, environment=environment, fresh=True))) == int(threads)
