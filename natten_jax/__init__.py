"""Neighborhood attention for JAX."""

import jax.export as _export

from natten_jax import backends as _backends
from natten_jax import checkpoint_names as _checkpoint_names
from natten_jax import configs as _configs
from natten_jax import source_tree as _source_tree
from natten_jax import version as _version
from natten_jax.backends.missing_kernels import MissingKernelsWarning
from natten_jax.dense import attention
from natten_jax.functional import na1d, na2d, na3d
from natten_jax.ignored_arguments import IgnoredArgumentWarning
from natten_jax.merge import merge_attentions
from natten_jax.performance import KernelSchedule
from natten_jax.tuned import load_tuned

_source_tree.serve_flax_modules()

#: The version of this package.
__version__ = _version.__version__

#: Names of the saved residuals. With ``jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)`` a
#: rematerialised function keeps them, and does not run the forward kernel a second time.
CHECKPOINT_NAMES = _checkpoint_names.CHECKPOINT_NAMES

#: Pass these to ``jax.export.export(..., disabled_checks=...)`` to export programs that use native kernels.
EXPORT_CHECKS = tuple(map(_export.DisabledSafetyCheck.custom_call, _backends.export_targets()))

__all__ = [
    "CHECKPOINT_NAMES",
    "EXPORT_CHECKS",
    "IgnoredArgumentWarning",
    "KernelSchedule",
    "MissingKernelsWarning",
    "__version__",
    "attention",
    "load_tuned",
    "merge_attentions",
    "na1d",
    "na2d",
    "na3d",
]
__all__ += _configs.query_names()


def __getattr__(name: str) -> _configs.ConfigQuery:
    """The configuration queries, one for every backend: ``get_[bwd_]configs_for_<family>_<fna|fmha>``."""
    try:
        return _configs.query_named(name)
    except LookupError:
        raise AttributeError(f"module 'natten_jax' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_configs.query_names()})
