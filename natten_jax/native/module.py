"""The native library: loading, XLA FFI targets, calls of these targets, and problems in the kernels' format.

Importing this module never fails. If the library cannot be used, ``load_error`` is the reason. Backends that need the
library then reject every problem with this reason.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax import source_tree
from natten_jax.arrays.boxes import QueryBox, unfused
from natten_jax.arrays.operands import types_like, varying_like
from natten_jax.performance import TilePair
from natten_jax.plan import plan
from natten_jax.problem import Problem, Shape
from natten_jax.windows import Axis, axis_numbers


def plugins() -> tuple[int, ...]:
    """Return the major CUDA versions of the installed JAX plugins."""
    names = (entry.name for entry in metadata.entry_points(group="jax_plugins"))
    return tuple(sorted({int(match[1]) for name in names if (match := re.fullmatch(r"xla_cuda(\d+)", name))}))


def choice() -> int:
    """Return the value of ``NATTEN_JAX_CUDA`` for a build with kernels.

    It is the major CUDA version of JAX's plugin, or 1 (any version) without a plugin.
    """
    return max(plugins(), default=1)


def mismatch() -> str | None:
    """Return a message if JAX's plugins use other major CUDA versions than the kernels; otherwise ``None``."""
    built = build_info().get("cuda_version")
    installed = plugins()
    if built is None or not installed or int(built.partition(".")[0]) in installed:
        return None
    wanted = choice()
    consequence = ", and its driver may be too old for them" if int(built.partition(".")[0]) > wanted else ""
    return (
        f"kernels were compiled with CUDA {built}, but the installed plugin of JAX is for CUDA {wanted}{consequence}: "
        f"{source_tree.remedy(f'NATTEN_JAX_CUDA={wanted}')}"
    )


KERNEL_RANK = 3

#: Values of the enumeration ``Ends`` in csrc/include/natten_jax/windows.h, by ``(is_causal, edges)`` of an axis.
_ENDS_OF_WINDOWS = {(False, "shift"): 0, (True, "shift"): 1, (False, "cut"): 2, (False, "wrap"): 3}


def axis_rows(problem: Problem) -> Shape:
    """Return the numbers that describe the kernels' three token dimensions, in one tuple.

    For each dimension, the tuple has the fields in the table of csrc/include/natten_jax/axis_fields.h, in table order.
    """
    missing = (Axis(1, 1, 1),) * (KERNEL_RANK - problem.rank)
    axes = (*missing, *problem.axes)
    rows = [(*axis_numbers(axis), _ENDS_OF_WINDOWS[axis.is_causal, axis.edges]) for axis in axes]
    return tuple([fact for row in rows for fact in row])


def with_kernel_tiles(problem: Problem, pair: TilePair) -> TilePair:
    """Extend tiles to three token dimensions with leading extents of 1."""
    ones = (1,) * (KERNEL_RANK - problem.rank)
    return (*ones, *pair[0]), (*ones, *pair[1])


def box_start(box: QueryBox) -> jax.Array:
    """Return the first query of a box, in the kernels' three token dimensions."""
    return jnp.pad(box.first, (KERNEL_RANK - len(box.extents), 0))


def continues(kernels: str, problem: Problem) -> bool:
    """Return True if forward kernels can merge their results into earlier results for other keys.

    Args:
        kernels: Name of the kernels, as for :func:`limits`.
        problem: The problem. Only its head dimensions are checked.
    """
    limit = limits(kernels).get("largest_continued_head_dim", 0)
    return max(problem.head_dim, problem.head_dim_v) <= limit


class ResultType(NamedTuple):
    """Type of a target's result.

    Attributes:
        shape: Shape.
        dtype: Element type.
        replaces: Index of the operand whose buffer the result reuses, or ``None``.
    """

    shape: tuple[int, ...]
    dtype: Any
    replaces: int | None = None


def call(
    target: str, results: Sequence[ResultType], *operands: jax.Array, **attributes: Sequence[int] | int | float
) -> list[jax.Array]:
    """Call a native target. All custom calls of the project are made here.

    Args:
        target: Name of the target.
        results: Types of the results.
        *operands: Arrays, in the target's order.
        **attributes: Integers are passed as int64, sequences of integers as int64 arrays, floats as float32.
    """
    arrays = varying_like(operands, operands)
    types = types_like(arrays[0], *[(result.shape, result.dtype) for result in results])
    in_place = {result.replaces: i for i, result in enumerate(results) if result.replaces is not None}
    values = {name: _attribute(value) for name, value in attributes.items()}
    # Only the main call of a pass has attributes. The metadata of this call contains the plan.
    with plan.carrying_plan() if attributes else contextlib.nullcontext():
        native_call = jax.ffi.ffi_call(target, types, input_output_aliases=in_place)
        return list(unfused(native_call(*unfused(arrays), **values)) if in_place else native_call(*arrays, **values))


def _attribute(value: Sequence[int] | int | float) -> Any:
    if isinstance(value, int):
        return value
    return np.float32(value) if isinstance(value, float) else np.asarray(value, np.int64)


def build_info() -> Mapping[str, Any]:
    """Return the native module's build configuration, and the instruction sets that its kernels can use on this host.

    The mapping is empty if the native module could not be loaded.
    """
    return {} if _module is None else _module.build_info()


def limits(architecture: str) -> Mapping[str, Any]:
    """Return the limits of the kernels ``"cpu"``, ``"sm80"``, ``"small"`` or ``"sm90"``.

    The native module has these limits even if this build lacks the kernels. The limits of GPU kernels come from the
    tables in ``csrc/cuda/*/forms.h``. The mapping is empty if the native module could not be loaded.
    """
    return {} if _module is None else _all_limits(_module)[architecture]


@functools.lru_cache(maxsize=1)
def _all_limits(module: Any) -> Mapping[str, Any]:
    """Return the limits of all kernels. They are cached because ranking the tiles of shards reads them very often."""
    return module.limits()


def estimate_of_small_windows(
    axes: Sequence[int], sizes: Sequence[int], q_tile: Sequence[int], kv_tile: Sequence[int], **options: bool | int
) -> Mapping[str, Any] | None:
    """Estimate the launches and the time of a pass with the kernels for small windows.

    Args:
        axes: Result of :func:`axis_rows`.
        sizes: Batch, heads, heads_kv, head_dim, head_dim_v and additional_kv.
        q_tile: Three extents of the query tile.
        kv_tile: Three extents of the key/value tile.
        **facts: All of these are required: ``is_backward``, True for the backward pass; ``shared_memory``, bytes per
            thread block; ``multiprocessors``, the number of SMs; ``has_boxes``, True if the device has TMA;
            ``has_ring``, True if kernels may use ring buffers; ``ring_has_boxes``, True if TMA loads the ring buffers,
            False if warps load them; ``has_relative_bias``, True if the problem has a relative bias; ``has_key_bias``,
            True if the kernels add key biases.

    Returns:
        A mapping, or ``None`` if the kernels do not support the pass. ``"seconds"`` is the predicted time of the pass.
        ``"launches"`` is a list of mappings, one per launch, with the items below. Rows are the queries or keys that a
        warp owns; columns are the keys or queries that the rows see.

        - ``"kernel"``: name of the kernel.
        - ``"seconds"``: predicted time of the launch.
        - ``"line_dimension"``: index of the dimension in which a warp's groups of columns are adjacent; -1 with a ring
          buffer.
        - ``"regions"``: number of regions of the layout, per batch entry and head.
        - ``"columns"`` and ``"tiles"``: numbers of columns and tiles of a region.
        - ``"pairs"``: with a ring buffer, number of query-key pairs that are multiplied per batch entry and head;
          otherwise 0.
    """
    return None if _module is None else _module.estimate_of_small_windows(axes, sizes, q_tile, kv_tile, **options)


def gradient_ring_of_small_windows(
    axes: Sequence[int], sizes: Sequence[int], **options: bool | int
) -> Mapping[str, Any] | None:
    """Estimate a launch that computes key and value gradients with a ring buffer of queries.

    The native code chooses the tiles of the launch.

    Args:
        axes: As for :func:`estimate_of_small_windows`.
        sizes: As for :func:`estimate_of_small_windows`.
        **facts: ``shared_memory``, ``multiprocessors``, ``ring_has_boxes``, ``has_relative_bias`` and ``has_key_bias``,
            as for :func:`estimate_of_small_windows`.

    Returns:
        A mapping like those in ``"launches"`` of :func:`estimate_of_small_windows`. ``None`` if the kernel does not
        support the problem.
    """
    return None if _module is None else _module.gradient_ring_of_small_windows(axes, sizes, **options)


def seam_factor(axes: Sequence[int], inner: Sequence[int], outer: Sequence[int]) -> float:
    """Return the predicted time of a pass on Hopper, relative to the same pass without wrapped edges.

    The prediction uses the TMA box extents that a launch would choose.

    Args:
        axes: Result of :func:`axis_rows`.
        inner: Extents of the inner tiles, which a thread block loops over.
        outer: Extents of the outer tiles, one per thread block.
    """
    return 1.0 if _module is None else float(_module.seam_factor(axes, inner, outer))


def bias_line(axes: Sequence[int], tile: Sequence[int], group: Sequence[int]) -> int:
    """Return the length of the last dimension of the relative bias tables that the kernels for small windows read.

    The length is a number of entries and includes padding.

    Args:
        axes: Result of :func:`axis_rows`.
        tile: Extents of a tile of rows: the tokens that a warp owns.
        group: Extents of a group of columns: the tokens that a warp processes at a time.
    """
    return 1 if _module is None else int(_module.bias_line(axes, tile, group))


class BiasSums(NamedTuple):
    """Scratch sizes for the gradient of a relative bias, per batch entry and head.

    Attributes:
        tiles: Number of query tiles. Each tile has a record in scratch memory.
        record: Number of float32 values in a record.
        parts: Number of parts that the tiles are divided into. One thread block adds up the records of a part.
    """

    tiles: int
    record: int
    parts: int


def bias_sums(axes: Sequence[int], queries: Sequence[int], tile: Sequence[int], group: Sequence[int]) -> BiasSums:
    """Return the scratch sizes that the kernels for small windows need for the gradient of a relative bias.

    Args:
        axes: Result of :func:`axis_rows`.
        queries: Three query extents of the arrays.
        tile: Extents of a tile of queries.
        group: Extents of a group of keys.
    """
    return BiasSums(1, 0, 1) if _module is None else BiasSums(**_module.bias_sums(axes, queries, tile, group))


def additional_parts(columns: int, additional_kv: int) -> int:
    """Return the number of partial sums that the kernels for small windows compute per gradient of an additional token.

    Args:
        columns: Number of queries of a batch entry, times the number of query heads that share a key/value head.
        additional_kv: Number of additional tokens.
    """
    return 1 if _module is None else _module.additional_parts(columns, additional_kv)


def missing(target: str) -> str | None:
    """Return the reason why a target cannot be called; ``None`` if it can be called."""
    if _module is None or target in _module.registrations():
        return load_error
    architectures = ", ".join(_module.build_info()["cuda_architectures"]) or "none"
    return f"this build of natten_jax lacks the kernel {target} (CUDA architectures: {architectures})"


def path() -> str | None:
    """Return the path of the native module; ``None`` if the module could not be loaded."""
    return None if _module is None else _module.__file__


def _runtime_ffi_version() -> tuple[int, int] | None:
    """Read the FFI version of the installed jaxlib from the headers of jaxlib; return ``None`` if it is unknown."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    if not header.exists():
        return None
    text = header.read_text(encoding="utf-8", errors="replace")
    numbers = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    major, minor = (int(number[1]) if number else None for number in numbers)
    return None if major is None or minor is None else (major, minor)


def _check_ffi_version(module: ModuleType) -> None:
    runtime = _runtime_ffi_version()
    built: tuple[int, int] = module.build_info()["ffi_api_version"]
    # A runtime supports libraries that were built for an earlier minor version of the interface. With a library for a
    # later version, XLA fails to initialise.
    if runtime is not None and (runtime[0] != built[0] or runtime[1] < built[1]):
        raise ImportError(
            f"the native module was built for version {built[0]}.{built[1]} of the XLA FFI interface, "
            f"but the installed jaxlib has {runtime[0]}.{runtime[1]}"
        )


def _check_files(spec: ModuleSpec) -> None:
    """Check that the library files are complete: loading a truncated file would kill the process."""
    if spec.origin is None or sys.platform != "linux":
        return  # the import reports a missing file more clearly; macOS and Windows do not use ELF files
    for file in (Path(spec.origin), Path(spec.origin).with_name("libnatten_jax.so")):
        if not file.exists():
            continue
        with file.open("rb") as stream:
            header = stream.read(64)
        if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
            raise ImportError(f"{file} is not a 64-bit ELF library")
        (sections,) = struct.unpack_from("<Q", header, 0x28)
        entry_size, entries = struct.unpack_from("<HH", header, 0x3A)
        # In a complete file, the section headers come last. A file that ends earlier is truncated.
        if sections + entry_size * entries > file.stat().st_size:
            raise ImportError(f"{file} is truncated")


def _import(spec: ModuleSpec) -> ModuleType:
    module = importlib.util.module_from_spec(spec)
    if spec.loader is None:
        raise ImportError(f"{spec.origin} is not a module")
    spec.loader.exec_module(module)
    sys.modules[spec.name] = module
    return module


def _load() -> tuple[ModuleType | None, str | None]:
    """Load the native module and register its targets. If that fails, return ``None`` and the reason."""
    try:
        spec = source_tree.find_library()
        _check_files(spec)
        module = _import(spec)
        if spec.origin is not None:
            source_tree.check_library(spec.origin, module.build_info().get("sources"))
        _check_ffi_version(module)
        for name, (platform, handler) in module.registrations().items():
            jax.ffi.register_ffi_target(name, handler, platform=platform)
    except Exception as error:
        return None, f"the native module natten_jax._native cannot be loaded ({type(error).__name__}: {error})"
    return module, None


_module, load_error = _load()
