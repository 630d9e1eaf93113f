"""The native library: loading, XLA FFI targets, calls, and problems in the kernels' format.

Importing this module never fails. If the library cannot be used, ``load_error`` gives the reason, and the backends that
need it reject every problem with that reason.
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
from natten_jax.arrays.boxes import QueryBox, apart
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
    """Return ``NATTEN_JAX_CUDA`` for a build with kernels: the plugin's CUDA version, or 1 (any) without a plugin."""
    return max(plugins(), default=1)


def mismatch() -> str | None:
    """Return a message if kernels were compiled with another major CUDA version than JAX's plugin uses."""
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

#: ``Ends`` of csrc/include/natten_jax/windows.h, by causality and boundary mode of an axis.
_ENDS_OF_WINDOWS = {(False, "shift"): 0, (True, "shift"): 1, (False, "cut"): 2, (False, "wrap"): 3}


def axis_rows(problem: Problem) -> Shape:
    """Return a row of numbers per token dimension, flattened, as in csrc/include/natten_jax/axis_fields.h."""
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
    """Return True if forward kernels can merge their results into earlier results on other keys.

    Args:
        kernels: Name of the kernels in ``natten_jax.native.module.limits``.
        problem: Problem whose head widths are checked.
    """
    most = limits(kernels).get("largest_continued_head_dim", 0)
    return max(problem.head_dim, problem.head_dim_v) <= most


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
    # Only the main call of a pass has attributes. Its metadata contains the plan.
    with plan.carrying_plan() if attributes else contextlib.nullcontext():
        native_call = jax.ffi.ffi_call(target, types, input_output_aliases=in_place)
        return list(apart(native_call(*apart(arrays), **values)) if in_place else native_call(*arrays, **values))


def _attribute(value: Sequence[int] | int | float) -> Any:
    if isinstance(value, int):
        return value
    return np.float32(value) if isinstance(value, float) else np.asarray(value, np.int64)


def build_info() -> Mapping[str, Any]:
    """Return build configuration and host capabilities of the native module; empty if it could not be loaded."""
    return {} if _module is None else _module.build_info()


def limits(architecture: str) -> Mapping[str, Any]:
    """Return limits of the kernels ``"cpu"``, ``"sm80"``, ``"small"`` or ``"sm90"``, even if this build lacks them.

    Read from the tables in ``csrc/cuda/*/forms.h``; empty if the native module could not be loaded.
    """
    return {} if _module is None else _all_limits(_module)[architecture]


@functools.lru_cache(maxsize=1)
def _all_limits(module: Any) -> Mapping[str, Any]:
    """Return the limits of all architectures, cached because ranking tiles of shards reads them very often."""
    return module.limits()


def estimate_of_small_windows(
    axes: Sequence[int], sizes: Sequence[int], q_tile: Sequence[int], kv_tile: Sequence[int], **facts: bool | int
) -> Mapping[str, Any] | None:
    """Estimate the launches and the time of a pass with the kernels for small windows.

    Args:
        axes: The ``axes`` attribute of every target.
        sizes: Batch, heads, heads_kv, head_dim, head_dim_v and additional_kv.
        q_tile: Query tile, three extents.
        kv_tile: Key/value tile.
        **facts: All of the following: ``is_backward``; ``shared_memory``, in bytes per block; ``multiprocessors``, the
            number of SMs; ``has_boxes``, True if the device has TMA; ``has_ring``, True if kernels may use ring
            buffers; ``ring_has_boxes``, True if TMA instead of warps loads the ring buffers; ``has_relative_bias``;
            ``has_key_bias``, True if the kernels add key biases.

    Returns:
        ``"seconds"`` and ``"launches"``. Each launch has its ``"kernel"``, its ``"line_dimension"`` (of three), its
        ``"seconds"`` and, for each batch entry and head, ``"regions"``, which have ``"columns"`` and ``"tiles"``, and
        the number of multiplied query-key ``"pairs"`` unless it follows from the regions. ``None`` if the kernels do
        not support the pass.
    """
    return None if _module is None else _module.estimate_of_small_windows(axes, sizes, q_tile, kv_tile, **facts)


def gradient_ring_of_small_windows(
    axes: Sequence[int], sizes: Sequence[int], **facts: bool | int
) -> Mapping[str, Any] | None:
    """Estimate a launch for key and value gradients with a ring buffer of queries; the launch chooses its tiles.

    Args:
        axes: As for :func:`estimate_of_small_windows`.
        sizes: As for :func:`estimate_of_small_windows`.
        **facts: ``shared_memory``, ``multiprocessors``, ``ring_has_boxes``, ``has_relative_bias``, ``has_key_bias``.

    Returns:
        A launch as in :func:`estimate_of_small_windows`; ``None`` if the kernels do not support the problem.
    """
    return None if _module is None else _module.gradient_ring_of_small_windows(axes, sizes, **facts)


def seam_factor(axes: Sequence[int], inner: Sequence[int], outer: Sequence[int]) -> float:
    """Return the factor by which wrapped edges slow down a pass on Hopper, with the TMA boxes that launches choose.

    Args:
        axes: The ``axes`` attribute of every target.
        inner: Extents of the inner tiles, which a thread block loops over.
        outer: Extents of the outer tiles, one per thread block.
    """
    return 1.0 if _module is None else float(_module.seam_factor(axes, inner, outer))


def bias_line(axes: Sequence[int], tile: Sequence[int], group: Sequence[int]) -> int:
    """Return the entries per row of a relative bias, with padding, as the kernels for small windows read it.

    Args:
        axes: The ``axes`` attribute of every target.
        tile: Extents of a tile of rows.
        group: Extents of a group of columns.
    """
    return 1 if _module is None else int(_module.bias_line(axes, tile, group))


class BiasSums(NamedTuple):
    """Scratch sizes for the gradient of a relative bias, per batch entry and head.

    Attributes:
        tiles: Number of query tiles.
        record: Numbers per tile.
        parts: Number of parts in which the records are summed.
    """

    tiles: int
    record: int
    parts: int


def bias_sums(axes: Sequence[int], queries: Sequence[int], tile: Sequence[int], group: Sequence[int]) -> BiasSums:
    """Return the scratch sizes of the kernels for small windows for the gradient of a relative bias.

    Args:
        axes: The ``axes`` attribute of every target.
        queries: Three query extents of the arrays.
        tile: Extents of a tile of queries.
        group: Extents of a group of keys.
    """
    return BiasSums(1, 0, 1) if _module is None else BiasSums(**_module.bias_sums(axes, queries, tile, group))


def additional_parts(columns: int, additional_kv: int) -> int:
    """Return the number of partial sums of additional tokens' gradients in the kernels for small windows.

    Args:
        columns: Queries times heads that share a key/value head, per batch entry.
        additional_kv: Additional tokens.
    """
    return 1 if _module is None else _module.additional_parts(columns, additional_kv)


def missing(target: str) -> str | None:
    """Return the reason why a target cannot be called; ``None`` if it can."""
    if _module is None or target in _module.registrations():
        return load_error
    architectures = ", ".join(_module.build_info()["cuda_architectures"]) or "none"
    return f"this build of natten_jax lacks the kernel {target} (CUDA architectures: {architectures})"


def path() -> str | None:
    """Return the path of the native module; ``None`` if it could not be loaded."""
    return None if _module is None else _module.__file__


def _runtime_ffi_version() -> tuple[int, int] | None:
    """Return the FFI version of the installed jaxlib, read from its headers; ``None`` if unknown."""
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
    # A runtime supports every earlier minor version; XLA fails to initialise with a library for a later version.
    if runtime is not None and (runtime[0] != built[0] or runtime[1] < built[1]):
        raise ImportError(
            f"the native module was built for version {built[0]}.{built[1]} of the XLA FFI interface, "
            f"but the installed jaxlib has {runtime[0]}.{runtime[1]}"
        )


def _check_files(spec: ModuleSpec) -> None:
    """Check that the libraries are complete: loading a truncated one would kill the process."""
    if spec.origin is None or sys.platform != "linux":
        return  # the import has a better error for missing files, and only Linux uses ELF files
    for file in (Path(spec.origin), Path(spec.origin).with_name("libnatten_jax.so")):
        if not file.exists():
            continue
        with file.open("rb") as stream:
            header = stream.read(64)
        if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
            raise ImportError(f"{file} is not a 64-bit ELF library")
        (sections,) = struct.unpack_from("<Q", header, 0x28)
        entry_size, entries = struct.unpack_from("<HH", header, 0x3A)
        # The section headers are at the end of the file.
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
    """Load the native module and register its targets, or return the reason why it cannot be loaded."""
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
