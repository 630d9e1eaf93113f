"""Run the Blackwell kernels in JAX's interpreter for Mosaic GPU kernels, if this JAX release has it.

Memory is NaN until it is written. The interpreter raises if threads, copies or matrix products race. It also requires
that all copies and barriers of a kernel have completed when the kernel ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import pytest

from natten_jax.backends.pallas.blackwell import missing_in_jax

needs_interpreter = pytest.mark.skipif(
    missing_in_jax() is not None, reason=f"JAX {jax.__version__} has no interpreter that runs tcgen05 products"
)


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Interpret the kernels of direct backend calls. Reset the interpreter's state after an exception."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jax.experimental.pallas import mosaic_gpu as plgpu

    parameters = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    try:
        with plgpu.force_gpu_interpret_mode(parameters):
            yield
    except BaseException:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
        raise
