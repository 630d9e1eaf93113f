"""The host's kernels as a backend to which biases of keys are columns, as they are to those for GPUs."""

from __future__ import annotations

from natten_jax.backends.cpu import CpuBackend

LARGEST_HEAD_DIM = 64


class ColumnsBackend(CpuBackend):
    """Takes heads whose width is a multiple of 8, and biases of keys as columns of them."""

    family = "columns"
    wraps_by_strips = True
    biases = ("relative_bias", "key_bias")
    key_bias_by_columns = True
    head_dim_step = 8
    largest_head_dim = LARGEST_HEAD_DIM


BACKEND = ColumnsBackend()
