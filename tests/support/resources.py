"""Resource limits of a test process: its share of the processors, and no preallocation of GPU memory.

Without limits, each of a dozen processes would start threads for all processors, and claim most of the GPU's memory.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

#: Keeps GPU compilation on one thread. A flag that the installed jaxlib does not support would end the process.
COMPILER_FLAG = "--xla_gpu_force_compilation_parallelism=1"
#: Minimum number of threads of a process. With fewer, tests would not cover multithreaded CPU kernels.
LEAST_THREADS = 2


def threads_each(processors: int, processes: int) -> int:
    """Return the number of threads per process; together the processes keep all processors busy."""
    return max(LEAST_THREADS, -(-2 * processors // processes))


def limits(environment: Mapping[str, str], processors: int, processes: int) -> dict[str, str]:
    """Return environment variables that limit a test process, unless ``environment`` already sets them.

    Args:
        environment: Current variables.
        processors: Number of processors of the machine.
        processes: Number of test processes that share it.
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
    """Return the XLA flags that the installed jaxlib supports: a process prints unknown flags and exits."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    program = [sys.executable, "-c", "import jax; jax.devices()"]
    try:
        started = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    except OSError:  # an emulated interpreter of another machine cannot start processes
        return []
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", started.stderr)
    if started.returncode and unknown is None:
        return []
    return [flag for flag in flags if unknown is None or flag not in unknown[1].split()]
