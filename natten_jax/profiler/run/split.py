"""How ``--devices`` and ``--split`` divide a problem: which devices, where arrays lie, and what each device gets."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from natten_jax.halo import bytes_received
from natten_jax.plan.devices import default_jax_device
from natten_jax.problem import Shape, problem_of
from natten_jax.profiler.options import Options
from natten_jax.sharding.auto import HeadSplit

#: Values of --split: shares of whole problems, or names of token dimensions (by the rank of the problem).
SHARES = ("batch", "heads")
DIMENSIONS = {1: ("T",), 2: ("H", "W"), 3: ("T", "H", "W")}


def splits_tokens(options: Options) -> bool:
    """Whether token dimensions are split."""
    return options.split not in SHARES


def token_parts(options: Options) -> Shape:
    """Into how many parts each token dimension is split: those of which a device receives the fewest bytes.

    Raises:
        ValueError: ``--split`` names something else, or the dimensions do not consist of so many equal parts.
    """
    if not splits_tokens(options):
        return (1,) * options.rank
    names = DIMENSIONS[options.rank]
    wanted = options.split.split(",")
    if not set(wanted) <= set(names) or len(set(wanted)) < len(wanted):
        known = ", ".join((*SHARES, *names))
        several = f", or token dimensions with commas, as {','.join(names)}" if options.rank > 1 else ""
        raise ValueError(f"--split takes {known}{several}; got {options.split}")
    counts = [
        [n for n in range(1, options.devices + 1) if extent % n == options.devices % n == 0] if name in wanted else [1]
        for name, extent in zip(names, options.input_size, strict=True)
    ]
    every = [parts for parts in itertools.product(*counts) if math.prod(parts) == options.devices]
    if not every:
        size = " ".join(map(str, options.input_size))
        raise ValueError(
            f"--devices {options.devices} cannot share the tokens equally that --split {options.split} names: "
            f"the input size is {size}"
        )
    # All that the size of a halo depends on.
    problem = problem_of(options.input_size, **options.window._asdict())
    return min(every, key=lambda parts: bytes_received(problem, parts))


def devices_of(options: Options) -> list[jax.Device]:
    """The devices of this process that the problem is split over: the first ones of the default device's platform.

    Raises:
        ValueError: There are not so many.
    """
    devices, wanted = jax.local_devices(backend=default_jax_device().platform), options.devices
    if wanted > len(devices):
        kind = devices[0].device_kind
        advice = ""
        if devices[0].platform == "cpu":
            advice = (
                f"; a CPU host has more with jax_num_cpu_devices (JAX_NUM_CPU_DEVICES={wanted}) or "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted}"
            )
        raise ValueError(f"--devices {wanted} is more than there are here: {len(devices)} ({kind}){advice}")
    return devices[:wanted]


def sharding_of(options: Options, shape: Shape) -> NamedSharding:
    """How an array ``[batch, ..., heads, head_dim]`` lies on the devices, which XLA's partitioner splits programs over.

    Key/value heads that the devices cannot divide are on all of them, and where tokens are split additional ones are.

    Raises:
        ValueError: There are fewer devices.
    """
    axes: tuple[str | None, ...]
    if splits_tokens(options):
        parts, names = token_parts(options), DIMENSIONS[options.rank]
        axes = (None, *names) if tuple(shape[1 : 1 + options.rank]) == tuple(options.input_size) else ()
    else:
        parts, names = (options.devices,), ("devices",)
        axis = 0 if options.split == "batch" else len(shape) - 2
        axes = (*(None,) * axis, "devices") if shape[axis] % options.devices == 0 else ()
    mesh = Mesh(np.asarray(devices_of(options)).reshape(parts), names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(mesh, PartitionSpec(*axes))


def of_each_device(options: Options) -> Options:
    """The options of what one device computes: its share of the batch, or its query heads and the heads they read.

    Where tokens are split, that is some of the whole problem's.
    """
    count = options.devices
    one = dataclasses.replace(options, devices=1)
    if splits_tokens(options):
        return one
    if options.split == "batch":
        return dataclasses.replace(one, batch_size=options.batch_size // count)
    heads_kv = HeadSplit.of(options.heads, options.heads_kv, count, 1).needed.shape[1]
    return dataclasses.replace(one, heads=options.heads // count, heads_kv=heads_kv)


def share(options: Options) -> str:
    """What one device gets, as flags."""
    one = of_each_device(options)
    if splits_tokens(options):
        return "with the same tiles as the whole problem on --devices 1"
    if options.split == "batch":
        return f"--batch-size {one.batch_size}"
    return f"--heads {one.heads}" + (f" --heads-kv {one.heads_kv}" if one.heads_kv != one.heads else "")


def describe(options: Options) -> str:
    """``8 devices, split over batch``."""
    if splits_tokens(options):
        parts = zip(DIMENSIONS[options.rank], token_parts(options), strict=True)
        each = ", ".join(f"{name} in {count}" for name, count in parts)
        return f"{options.devices} devices, split over {options.split} ({each})"
    is_whole = options.split == "batch" or options.heads_kv % options.devices == 0
    copies = "" if is_whole else " (key/value heads on every device)"
    return f"{options.devices} devices, split over {options.split}{copies}"
