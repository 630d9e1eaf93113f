"""What a test process takes of the machine: its share of the processors, and no more of a GPU's memory than it uses.

Without this each of a dozen processes would start threads for all processors, and claim most of the GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

#: Keeps a compilation for a GPU on one thread. A flag that this release of jaxlib does not know would end the process.
COMPILER_FLAG = "--xla_gpu_force_compilation_parallelism=1"
#: The least threads of a process, or else nothing would show that kernels of the CPU run on several.
LEAST_THREADS = 2


def threads_each(processors: int, processes: int) -> int:
    """Threads that each of the processes may keep busy; together they keep the processors busy, too."""
    return max(LEAST_THREADS, -(-2 * processors // processes))


def limits(environment: Mapping[str, str], processors: int, processes: int) -> dict[str, str]:
    """Environment variables of a test process, as far as ``environment`` does not set them.

    Args:
        environment: The variables that are set.
        processors: Processors of the machine.
        processes: Test processes that share it.
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
    """The flags of XLA that the installed jaxlib has. A process with others ends at once, and prints them."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    program = [sys.executable, "-c", "import jax; jax.devices()"]
    try:
        started = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    except OSError:  # an emulated interpreter of another machine starts no processes
        return []
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", started.stderr)
    if started.returncode and unknown is None:
        return []
    return [flag for flag in flags if unknown is None or flag not in unknown[1].split()]
