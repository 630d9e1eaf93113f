"""Neighborhood attention for JAX."""

import importlib as _importlib
import importlib.util as _importlib_util
import sys as _sys
from typing import Any as _Any

import jax.export as _export

from natten_jax import backends as _backends
from natten_jax import source_tree as _source_tree
from natten_jax import version as _version
from natten_jax.autotuning.configurations import load_tuned
from natten_jax.backends.select import MissingKernelsWarning
from natten_jax.execution import primitive as _checkpoint_names
from natten_jax.ops import config_queries as _config_queries
from natten_jax.ops.attention import attention
from natten_jax.ops.calls import IgnoredArgumentWarning
from natten_jax.ops.config_queries import configs
from natten_jax.ops.merge import merge_attentions
from natten_jax.ops.neighborhood import na1d, na2d, na3d
from natten_jax.ops.neighborhood_weights import neighborhood_apply, neighborhood_weights
from natten_jax.performance import KernelSchedule
from natten_jax.tuning import tune

_source_tree.serve_flax_modules()

#: The version of this package.
__version__ = _version.__version__

#: Checkpoint names (``jax.ad_checkpoint.checkpoint_name``) of the arrays that a forward pass saves for its backward
#: pass. If a rematerialized function has the policy
#: ``jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)``, JAX keeps these arrays, and the backward pass
#: does not run the forward kernel again.
CHECKPOINT_NAMES = _checkpoint_names.CHECKPOINT_NAMES

#: Safety checks of ``jax.export`` that reject native kernels. To export a program that uses native kernels, disable
#: them: ``jax.export.export(..., disabled_checks=EXPORT_CHECKS)``.
EXPORT_CHECKS = tuple(map(_export.DisabledSafetyCheck.custom_call, _backends.export_targets()))

__all__ = [
    "CHECKPOINT_NAMES",
    "EXPORT_CHECKS",
    "IgnoredArgumentWarning",
    "KernelSchedule",
    "MissingKernelsWarning",
    "__version__",
    "attention",
    "configs",
    "load_tuned",
    "merge_attentions",
    "na1d",
    "na2d",
    "na3d",
    "neighborhood_apply",
    "neighborhood_weights",
    "tune",
]
__all__ += _config_queries.query_names()


def _public_modules() -> tuple[str, ...]:
    """Return the names of the public submodules, which docs/api.md lists. They are imported on first access."""
    modules = ("fp8", "halo", "performance", "plot", "problem", "rotary", "simulator", "windows")
    return modules if _importlib_util.find_spec("flax") is None else (*modules, "flax_modules")


def __getattr__(name: str) -> _Any:
    """Import a public submodule, or return the function ``get_[bwd_]configs_for_<family>_<fna|fmha>`` of this name."""
    if not name.startswith("_") and name in _public_modules():
        return _importlib.import_module(f"{__name__}.{name}")
    try:
        return _config_queries.query_named(name)
    except LookupError:
        module = _sys.modules[__name__]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=module) from None


def __dir__() -> list[str]:
    """List public functions, constants and submodules, and the standard attributes of a module."""
    dunder_names = (name for name in globals() if name.startswith("__") and name.endswith("__"))
    return sorted({*__all__, *_config_queries.query_names(), *_public_modules(), *dunder_names})
