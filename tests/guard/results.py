"""Outputs and gradients of random problems on the CPU. Every fifth problem runs on flex, the others on CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tests.guard.calls import Call, windows
from tests.support.problems import QUICK_COMPILATION

PROBLEMS = 200
#: Number of problems per compiled program.
AT_ONCE = 10
#: Maximum of ``||found - recorded|| / ||recorded||``, by element type.
TOLERANCES = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def problem(number: int) -> Call:
    """Draw a random problem. ``number`` seeds the random numbers."""
    rng = np.random.default_rng([2026, number])

    def chance(share: float) -> bool:
        return bool(rng.random() < share)

    rank = int(rng.integers(1, 4))
    layout = tuple(int(n) for n in rng.integers(2, (11, 5, 4)[rank - 1], rank))
    heads_kv, group = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    heads, head_dim = heads_kv * group, int(rng.choice([3, 4, 8]))
    family = "flex" if number % 5 == 0 else "cpu"
    dtype = str(rng.choice(["float32", "float32", "float16", "bfloat16"]))
    shared: dict[str, tuple[int, ...]] = {}
    if chance(0.25):
        shared["sinks"] = (heads,)
    if chance(0.25):
        shared["scale"] = (heads,) if chance(0.5) else ()
    if chance(0.25):
        shared["key_bias"] = (2, *layout) if chance(0.5) else (2, heads, *layout)
    if chance(0.15):
        shapes = windows(layout[:1], heads, heads_kv, head_dim, queries=(int(rng.integers(1, 10)),)) | shared
        if "key_bias" in shapes:
            shapes["key_bias"] = (*shapes["key_bias"][:-rank], layout[0])
        options: dict[str, Any] = {"backend": f"{family}-fmha", "is_causal": chance(0.5)}
        if chance(0.4):
            options["kv_lengths"] = [layout[0], max(layout[0] - 1, 1)]
        return Call("attention", shapes, options, dtype)
    kernel = tuple(int(rng.integers(1, n + 1)) for n in layout)
    dilation = tuple(int(rng.integers(1, n // k + 1)) for n, k in zip(layout, kernel, strict=True))
    causal = tuple(chance(0.25) for _ in layout)
    edges = tuple("shift" if is_causal else str(rng.choice(["shift", "shift", "cut"])) for is_causal in causal)
    options = {
        "backend": f"{family}-fna",
        "kernel_size": kernel,
        "dilation": dilation,
        "stride": tuple(int(rng.integers(1, k + 1)) for k in kernel),
        "is_causal": causal,
        "edges": edges,
    }
    if chance(0.15):
        ones = (1,) * rank
        options |= {"edges": ("wrap",) * rank, "stride": ones, "dilation": ones, "is_causal": (False,) * rank}
    if chance(0.25):
        shared["relative_bias"] = (heads, *(2 * k - 1 for k in kernel))
    additional = int(rng.integers(1, 4)) if chance(0.25) else 0
    if additional:
        options["try_fuse_additional_kv"] = chance(0.5)
    if chance(0.15) and "wrap" not in options["edges"]:
        options["extents"] = [
            list(layout),
            [max(n - 1, k * d) for n, k, d in zip(layout, kernel, dilation, strict=True)],
        ]
    queries = layout
    if chance(0.15) and "extents" not in options and "wrap" not in options["edges"]:
        queries = tuple(max(n - 1, 1) for n in layout)
        options["query_origin"] = [n - q for n, q in zip(layout, queries, strict=True)]
    shapes = windows(layout, heads, heads_kv, head_dim, queries=queries, additional=additional) | shared
    return Call(f"na{rank}d", shapes, options, dtype)


def take(numbers: Sequence[int] = range(PROBLEMS)) -> dict[str, np.ndarray]:
    """Return the results of problems as float32, by names like ``007/d_query``."""
    found: dict[str, np.ndarray] = {}
    for first in range(0, len(numbers), AT_ONCE):
        some = {number: problem(number) for number in numbers[first : first + AT_ONCE]}
        arrays = {number: call.arrays(number) for number, call in some.items()}

        def run(arrays: Mapping[int, Any], some: Mapping[int, Call] = some) -> Any:
            return {number: call.with_gradients(arrays[number]) for number, call in some.items()}

        for number, results in jax.jit(run, compiler_options=QUICK_COMPILATION)(arrays).items():
            found |= {f"{number:03}/{name}": np.asarray(each, np.float32) for name, each in results.items()}
    return found


def difference(recorded: np.ndarray, found: np.ndarray, dtype: str) -> str | None:
    """Return a description of the difference between two arrays, or None if it is within the tolerance."""
    if recorded.shape != found.shape:
        return f"shape {found.shape}, recorded {recorded.shape}"
    if not np.array_equal(np.isfinite(recorded), np.isfinite(found)):
        return "other elements are finite"
    is_finite = np.isfinite(recorded)
    recorded, found = (np.where(is_finite, each, 0).astype(np.float64) for each in (recorded, found))
    error = np.linalg.norm(found - recorded) / max(np.linalg.norm(recorded), 1e-2)
    return None if error <= TOLERANCES[dtype] else f"relative error {error:.1e}, tolerance {TOLERANCES[dtype]:.0e}"
