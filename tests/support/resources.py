"""Resource limits of a test process: a limited number of threads, and no preallocation of GPU memory.

Without limits, each of a dozen processes would start threads for all processors and allocate most of the GPU's memory.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

#: XLA flag that limits GPU compilation to one thread. It is set only if the installed jaxlib supports it, because XLA
#: ends the process if a flag is unknown.
COMPILER_FLAG = "--xla_gpu_force_compilation_parallelism=1"
#: Minimum number of threads of a process. With fewer, tests would not cover multithreaded CPU kernels.
LEAST_THREADS = 2


def threads_each(processors: int, processes: int) -> int:
    """Return the number of threads per process. All processes together have at least two threads per processor."""
    return max(LEAST_THREADS, -(-2 * processors // processes))


def limits(environment: Mapping[str, str], processors: int, processes: int) -> dict[str, str]:
    """Return environment variables that limit a test process, except those that ``environment`` already contains.

    Args:
        environment: Current environment variables.
        processors: Number of processors of the machine.
        processes: Number of test processes that share the machine.
    """
    threads = str(threads_each(processors, processes))
    wanted = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if processes > 1:
        wanted |= {"PJRT_NPROC": threads, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    missing = {name: value for name, value in wanted.items() if name not in environment}
    flags = environment.get("XLA_FLAGS", "")
    if processes > 1 and COMPILER_FLAG.partition("=")[0] not in flags and known([COMPILER_FLAG]):
        missing["XLA_FLAGS"] = f"{flags} {COMPILER_FLAG}".strip()
    return missing


def known(flags: Sequence[str]) -> list[str]:
    """Return those XLA flags of ``flags`` that the installed jaxlib supports.

    A separate process tries all flags: XLA prints unknown flags and ends the process.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    program = [sys.executable, "-c", "import jax; jax.devices()"]
    try:
        started = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    except OSError:  # an interpreter under emulation cannot start processes
        return []
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", started.stderr)
    if started.returncode and unknown is None:
        return []
    return [flag for flag in flags if unknown is None or flag not in unknown[1].split()]
