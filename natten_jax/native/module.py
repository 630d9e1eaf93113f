"""The native library: loads it, registers its XLA FFI targets, calls them, and describes problems as kernels take them.

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
    """The major versions of CUDA that the installed plugins of JAX are for."""
    names = (entry.name for entry in metadata.entry_points(group="jax_plugins"))
    return tuple(sorted({int(match[1]) for name in names if (match := re.fullmatch(r"xla_cuda(\d+)", name))}))


def choice() -> int:
    """The ``NATTEN_JAX_CUDA`` of a build with kernels: the version of JAX's plugin, or 1, any version, without one."""
    return max(plugins(), default=1)


def mismatch() -> str | None:
    """A sentence about kernels that were compiled with another major version than JAX's plugin is for."""
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

#: ``Ends`` of csrc/include/natten_jax/windows.h, by whether an axis is causal and what becomes of windows at its edges.
_ENDS_OF_WINDOWS = {(False, "shift"): 0, (True, "shift"): 1, (False, "cut"): 2, (False, "wrap"): 3}


def axis_rows(problem: Problem) -> Shape:
    """A row for each token dimension: its facts in the order of csrc/include/natten_jax/axis_fields.h."""
    missing = (Axis(1, 1, 1),) * (KERNEL_RANK - problem.rank)
    axes = (*missing, *problem.axes)
    rows = [(*axis_numbers(axis), _ENDS_OF_WINDOWS[axis.is_causal, axis.edges]) for axis in axes]
    return tuple([fact for row in rows for fact in row])


def with_kernel_tiles(problem: Problem, pair: TilePair) -> TilePair:
    """Tiles of three token dimensions: leading ones have extent 1."""
    ones = (1,) * (KERNEL_RANK - problem.rank)
    return (*ones, *pair[0]), (*ones, *pair[1])


def box_start(box: QueryBox) -> jax.Array:
    """Where a box of queries begins."""
    return jnp.pad(box.first, (KERNEL_RANK - len(box.extents), 0))


def continues(kernels: str, problem: Problem) -> bool:
    """Whether forward kernels merge what they find with what was found before on other keys.

    Args:
        kernels: Their name in ``natten_jax.native.module.limits``.
        problem: Whose heads they get.
    """
    most = limits(kernels).get("largest_continued_head_dim", 0)
    return max(problem.head_dim, problem.head_dim_v) <= most


class ResultType(NamedTuple):
    """What a target's result is.

    Attributes:
        shape: Its shape.
        dtype: Its element type.
        replaces: The number of the operand whose place in memory it takes, if it does.
    """

    shape: tuple[int, ...]
    dtype: Any
    replaces: int | None = None


def call(
    target: str, results: Sequence[ResultType], *operands: jax.Array, **attributes: Sequence[int] | int | float
) -> list[jax.Array]:
    """Call a native target; the project's only custom call.

    Args:
        target: Name of the target.
        results: Types of the results.
        *operands: Arrays, in the target's order.
        **attributes: Integers are passed as int64, sequences of them as int64 arrays, floats as float32.
    """
    arrays = varying_like(operands, operands)
    types = types_like(arrays[0], *[(result.shape, result.dtype) for result in results])
    in_place = {result.replaces: i for i, result in enumerate(results) if result.replaces is not None}
    values = {name: _attribute(value) for name, value in attributes.items()}
    # Only the main call of a pass has attributes. Its metadata carry the plan.
    with plan.carrying_plan() if attributes else contextlib.nullcontext():
        native_call = jax.ffi.ffi_call(target, types, input_output_aliases=in_place)
        return list(apart(native_call(*apart(arrays), **values)) if in_place else native_call(*arrays, **values))


def _attribute(value: Sequence[int] | int | float) -> Any:
    if isinstance(value, int):
        return value
    return np.float32(value) if isinstance(value, float) else np.asarray(value, np.int64)


def build_info() -> Mapping[str, Any]:
    """How the native module was built and what it runs on this host; empty where it could not be loaded."""
    return {} if _module is None else _module.build_info()


def limits(architecture: str) -> Mapping[str, Any]:
    """What the kernels for ``"cpu"``, ``"sm80"``, ``"small"`` or ``"sm90"`` take, whether this build has them or not.

    Tables of ``csrc/cuda/*/forms.h``; empty where the native module could not be loaded.
    """
    return {} if _module is None else _all_limits(_module)[architecture]


@functools.lru_cache(maxsize=1)
def _all_limits(module: Any) -> Mapping[str, Any]:
    """Return the limits of all architectures, which are read thousands of times if tiles of a split are ranked."""
    return module.limits()


def estimate_of_small_windows(
    axes: Sequence[int], sizes: Sequence[int], q_tile: Sequence[int], kv_tile: Sequence[int], **facts: bool | int
) -> Mapping[str, Any] | None:
    """What the kernels for small windows launch for a pass with tiles, and how long that takes, by a model.

    Args:
        axes: As the attribute of that name of every target.
        sizes: Batch, heads, heads_kv, head_dim, head_dim_v and additional_kv.
        q_tile: Query tile, three extents.
        kv_tile: Key/value tile.
        **facts: All of these: ``is_backward``; ``shared_memory``, the bytes that a block may have; ``multiprocessors``,
            the number that the device has; ``has_boxes``, if it has the engine that copies boxes of tokens;
            ``has_ring``, if kernels may have rings; ``ring_has_boxes``, if the engine loads theirs, not warps;
            ``has_relative_bias``; ``has_key_bias``, of biases that kernels add themselves.

    Returns:
        ``"seconds"`` and ``"launches"``, each with its ``"kernel"``, its ``"line_dimension"`` (of three), and for
        each batch entry and head ``"regions"``, which have ``"columns"`` and ``"tiles"``, and the ``"pairs"`` of a
        query and a key that are multiplied, where regions do not say so; and its own ``"seconds"``. ``None`` where
        the kernels do not take the pass.
    """
    return None if _module is None else _module.estimate_of_small_windows(axes, sizes, q_tile, kv_tile, **facts)


def gradient_ring_of_small_windows(
    axes: Sequence[int], sizes: Sequence[int], **facts: bool | int
) -> Mapping[str, Any] | None:
    """The launch for key and value gradients with a ring of queries, with tiles of its own.

    Args:
        axes: As for :func:`estimate_of_small_windows`, as the others.
        sizes: Sizes.
        **facts: ``shared_memory``, ``multiprocessors``, ``ring_has_boxes``, ``has_relative_bias``, ``has_key_bias``.

    Returns:
        A launch as there; ``None`` where the kernels do not take the problem.
    """
    return None if _module is None else _module.gradient_ring_of_small_windows(axes, sizes, **facts)


def seam_factor(axes: Sequence[int], inner: Sequence[int], outer: Sequence[int]) -> float:
    """How many times as long a pass takes on Hopper as if seams cost nothing, with the boxes that launches choose.

    Args:
        axes: As the attribute of that name of every target.
        inner: Extents of tiles that are walked over.
        outer: Extents of those that walk.
    """
    return 1.0 if _module is None else float(_module.seam_factor(axes, inner, outer))


def bias_line(axes: Sequence[int], tile: Sequence[int], group: Sequence[int]) -> int:
    """Entries of a line of a relative bias, as the kernels for small windows read it: some are no offset's.

    Args:
        axes: As the attribute of that name of every target.
        tile: Extents of a tile of rows.
        group: Extents of a group of columns.
    """
    return 1 if _module is None else int(_module.bias_line(axes, tile, group))


class BiasSums(NamedTuple):
    """What the gradient of a relative bias takes of each batch entry and head.

    Attributes:
        tiles: Tiles of queries.
        record: Numbers of each.
        parts: In which the records are added up.
    """

    tiles: int
    record: int
    parts: int


def bias_sums(axes: Sequence[int], queries: Sequence[int], tile: Sequence[int], group: Sequence[int]) -> BiasSums:
    """What the kernels for small windows take for the gradient of a relative bias.

    Args:
        axes: As the attribute of that name of every target.
        queries: Three extents of the arrays.
        tile: Extents of a tile of queries.
        group: Extents of a group of keys.
    """
    return BiasSums(1, 0, 1) if _module is None else BiasSums(**_module.bias_sums(axes, queries, tile, group))


def additional_parts(columns: int, additional_kv: int) -> int:
    """In how many parts the kernels for small windows add gradients of additional tokens up.

    Args:
        columns: Queries and heads that share a key/value head, of a batch entry.
        additional_kv: Additional tokens.
    """
    return 1 if _module is None else _module.additional_parts(columns, additional_kv)


def missing(target: str) -> str | None:
    """Why a target cannot be called; ``None`` where it can."""
    if _module is None or target in _module.registrations():
        return load_error
    architectures = ", ".join(_module.build_info()["cuda_architectures"]) or "none"
    return f"this build of natten_jax lacks the kernel {target} (CUDA architectures: {architectures})"


def path() -> str | None:
    """File of the native module, or ``None`` where it could not be loaded."""
    return None if _module is None else _module.__file__


def _runtime_ffi_version() -> tuple[int, int] | None:
    """Version of the FFI interface that the installed jaxlib implements, if its headers tell."""
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
    # A runtime serves every earlier minor version; a library from its future keeps XLA from initialising.
    if runtime is not None and (runtime[0] != built[0] or runtime[1] < built[1]):
        raise ImportError(
            f"the native module was built for version {built[0]}.{built[1]} of the XLA FFI interface, "
            f"but the installed jaxlib has {runtime[0]}.{runtime[1]}"
        )


def _check_files(spec: ModuleSpec) -> None:
    """Check that the libraries are whole: loading a truncated one would kill the process."""
    if spec.origin is None or sys.platform != "linux":
        return  # importing says it better, and only Linux has files of this form
    for file in (Path(spec.origin), Path(spec.origin).with_name("libnatten_jax.so")):
        if not file.exists():
            continue
        with file.open("rb") as stream:
            header = stream.read(64)
        if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
            raise ImportError(f"{file} is not a 64-bit ELF library")
        (sections,) = struct.unpack_from("<Q", header, 0x28)
        entry_size, entries = struct.unpack_from("<HH", header, 0x3A)
        # The section headers end the file.
        if sections + entry_size * entries > file.stat().st_size:
            raise ImportError(f"{file} is truncated")


def _import(spec: ModuleSpec) -> ModuleType:
    module = importlib.util.module_from_spec(spec)
    if spec.loader is None:
        raise ImportError(f"{spec.origin} is no module")
    spec.loader.exec_module(module)
    sys.modules[spec.name] = module
    return module


def _load() -> tuple[ModuleType | None, str | None]:
    """The native module with its targets registered, or the reason why there is none."""
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
