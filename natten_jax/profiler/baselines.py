"""Baselines of the profiler: the self attention of JAX and of tokamax, over the flattened tokens."""

from __future__ import annotations

import importlib
from typing import Any

import jax

from natten_jax.cost_model.tiles import all_pairs
from natten_jax.plan.devices import Device
from natten_jax.problem import Problem

#: Names of the baselines on the command line. ``"cudnn"`` and ``"xla"`` are implementations of
#: ``jax.nn.dot_product_attention``. ``"pallas"`` runs Pallas kernels of the package tokamax.
BASELINES = ("cudnn", "xla", "pallas")


def check(name: str, flag: str, problem: Problem, device: Device, memory: int) -> None:
    """Check that a baseline can run on the device.

    Args:
        name: Name of the baseline, from :data:`BASELINES`.
        flag: The command line flag that selected the baseline. Error messages name it.
        problem: The self attention problem of the baseline.
        device: The device to run on.
        memory: Memory of the device in bytes.

    Raises:
        ValueError: The baseline cannot run; the message names an alternative.
        MemoryError: The ``xla`` baseline's logits are larger than the memory.
    """
    if problem.element.is_float8:
        raise ValueError(f"the {name} baseline does not support 8-bit arrays: use {flag} {name} --dtype bf16")
    is_half = problem.dtype == "float16"
    if name != "xla" and device.platform != "cuda":
        other = f"use {flag} xla{' --dtype bf16' * is_half}"
        raise ValueError(f"the {name} baseline needs an NVIDIA GPU, and this is {device}: {other}")
    if name == "xla" and device.platform == "cpu" and is_half:
        # For fp16, jax.nn.dot_product_attention requests a dot product algorithm that XLA supports on GPUs only.
        raise ValueError("the xla baseline cannot run fp16 on the CPU: use --dtype bf16 or --dtype fp32")
    logits = 4 * problem.batch * problem.heads * all_pairs(problem)  # bytes; XLA stores the logits in float32
    if name == "xla" and logits > memory:
        raise MemoryError(
            f"the xla baseline's logits take {logits / 2**30:,.1f} GiB: "
            "omit it, compare with flex-fna, or take fewer tokens or heads"
        )


def can_be_split(name: str, devices: int, split: str, heads_kv: int) -> bool:
    """Return True if XLA can split the computation of a baseline over this number of devices."""
    if devices == 1 or name == "xla":
        return True
    return name == "cudnn" and (split == "batch" or (split == "heads" and heads_kv % devices == 0))


def attend(name: str, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Compute self attention over all tokens of arrays ``[batch, *layout, heads, head_dim]``."""
    flat = [array.reshape(array.shape[0], -1, *array.shape[-2:]) for array in (query, key, value)]
    implementation: Any = name
    output = _pallas(*flat) if name == "pallas" else jax.nn.dot_product_attention(*flat, implementation=implementation)
    return output.reshape(*query.shape[:-1], value.shape[-1])


def _pallas(*arrays: jax.Array) -> jax.Array:
    try:
        attend = importlib.import_module("tokamax").dot_product_attention
    except ImportError as error:
        raise ValueError(
            f"the pallas baseline needs the package tokamax, on Python 3.12 or later with JAX 0.11.1 or later: {error}"
        ) from None
    try:
        output: jax.Array = attend(*arrays, implementation="mosaic")
    except NotImplementedError as error:
        raise ValueError(f"tokamax has no Pallas kernel for the pallas baseline here: {error}") from None
    return output
