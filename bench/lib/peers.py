"""Implementations that ``board.py`` times if they are installed, and functions that prepare them for timing."""

from __future__ import annotations

import dataclasses
import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata, util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks import Benchmark

from lib import torch_sides
from lib.implementations import Function, dot_product_attention, mosaic, ours, sliding_window
from lib.sides import Side, jax_side
from natten_jax import windows
from natten_jax.performance import Pass

OURS = "natten_jax"
#: Largest number of bytes of logits for which XLA's dense attention is timed.
_ROOM = 1 << 30

Make = Callable[[Benchmark, jax.Array, Sequence[jax.Array], Pass, str], Side]


@dataclasses.dataclass(frozen=True)
class Peer:
    """An implementation of attention.

    Attributes:
        package: Import name of the required package.
        make: Function that prepares a pass of a problem for timing; raises ``ValueError`` for unsupported problems.
        about: Description.
        only_gpus: True if the implementation requires an NVIDIA GPU.
    """

    package: str
    make: Make
    about: str
    only_gpus: bool = False

    def absence(self, platform: str) -> str | None:
        """Return the reason why the implementation cannot run on a platform; ``None`` if it can."""
        if util.find_spec(self.package) is None:
            return "not installed"
        if self.only_gpus and platform != "cuda":
            return "needs an NVIDIA GPU"
        try:
            importlib.import_module(self.package)
        except Exception as error:  # importing a package or its libraries may raise anything
            return f"cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return None

    @property
    def version(self) -> str | None:
        """Installed version; ``None`` if unknown."""
        said = getattr(sys.modules.get(self.package), "__version__", None)
        if said is not None:
            return str(said)
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None


def _in_jax(function_of: Callable[[Benchmark], tuple[Function, bool]]) -> Make:
    """Return ``Peer.make`` for an implementation in JAX.

    Args:
        function_of: Returns a JAX function for a problem, and True if the JAX function computes the problem's windows.
    """

    def make(
        benchmark: Benchmark, cotangent: jax.Array, arrays: Sequence[jax.Array], pass_: Pass, platform: str
    ) -> Side:
        function, is_same = function_of(benchmark)
        return jax_side(function, cotangent, arrays, pass_, platform, is_same=is_same)

    return make


def _has_jax_windows(benchmark: Benchmark) -> bool:
    """Return True if ``jax.nn`` supports the window: causal, over a sequence, without stride and dilation."""
    steps = {*(benchmark.stride or ()), *(benchmark.dilation or ())}
    return len(benchmark.layout) == 1 and benchmark.kernel_size is not None and benchmark.is_causal and steps <= {1}


def _cudnn(benchmark: Benchmark) -> tuple[Function, bool]:
    if _has_jax_windows(benchmark):
        return sliding_window(benchmark, "cudnn"), True
    whole = dataclasses.replace(benchmark, kernel_size=None, causal=None)
    return dot_product_attention(whole, "cudnn"), benchmark.kernel_size is None


def _tokamax(benchmark: Benchmark) -> tuple[Function, bool]:
    attend: Any = importlib.import_module("tokamax").dot_product_attention
    facts: dict[str, Any] = {"is_causal": benchmark.is_causal}
    if _has_jax_windows(benchmark) and benchmark.kernel_size is not None:
        facts["local_window_size"] = (benchmark.kernel_size[0] - 1, 0)

    def function(*arrays: jax.Array) -> jax.Array:
        flat = (each.reshape(each.shape[0], -1, *each.shape[-2:]) for each in arrays)
        output: jax.Array = attend(*flat, **facts)
        return output.reshape(arrays[0].shape)

    return function, benchmark.kernel_size is None or "local_window_size" in facts


def _xla(benchmark: Benchmark) -> tuple[Function, bool]:
    logits = 4 * benchmark.batch * benchmark.heads * benchmark.tokens**2
    if logits > _ROOM:
        raise ValueError(f"its logits would take {logits / (1 << 30):.0f} GiB")
    mask = jnp.asarray(_dense_mask(benchmark))[None, None]

    def function(*arrays: jax.Array) -> jax.Array:
        query, key, value = (each.reshape(each.shape[0], -1, *each.shape[-2:]) for each in arrays)
        output = jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="xla")
        return output.reshape(arrays[0].shape)

    return function, True


def _dense_mask(benchmark: Benchmark) -> np.ndarray[Any, Any]:
    """Return the boolean mask ``[queries, keys]`` over flattened tokens: True if the query attends to the key."""
    mask = np.ones((1, 1), bool)
    for axis in benchmark.problem.axes:
        query, key = np.arange(axis.query_extent)[:, None], np.arange(axis.kv_extent)[None]
        group, window = query % axis.dilation, windows.Window(axis.kernel_size, axis.stride, axis.is_causal)
        length = windows.group_length(axis.kv_extent, axis.dilation, group)
        start, end = windows.window_bounds(window, query // axis.dilation, length)
        index = key // axis.dilation
        mask = np.kron(mask, (group == key % axis.dilation) & (start <= index) & (index < end))
    return mask


def _mosaic(
    benchmark: Benchmark, cotangent: jax.Array, arrays: Sequence[jax.Array], pass_: Pass, platform: str
) -> Side:
    if pass_ == "backward":
        raise ValueError("it has a forward pass only")
    if benchmark.heads_kv is not None or math.prod(benchmark.layout) % 128:
        raise ValueError("it requires equal numbers of query and key heads, and multiples of 128 tokens")
    halves = [each.astype("float16") for each in arrays]
    return jax_side(mosaic(benchmark), cotangent, halves, pass_, platform, is_same=benchmark.kernel_size is None)


#: Implementations by name; natten_jax comes first.
PEERS: Mapping[str, Peer] = {
    OURS: Peer("natten_jax", _in_jax(lambda benchmark: (ours(benchmark), True)), "the best backend of the device"),
    "XLA": Peer("jax", _in_jax(_xla), "dense attention through jax.nn, with the windows as a mask"),
    "cuDNN": Peer("jax", _in_jax(_cudnn), "through jax.nn; causal windows over sequences, else dense attention", True),
    "Pallas": Peer("jax", _mosaic, "JAX's Mosaic kernel for Hopper GPUs, float16; dense attention", True),
    "tokamax": Peer("tokamax", _in_jax(_tokamax), "causal windows over sequences, else dense attention"),
    "NATTEN": Peer("natten", torch_sides.natten, "PyTorch, including the time of permutations"),
    "FlexAttention": Peer(
        "torch", torch_sides.flex_attention, "PyTorch, compiled, on inputs that are permuted already"
    ),
}
