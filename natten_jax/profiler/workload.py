"""The program that the options describe: its problem, inputs, shards on several devices, and plans; compiled."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from natten_jax import backends
from natten_jax.autotuning.tables import table_for
from natten_jax.backends.base import Platform
from natten_jax.backends.select import resolve
from natten_jax.halo import bytes_received
from natten_jax.ops import neighborhood, sub_calls
from natten_jax.ops.sub_calls import KeySet, SubCall
from natten_jax.performance import Pass
from natten_jax.plan.devices import Device, default_device, default_jax_device
from natten_jax.plan.plan import BackendId, Plan, Request
from natten_jax.problem import Shape, problem_of
from natten_jax.profiler import baselines
from natten_jax.profiler.capture import Launch
from natten_jax.profiler.options import ELEMENT_TYPES, Options
from natten_jax.profiler.program import Program, compile_for_trace
from natten_jax.sharding.auto import HeadSplit

#: Families of backends that run only on some devices.
KNOWN_FAMILIES: dict[str, Platform] = {
    backend.family: backend.capabilities.platform
    for backend in backends.registered()
    if backend.capabilities.platform is not None
}

#: Values of --split that divide whole problems, and names of token dimensions by rank.
SHARES = ("batch", "heads")
DIMENSIONS = {1: ("T",), 2: ("H", "W"), 3: ("T", "H", "W")}


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
    for call in () if options.is_baseline else sub_calls_of_device(options):
        prefix = "additional_kv_" if call.kind is KeySet.ADDITIONAL else ""
        plans |= {prefix + pass_: resolve(call.request, device, pass_) for pass_ in passes(options)}
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
        operator: Callable[..., Any] = getattr(neighborhood, f"na{options.rank}d")
        return operator(
            query,
            key,
            value,
            **options.window._asdict(),
            additional_keys=additional[0] if additional else None,
            additional_values=additional[1] if additional else None,
            attention_kwargs=attention_kwargs(options),
            backend=options.backend,
            **dataclasses.asdict(options.performance),
        )

    def forward_and_backward(cotangent: jax.Array, *arrays: jax.Array) -> Any:
        output, gradients = jax.vjp(forward, *arrays)
        return output, gradients(cotangent)

    return forward_and_backward if options.backprop else forward


def passes(options: Options) -> tuple[Pass, ...]:
    """Return the passes to profile."""
    return ("forward", "backward") if options.backprop else ("forward",)


def request_of(options: Options) -> Request:
    """Return the request to the operators.

    Raises:
        ValueError: The operators do not support the problem.
    """
    problem = problem_of(
        options.input_size,
        **options.window._asdict(),
        batch=options.batch_size,
        heads=options.heads,
        heads_kv=options.heads_kv,
        head_dim=options.dim,
        head_dim_v=options.dim_value,
        dtype=ELEMENT_TYPES[options.dtype],
        additional_kv=options.add_kv,
    )
    backend = None if options.is_baseline else options.backend
    return Request(problem, options.performance, backend, tuned=table_for())


def attention_kwargs(options: Options) -> dict[str, Any] | None:
    """Return the operators' argument of this name."""
    return None if options.fmha_backend is None else {"backend": options.fmha_backend}


def sub_calls_of(options: Options) -> tuple[SubCall, ...]:
    """Return the attention calls that the operator makes."""
    return sub_calls.sub_calls_of(request_of(options), attention_kwargs(options))


def sub_calls_of_device(options: Options) -> tuple[SubCall, ...]:
    """Return the attention calls of each device, on its share of the problem."""
    every = sub_calls_of(options)
    if options.devices == 1:
        return every
    one = request_of(options_per_device(options)).problem
    return tuple(each._replace(request=each.request.of_part(one.batch, one.heads, one.heads_kv)) for each in every)


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
        baselines.check(name, flag, request_of(options).problem, device, memory(options))


def check_available(options: Options, device: Device) -> None:
    """Check that the named backends run on the device.

    Raises:
        UnavailableBackend: A backend does not. The message contains the devices that it runs on.
    """
    for name in (options.backend, options.fmha_backend):
        if name is None or name in baselines.BASELINES:
            continue
        platform = KNOWN_FAMILIES.get(BackendId.parse(name).family)
        if platform is not None and not platform.has(device):
            raise UnavailableBackend(f"{name} runs on {platform}, and this is {device}")


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

    def array(layout: tuple[int, ...], heads: int, dim: int) -> jax.ShapeDtypeStruct:
        shape = options.batch_size, *layout, heads, dim
        return jax.ShapeDtypeStruct(shape, jnp.dtype(ELEMENT_TYPES[options.dtype]))  # type: ignore[no-untyped-call]

    dims = options.dim, options.dim_value
    arrays = [array(options.input_size, options.heads, dim) for dim in (options.dim_value, options.dim)]
    arrays += [array(options.input_size, options.heads_kv, dim) for dim in dims]
    if options.add_kv:
        arrays += [array((options.add_kv,), options.heads_kv, dim) for dim in dims]
    return arrays


def make_inputs(options: Options) -> tuple[jax.Array, ...]:
    """Return random normal arrays, sharded over the devices. Zeros would draw less power and run faster.

    Raises:
        ValueError: There are fewer devices.
    """
    wanted = input_shapes(options)
    keys = jax.random.split(jax.random.key(0), len(wanted))

    def random(key: jax.Array, like: Any) -> jax.Array:
        if options.devices == 1:
            return jax.random.normal(key, like.shape, like.dtype)
        # Made in shards: the whole array may exceed the memory of a device.
        placed = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=sharding_of(options, like.shape))
        return cast(jax.Array, placed(key, like.shape, like.dtype))

    return tuple(random(key, each) for key, each in zip(keys, wanted, strict=True))


# Several devices.


def splits_tokens(options: Options) -> bool:
    """Return if token dimensions are split."""
    return options.split not in SHARES


def token_parts(options: Options) -> Shape:
    """Return the number of parts per token dimension, such that a device receives the fewest bytes.

    Raises:
        ValueError: ``--split`` has an unknown name, or the dimensions cannot be cut into equal parts.
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
    problem = problem_of(options.input_size, **options.window._asdict())  # halos depend only on these arguments
    return min(every, key=lambda parts: bytes_received(problem, parts))


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
    if splits_tokens(options):
        parts, names = token_parts(options), DIMENSIONS[options.rank]
        axes = (None, *names) if tuple(shape[1 : 1 + options.rank]) == tuple(options.input_size) else ()
    else:
        parts, names = (options.devices,), ("devices",)
        axis = 0 if options.split == "batch" else len(shape) - 2
        axes = (*(None,) * axis, "devices") if shape[axis] % options.devices == 0 else ()
    mesh = Mesh(np.asarray(devices_of(options)).reshape(parts), names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(mesh, PartitionSpec(*axes))


def options_per_device(options: Options) -> Options:
    """Return the options of one device's share of the batch, or of the query heads with their key/value heads.

    If tokens are split, these are the options of the whole problem on one device.
    """
    count = options.devices
    one = dataclasses.replace(options, devices=1)
    if splits_tokens(options):
        return one
    if options.split == "batch":
        return dataclasses.replace(one, batch_size=options.batch_size // count)
    heads_kv = HeadSplit.of(options.heads, options.heads_kv, count, 1).needed.shape[1]
    return dataclasses.replace(one, heads=options.heads // count, heads_kv=heads_kv)


def describe_split(options: Options) -> str:
    """Return text such as ``8 devices, split over batch``."""
    if splits_tokens(options):
        parts = zip(DIMENSIONS[options.rank], token_parts(options), strict=True)
        each = ", ".join(f"{name} in {count}" for name, count in parts)
        return f"{options.devices} devices, split over {options.split} ({each})"
    is_whole = options.split == "batch" or options.heads_kv % options.devices == 0
    copies = "" if is_whole else " (key/value heads on every device)"
    return f"{options.devices} devices, split over {options.split}{copies}"
