"""The Blackwell kernels in JAX's interpreter for Mosaic GPU kernels, where this JAX has it.

Memory is full of NaN until it is written to, races between threads, copies and products raise, and a kernel must not
end before its copies and barriers are done with.
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
    """Run kernels in the interpreter, in direct calls of the backend; its state is put back after an exception."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jax.experimental.pallas import mosaic_gpu as plgpu

    parameters = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    try:
        with plgpu.force_gpu_interpret_mode(parameters):
            yield
    except BaseException:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
        raise
