"""How ``--devices`` and ``--split`` divide a problem: which devices, where arrays lie, and what each device gets."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from natten_jax.mesh.heads import HeadSplit
from natten_jax.problem import Shape
from natten_jax.profiler.options import Options

_AXIS = "devices"


def devices_of(options: Options) -> list[jax.Device]:
    """The devices of this process that the problem is split over: the first ones.

    Raises:
        ValueError: There are not so many.
    """
    devices, wanted = jax.local_devices(), options.devices
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

    Key/value heads that the devices cannot divide are on all of them.

    Raises:
        ValueError: There are fewer devices.
    """
    mesh = Mesh(np.asarray(devices_of(options)), (_AXIS,), axis_types=(AxisType.Auto,))
    axis = 0 if options.split == "batch" else len(shape) - 2
    axes = [_AXIS if i == axis and shape[i] % options.devices == 0 else None for i in range(len(shape))]
    return NamedSharding(mesh, PartitionSpec(*axes))


def of_each_device(options: Options) -> Options:
    """The options of what one device computes: its share of the batch, or its query heads and the heads they read."""
    count = options.devices
    one = dataclasses.replace(options, devices=1)
    if options.split == "batch":
        return dataclasses.replace(one, batch_size=options.batch_size // count)
    heads_kv = HeadSplit.of(options.heads, options.heads_kv, count, 1).needed.shape[1]
    return dataclasses.replace(one, heads=options.heads // count, heads_kv=heads_kv)


def share(options: Options) -> str:
    """What one device gets, as flags."""
    one = of_each_device(options)
    if options.split == "batch":
        return f"--batch-size {one.batch_size}"
    return f"--heads {one.heads}" + (f" --heads-kv {one.heads_kv}" if one.heads_kv != one.heads else "")


def describe(options: Options) -> str:
    """``8 devices, split over batch``."""
    copies = "" if options.split == "batch" or _splits_kv(options) else " (key/value heads on every device)"
    return f"{options.devices} devices, split over {options.split}{copies}"


def _splits_kv(options: Options) -> bool:
    return options.heads_kv % options.devices == 0
