"""Which CUDA the kernels were compiled with, beside the one that JAX's plugin is for."""

from __future__ import annotations

import re
from importlib import metadata

from natten_jax import source_tree
from natten_jax.native import module as native


def plugins() -> tuple[int, ...]:
    """The major versions of CUDA that the installed plugins of JAX are for."""
    names = (entry.name for entry in metadata.entry_points(group="jax_plugins"))
    return tuple(sorted({int(match[1]) for name in names if (match := re.fullmatch(r"xla_cuda(\d+)", name))}))


def choice() -> int:
    """The ``NATTEN_JAX_CUDA`` of a build with kernels: the version of JAX's plugin, or 1, any version, without one."""
    return max(plugins(), default=1)


def mismatch() -> str | None:
    """A sentence about kernels that were compiled with another major version than JAX's plugin is for."""
    built = native.build_info().get("cuda_version")
    installed = plugins()
    if built is None or not installed or int(built.partition(".")[0]) in installed:
        return None
    wanted = choice()
    consequence = ", and its driver may be too old for them" if int(built.partition(".")[0]) > wanted else ""
    return (
        f"kernels were compiled with CUDA {built}, but the installed plugin of JAX is for CUDA {wanted}{consequence}: "
        f"{source_tree.remedy(f'NATTEN_JAX_CUDA={wanted}')}"
    )
