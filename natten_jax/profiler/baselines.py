"""Attention as JAX itself has it, to compare with: self attention over the flattened tokens."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import jax

from natten_jax.cost.work import all_pairs
from natten_jax.plan.devices import Device
from natten_jax.problem import Problem

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _pallas(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas.ops.gpu.attention import mha
    except ImportError as error:
        raise ValueError(f"the pallas baseline is not part of JAX {jax.__version__}: {error}") from None
    if key.shape[-2] != query.shape[-2]:
        raise ValueError("the pallas baseline takes as many key/value heads as query heads: leave out --heads-kv")
    output: jax.Array = mha(query, key, value, None, sm_scale=query.shape[-1] ** -0.5)
    return output


#: By the name on the command line.
BASELINES: dict[str, Attention] = {
    "cudnn": functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
    "xla": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
    "pallas": _pallas,
}


def check(name: str, flag: str, problem: Problem, device: Device, is_room: Callable[[int], bool]) -> None:
    """Check that a baseline can run on the device.

    Args:
        name: The baseline, a key of :data:`BASELINES`.
        flag: The command line flag that named it.
        problem: The self attention that it would compute.
        device: The device to run on.
        is_room: Whether the device has memory for as many bytes.

    Raises:
        ValueError: It cannot; the message says what can.
        MemoryError: It has no room for the logits.
    """
    if name != "xla":
        if device.platform != "cuda":
            instead = _instead(flag, problem, is_room)
            raise ValueError(f"the {name} baseline needs an NVIDIA GPU, and this is {device}: {instead}")
        return
    if device.platform == "cpu" and problem.dtype == "float16":
        # jax.nn.dot_product_attention asks for a dot product algorithm that XLA has on GPUs only.
        types = "use --dtype bf16 or --dtype fp32" if is_room(_logits_bytes(problem)) else _NOTHING
        raise ValueError(f"the xla baseline cannot run fp16 on the CPU: {types}")
    if not is_room(_logits_bytes(problem)):
        raise MemoryError(f"the xla baseline's logits take {_logits_bytes(problem) / 2**30:,.1f} GiB: {_NOTHING}")


#: Advice where no baseline runs.
_NOTHING = "leave it out, compare with flex-fna, or take fewer tokens or heads"


def _instead(flag: str, problem: Problem, is_room: Callable[[int], bool]) -> str:
    """What to compare with on the host."""
    if not is_room(2 * _logits_bytes(problem)):  # twice: gradients, or weights beside logits
        return _NOTHING
    return f"use {flag} xla" + (" --dtype bf16" if problem.dtype == "float16" else "")


def _logits_bytes(problem: Problem) -> int:
    """Bytes of all logits in float32, which XLA keeps."""
    return 4 * problem.batch * problem.heads * all_pairs(problem)


def refusal_to_split(name: str, devices: int, split: str, heads_kv: int) -> str | None:
    """Why a baseline cannot be split over devices; ``None`` where it can be."""
    if devices == 1 or name == "xla":
        return None
    if name == "cudnn":
        if split == "batch" or (split == "heads" and heads_kv % devices == 0):
            return None
        if split != "heads":
            return "its kernel wants all tokens, which every device would gather"
        return f"it takes key/value heads split as query heads, and {heads_kv} cannot be split over {devices} devices"
    return "XLA cannot split its kernel, and every device would compute everything"


def attend(name: str, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Self attention over all tokens of arrays ``[batch, *layout, heads, head_dim]``."""

    def flat(array: jax.Array) -> jax.Array:
        return array.reshape(array.shape[0], -1, *array.shape[-2:])

    output = BASELINES[name](flat(query), flat(key), flat(value))
    return output.reshape(*query.shape[:-1], value.shape[-1])
