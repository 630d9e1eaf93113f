"""``python -m tests.support.machine_code FOLDER NUMBER``: compile Blackwell kernels to machine code without a GPU.

Mosaic's own compiler, part of JAX's CUDA plugin, reads the GPU's compute capability from the driver, writes PTX and has
``ptxas`` assemble it. Here the driver is a stub library. It reports a GPU of compute capability 10.0, but cannot load
programs. The PTX and the output of ``ptxas`` for the kernels of problem NUMBER are written to FOLDER.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from natten_jax.performance import TilePair, tile_names
from tests.fuzz.execution import both_passes
from tests.fuzz.problem import Fuzzed
from tests.support.problems import Case

KERNELS = "natten_jax_blackwell_forward", "natten_jax_blackwell_query_gradient", "natten_jax_blackwell_key_gradients"


def direct(case: Case, dtype: str, tiles: TilePair, backward_tiles: TilePair) -> Fuzzed:
    """Return a direct call of the Blackwell kernels, with a seed that selects a grid of 148 blocks."""
    named = zip((*tile_names("forward"), *tile_names("backward")), (*tiles, *backward_tiles), strict=True)
    return Fuzzed("blackwell", case, dtype, 4, tiles=dict(named), is_direct=True)


#: One problem per rank, each with a different head dimension. The first problem has an array of scales.
PROBLEMS = (
    direct(
        Case((4096,), (1000,), (1,), (2,), is_causal=(True,), heads=2, head_dim=32, scales=(0.1, 0.1)),
        "bfloat16",
        ((256,), (128,)),
        ((128,), (128,)),
    ),
    direct(
        Case((64, 64), (33, 33), heads=2, heads_kv=2, head_dim=128), "bfloat16", ((16, 16), (16, 8)), ((16, 8), (16, 8))
    ),
    direct(
        Case((8, 32, 32), (4, 8, 8), is_causal=(True, False, False), head_dim=64),
        "float16",
        ((4, 8, 8), (2, 8, 8)),
        ((2, 8, 8), (2, 8, 8)),
    ),
)
#: Source of a stub driver library that answers the compiler's queries.
DRIVER = Path(__file__).parents[1] / "native" / "cuda_driver.c"


def missing() -> str | None:
    """Return a message that names a missing requirement, or ``None`` if all are installed."""
    try:
        plugin = importlib.util.find_spec("jax_plugins.xla_cuda13")
    except ModuleNotFoundError:
        plugin = None
    if plugin is None:
        return "jax-cuda13-pjrt is not installed"
    return next((f"there is no {tool}" for tool in ("gcc", "ptxas") if shutil.which(tool) is None), None)


def ignored(said: str) -> list[str]:
    """Return the lines that report ignored input. ``ptxas`` exits with status 0 even if it ignored some input."""
    return [line for line in said.splitlines() if line.startswith("ptxas") and "ignored" in line.lower()]


def compiled(folder: Path, number: int) -> dict[str, tuple[str, str]]:
    """Compile the kernels of problem ``number``. Return the PTX and the ``ptxas`` output of each kernel.

    Compilation runs in a subprocess, whose library path must contain the stub driver from the start.
    """
    library = folder / "libcuda.so.1"
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", "-o", str(library), str(DRIVER)], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "JAX_PLATFORMS": "cpu"}
    environment |= {"MOSAIC_GPU_DUMP_TO": str(folder), "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    subprocess.run(
        [sys.executable, "-m", __spec__.name, str(folder), str(number)], env=environment, check=False, timeout=600
    )
    return {name: (_text(folder, name, "ptx"), _text(folder, name, "ptxas")) for name in KERNELS}


def _text(folder: Path, name: str, kind: str) -> str:
    (path,) = folder.glob(f"{name}_*.{kind}")
    return path.read_text(encoding="utf-8")


def _compile(number: int) -> None:
    from jax._src.lib.mlir import ir

    traced = jax.jit(both_passes(PROBLEMS[number])).trace(PROBLEMS[number].inputs(), None)
    module: Any = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    location = importlib.util.find_spec("jax_plugins.xla_cuda13")
    assert location is not None and location.submodule_search_locations is not None
    plugin = ctypes.CDLL(str(Path(location.submodule_search_locations[0]) / "xla_cuda_plugin.so"))
    compile_ = plugin.MosaicGpuCompile
    compile_.argtypes, compile_.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call" and "mhlo.backend_config" in operation.attributes:
            code = ir.StringAttr(ir.DictAttr(operation.attributes["mhlo.backend_config"])["module"]).value_bytes
            compile_(code, len(code))  # writes the files; loading the result needs a GPU
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)


if __name__ == "__main__":
    _compile(int(sys.argv[2]))
