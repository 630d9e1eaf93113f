"""Inputs of the program that the options describe: their shapes, whether the device has room, and the arrays."""

from __future__ import annotations

import math
import os
from typing import Any, cast

import jax
import jax.numpy as jnp

from natten_jax.plan.devices import default_device, default_jax_device
from natten_jax.profiler.options import ELEMENT_TYPES, Options
from natten_jax.profiler.run.split import sharding_of

_MOST_ELEMENTS = 2**63 - 1


def shapes(options: Options) -> list[Any]:
    """Query, key, value and additional keys and values, as shapes and dtypes."""

    def array(layout: tuple[int, ...], heads: int, dim: int) -> jax.ShapeDtypeStruct:
        shape = options.batch_size, *layout, heads, dim
        return jax.ShapeDtypeStruct(shape, jnp.dtype(ELEMENT_TYPES[options.dtype]))  # type: ignore[no-untyped-call]

    dims = options.dim, options.dim_value
    arrays = [array(options.input_size, options.heads, options.dim)]
    arrays += [array(options.input_size, options.heads_kv, dim) for dim in dims]
    if options.add_kv:
        arrays += [array((options.add_kv,), options.heads_kv, dim) for dim in dims]
    return arrays


def _output(options: Options) -> Any:
    query = shapes(options)[0]
    return query.update(shape=(*query.shape[:-1], options.dim_value))


def check_fits(options: Options) -> None:
    """Check that the device has memory for operands and results, before XLA hears of them: some sizes crash it.

    Raises:
        ValueError: An array would have too many elements, or there are fewer devices.
        MemoryError: They are larger than the memory; the message says how large both are.
    """
    arrays = [*shapes(options), _output(options)]
    for each in arrays:
        if math.prod(each.shape) > _MOST_ELEMENTS:
            raise ValueError(f"an array of shape {each.shape} has more elements than XLA can count: 2**63 - 1")
    needed = sum(_bytes_on_a_device(options, each) for each in arrays)
    if options.backprop:
        needed *= 2  # the output's cotangent, and the gradient of every operand
    if not is_room(options, needed):
        wanted, there = (f"{count / 2**30:,.1f} GiB" for count in (needed, _memory()[0]))
        raise MemoryError(f"its operands and results take {wanted}, and {default_device()} has {there}")


def is_room(options: Options, needed: int) -> bool:
    """Whether a device has memory for as many bytes, when each of those that the options ask for needs them."""
    available, is_host = _memory()
    return needed * (options.devices if is_host else 1) <= available


def _memory() -> tuple[int, bool]:
    """Bytes of the default device's memory, and whether it is the host's: such devices do not say what they have."""
    available = (default_jax_device().memory_stats() or {}).get("bytes_limit")
    if available is not None:
        return available, False
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), True


def _bytes_on_a_device(options: Options, array: Any) -> int:
    shape = array.shape if options.devices == 1 else sharding_of(options, array.shape).shard_shape(array.shape)
    return int(math.prod(shape) * array.dtype.itemsize)


def make_inputs(options: Options) -> tuple[jax.Array, ...]:
    """Random normal arrays, never zeros: easy data runs faster than real data, as it draws less power.

    They lie on the devices that the options ask for, each with its share of them.

    Raises:
        ValueError: There are fewer devices.
    """
    wanted = shapes(options)
    if options.backprop:
        wanted.insert(0, _output(options))
    keys = jax.random.split(jax.random.key(0), len(wanted))

    def random(key: jax.Array, like: Any) -> jax.Array:
        if options.devices == 1:
            return jax.random.normal(key, like.shape, like.dtype)
        # Made where they lie: all of an array may be more than one device holds.
        placed = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=sharding_of(options, like.shape))
        return cast(jax.Array, placed(key, like.shape, like.dtype))

    return tuple(random(key, each) for key, each in zip(keys, wanted, strict=True))
