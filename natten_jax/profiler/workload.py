"""The program that the options describe, compiled: its plans, and its inputs, sharded over the devices."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from natten_jax import backends
from natten_jax.backends.base import Platform
from natten_jax.backends.select import resolve
from natten_jax.ops import neighborhood
from natten_jax.ops.sub_calls import KeySet
from natten_jax.plan.devices import Device, default_device, default_jax_device
from natten_jax.plan.plan import BackendId, Plan
from natten_jax.problem import Shape
from natten_jax.profiler import baselines
from natten_jax.profiler.capture import Launch
from natten_jax.profiler.options import DIMENSIONS, Options
from natten_jax.profiler.program import Program, compile_for_trace


class UnavailableBackend(ValueError):
    """A backend that does not run on the device."""


# The program.


@dataclasses.dataclass(frozen=True)
class Workload:
    """A compiled program and its inputs.

    Attributes:
        options: Options of the program.
        plans: Plans by ``"forward"``, ``"backward"``, ``"additional_kv_forward"``, ...; empty for baselines.
        device: Device that runs the program.
        compiled: The compiled program.
        arguments: Its inputs.
        program: Its instructions.
    """

    options: Options
    plans: dict[str, Plan]
    device: Device
    compiled: jax.stages.Compiled
    arguments: tuple[jax.Array, ...]
    program: Program

    def run(self) -> Any:
        """Run the program once, without waiting for the results."""
        return self.compiled(*self.arguments)

    def warm_up(self, steps: int) -> None:
        """Run the program and wait for the results, ``steps`` times."""
        for _ in range(steps):
            jax.block_until_ready(self.run())  # type: ignore[no-untyped-call]

    @property
    def launch(self) -> Launch:
        """The program for a capture."""
        return Launch(self.run, self.program)


def compile_workload(
    options: Options, name: str = "profiled", arguments: tuple[jax.Array, ...] | None = None
) -> Workload:
    """Compile the program that the options describe for the default device.

    Args:
        options: Options of the program.
        name: Name of the program. Programs of one capture need different names.
        arguments: Inputs of an equal problem to use again. Default: new ones.

    Raises:
        UnavailableBackend: A named backend does not run on this device.
        ValueError: The problem cannot run with these options.
        MemoryError: It is too large for the device.
    """
    device = default_device()
    check_runs(options, device)
    plans: dict[str, Plan] = {}
    for call in () if options.is_baseline else options.sub_calls_per_device():
        prefix = "additional_kv_" if call.kind is KeySet.ADDITIONAL else ""
        plans |= {prefix + pass_: resolve(call.request, device, pass_) for pass_ in options.passes}
    function = _function(options)
    function.__name__ = name
    # Inputs of another problem may end with additional tokens that this one lacks.
    arguments = make_inputs(options) if arguments is None else arguments[: len(input_shapes(options))]
    compiled = compile_for_trace(function, *arguments)
    return Workload(options, plans, device, compiled, arguments, Program.from_compiled(compiled))


def _function(options: Options) -> Callable[..., Any]:
    """Return the function to profile, of query, key, value, ...; with ``--backprop``, of the cotangent first."""

    def forward(query: jax.Array, key: jax.Array, value: jax.Array, *additional: jax.Array) -> Any:
        if options.is_baseline:
            return baselines.attend(str(options.backend), query, key, value)
        operator: Callable[..., Any] = getattr(neighborhood, f"na{options.problem.rank}d")
        return operator(
            query,
            key,
            value,
            **options.problem.windows._asdict(),
            additional_keys=additional[0] if additional else None,
            additional_values=additional[1] if additional else None,
            attention_kwargs=options.attention_kwargs,
            backend=options.backend,
            **dataclasses.asdict(options.performance),
        )

    def forward_and_backward(cotangent: jax.Array, *arrays: jax.Array) -> Any:
        output, gradients = jax.vjp(forward, *arrays)
        return output, gradients(cotangent)

    return forward_and_backward if options.backprop else forward


# Checks before compilation.


def check_runs(options: Options, device: Device) -> None:
    """Check the backends, the memory of the device, and what baselines require.

    Raises:
        UnavailableBackend: A named backend does not run on this device.
        ValueError: The baseline does not run.
        MemoryError: The problem is too large for the device.
    """
    check_available(options, device)
    check_fits(options)
    if options.is_baseline:
        name = str(options.backend)
        flag = "--compare" if name == options.compare else "--backend"
        baselines.check(name, flag, options.problem, device, memory(options))


def check_available(options: Options, device: Device) -> None:
    """Check that the named backends run on the device.

    Raises:
        UnavailableBackend: A backend does not. The message contains the devices that it runs on.
    """
    for name in (options.backend, options.fmha_backend):
        platform = None if name is None else platform_of(name)
        if platform is not None and not platform.has(device):
            raise UnavailableBackend(f"{name} runs on {platform}, and this is {device}")


def platform_of(name: str) -> Platform | None:
    """Return the devices that a backend runs on; ``None`` for all devices, and for baselines."""
    return None if name in baselines.BASELINES else backends.of(BackendId.parse(name)).capabilities.platform


def check_fits(options: Options) -> None:
    """Check that the device has memory for inputs and results. XLA crashes on some sizes.

    Raises:
        ValueError: There are fewer devices.
        MemoryError: The arrays are larger than the memory.
    """
    needed = 0
    for array in _shapes(options):
        shape = array.shape if options.devices == 1 else sharding_of(options, array.shape).shard_shape(array.shape)
        needed += math.prod(shape) * array.dtype.itemsize
    if options.backprop:
        needed *= 2  # the output's cotangent, and the gradient of every input
    available = memory(options)
    if needed > available:
        raise MemoryError(
            "the problem is too large for this machine: its operands and results take "
            f"{needed / 2**30:,.1f} GiB, and {default_device()} has {available / 2**30:,.1f} GiB"
        )


def memory(options: Options) -> int:
    """Return the memory of each device in bytes. Devices of the host share its memory."""
    available = (default_jax_device().memory_stats() or {}).get("bytes_limit")
    if available is not None:
        return int(available)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // options.devices


# Inputs.


def input_shapes(options: Options) -> list[Any]:
    """Return shapes and types of (cotangent,) query, key, value, additional keys and values."""
    return _shapes(options)[not options.backprop :]


def _shapes(options: Options) -> list[Any]:
    """Return shapes and types of output, query, key, value and additional keys and values."""

    problem = options.problem

    def array(layout: Shape, heads: int, dim: int) -> jax.ShapeDtypeStruct:
        shape = problem.batch, *layout, heads, dim
        return jax.ShapeDtypeStruct(shape, jnp.dtype(problem.dtype))  # type: ignore[no-untyped-call]

    dims = problem.head_dim, problem.head_dim_v
    arrays = [array(problem.query_layout, problem.heads, dim) for dim in reversed(dims)]
    arrays += [array(problem.query_layout, problem.heads_kv, dim) for dim in dims]
    if problem.additional_kv:
        arrays += [array((problem.additional_kv,), problem.heads_kv, dim) for dim in dims]
    return arrays


def make_inputs(options: Options) -> tuple[jax.Array, ...]:
    """Return random normal arrays, sharded over the devices. Zeros would draw less power and run faster.

    Raises:
        ValueError: There are fewer devices.
    """
    wanted = input_shapes(options)
    keys = jax.random.split(jax.random.key(0), len(wanted))

    def random(key: jax.Array, like: Any) -> Any:
        # Made in shards: the whole array may exceed the memory of a device.
        shards = None if options.devices == 1 else sharding_of(options, like.shape)
        return jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=shards)(key, like.shape, like.dtype)

    return tuple(map(random, keys, wanted))


# Several devices.


def devices_of(options: Options) -> list[jax.Device]:
    """Return the devices that the problem is split over: the first of the default device's platform.

    Raises:
        ValueError: There are fewer.
    """
    devices, wanted = jax.local_devices(backend=default_jax_device().platform), options.devices
    if wanted > len(devices):
        advice = f"; a CPU host has more with JAX_NUM_CPU_DEVICES={wanted}" if devices[0].platform == "cpu" else ""
        kind = devices[0].device_kind
        raise ValueError(f"--devices {wanted} is more than there are here: {len(devices)} ({kind}){advice}")
    return devices[:wanted]


def sharding_of(options: Options, shape: Shape) -> NamedSharding:
    """Return the sharding of an array ``[batch, ..., heads, head_dim]``.

    Key/value heads are replicated if the devices cannot divide them. Additional tokens are replicated if tokens are
    split.

    Raises:
        ValueError: There are fewer devices.
    """
    axes: tuple[str | None, ...]
    if options.splits_tokens:
        parts, names = options.token_parts(), DIMENSIONS[options.problem.rank]
        axes = (None, *names) if shape[1:-2] == options.problem.query_layout else ()
    else:
        parts, names = (options.devices,), ("devices",)
        axis = 0 if options.split == "batch" else len(shape) - 2
        axes = (*(None,) * axis, "devices") if shape[axis] % options.devices == 0 else ()
    mesh = Mesh(np.asarray(devices_of(options)).reshape(parts), names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(mesh, PartitionSpec(*axes))
