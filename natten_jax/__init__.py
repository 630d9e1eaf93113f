"""Neighborhood attention for JAX."""

from natten_jax.backends.missing_kernels import MissingKernelsWarning
from natten_jax.configs import (
    get_bwd_configs_for_cpu_fmha,
    get_bwd_configs_for_cpu_fna,
    get_bwd_configs_for_cutlass_fmha,
    get_bwd_configs_for_cutlass_fna,
    get_bwd_configs_for_cutlass_hopper_fmha,
    get_bwd_configs_for_cutlass_hopper_fna,
    get_bwd_configs_for_flex_fmha,
    get_bwd_configs_for_flex_fna,
    get_configs_for_cpu_fmha,
    get_configs_for_cpu_fna,
    get_configs_for_cutlass_fmha,
    get_configs_for_cutlass_fna,
    get_configs_for_cutlass_hopper_fmha,
    get_configs_for_cutlass_hopper_fna,
    get_configs_for_flex_fmha,
    get_configs_for_flex_fna,
)
from natten_jax.functional import attention, na1d, na2d, na3d
from natten_jax.merge import merge_attentions
from natten_jax.native import EXPORT_CHECKS
from natten_jax.op import CHECKPOINT_NAMES
from natten_jax.problem import KernelSchedule
from natten_jax.tuned import load_tuned
from natten_jax.version import __version__

__all__ = [
    "CHECKPOINT_NAMES",
    "EXPORT_CHECKS",
    "KernelSchedule",
    "MissingKernelsWarning",
    "__version__",
    "attention",
    "get_bwd_configs_for_cpu_fmha",
    "get_bwd_configs_for_cpu_fna",
    "get_bwd_configs_for_cutlass_fmha",
    "get_bwd_configs_for_cutlass_fna",
    "get_bwd_configs_for_cutlass_hopper_fmha",
    "get_bwd_configs_for_cutlass_hopper_fna",
    "get_bwd_configs_for_flex_fmha",
    "get_bwd_configs_for_flex_fna",
    "get_configs_for_cpu_fmha",
    "get_configs_for_cpu_fna",
    "get_configs_for_cutlass_fmha",
    "get_configs_for_cutlass_fna",
    "get_configs_for_cutlass_hopper_fmha",
    "get_configs_for_cutlass_hopper_fna",
    "get_configs_for_flex_fmha",
    "get_configs_for_flex_fna",
    "load_tuned",
    "merge_attentions",
    "na1d",
    "na2d",
    "na3d",
]
