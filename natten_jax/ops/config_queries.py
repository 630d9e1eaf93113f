"""Configuration queries: functions that list the tile shapes a backend offers for an attention call.

- :func:`configs` returns keyword arguments for an operator.
- ``get_[bwd_]configs_for_<family>_<fna|fmha>`` returns tiles. These functions have NATTEN's names. Every registered
  backend has one such function per pass and operator. The function returns an empty list if its backend cannot run the
  arrays.

All functions, including :func:`configs`, take ``query``, or ``query``, ``key`` and ``value``, in the operator's layout.
Each of these arguments is an array or a ``jax.ShapeDtypeStruct``. For neighborhood attention, the functions also take
the window arguments, because the recommended configuration depends on the window. The recommended configuration is the
first one in the list.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from natten_jax import backends
from natten_jax.arguments.names import check_types, unexpected
from natten_jax.arguments.static import Bools, Ints
from natten_jax.arrays.operands import Inputs
from natten_jax.backends.base import Backend
from natten_jax.backends.select import resolve
from natten_jax.ops.canonicalize import attention_problem, neighborhood_problem
from natten_jax.performance import PASSES, Pass
from natten_jax.plan.devices import CapabilityLike, Device, NoDeviceError, compute_capability_of, default_device
from natten_jax.plan.plan import BackendId, Request, tile_arguments
from natten_jax.problem import OPERATORS, Operator, Problem
from natten_jax.windows import Edges, WindowArguments

#: A function that returns a list of pairs ``(query tile, key/value tile)``, the recommended pair first. Tiles are
#: shapes for neighborhood attention and sizes for attention. If the backend has kernel schedules, each item of the list
#: is ``(pair, schedule)`` with a :class:`natten_jax.KernelSchedule`.
ConfigQuery = Callable[..., list[tuple[Any, Any]]]


@check_types
def configs(
    query: Any,
    key: Any = None,
    value: Any = None,
    kernel_size: Ints | None = None,
    stride: Ints | None = None,
    dilation: Ints | None = None,
    is_causal: Bools | None = None,
    *,
    backend: str | None = None,
    pass_: Pass = "forward",
    compute_capability: CapabilityLike | None = None,
    edges: Edges | None = None,
) -> list[dict[str, Any]]:
    """Return the configurations that a backend offers for a call, the recommended one first.

    A configuration is a dictionary of keyword arguments for the operator: ``na1d``, ``na2d`` or ``na3d`` if
    ``kernel_size`` is given, otherwise ``attention``.

    Example:
        >>> import functools
        >>> import jax, natten_jax
        >>> tokens = jax.ShapeDtypeStruct((1, 32, 32, 4, 64), "float32")
        >>> best, *others = natten_jax.configs(tokens, kernel_size=7, backend="flex-fna")
        >>> sorted(best)
        ['backend', 'kv_tile_shape', 'q_tile_shape']
        >>> attend = functools.partial(natten_jax.na2d, kernel_size=7, **best)

    Args:
        query: The query ``[batch, *layout, heads, head_dim]``, or a ``jax.ShapeDtypeStruct``.
        key: The key, if its shape differs from the query's.
        value: The value, if its shape differs from the query's.
        kernel_size: Tokens in a window, per dimension. ``None`` selects ``attention``.
        stride: Number of queries that share one window, per dimension.
        dilation: Distance between neighboring tokens of a window, per dimension.
        is_causal: Mask out the keys after the query, per dimension. This is the only window argument of ``attention``.
        backend: Name of the backend. The default is the backend that would run the call.
        pass_: ``"forward"`` or ``"backward"``.
        compute_capability: Compute capability of a GPU, such as ``"9.0"``, ``(9, 0)`` or ``9.0``. The configurations
            are for this GPU. ``None`` uses the default device.
        edges: Boundary mode of windows that extend beyond an end of the layout, as in :func:`natten_jax.na2d`.

    Returns:
        A list of dictionaries. Each one contains the tiles of the pass, ``kernel_schedule`` if the backend has
        schedules for the pass, and ``backend``.

    Raises:
        ValueError: The arguments do not describe a problem of the operator, the backend cannot run it, or the value of
            ``pass_`` or ``compute_capability`` is not allowed.
        TypeError: An argument is of the wrong type.
    """
    operator: Operator = "fmha" if kernel_size is None else "fna"
    if backend is not None:
        backends.find(backend, operator)
    given = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation, "is_causal": is_causal, "edges": edges}
    options = {name: value for name, value in given.items() if value is not None}
    device = target_device(compute_capability)
    problem = _describe("configs", operator, (query, key, value), options)
    name = resolve(Request(problem, backend=backend), device, pass_).backend
    result = []
    for tiles, schedule in _offered(backends.by_id(name), problem, device, pass_):
        arguments = dict(zip(tile_arguments(operator, pass_), tiles, strict=True))
        arguments |= {} if schedule is None else {"kernel_schedule": schedule}
        result.append({**arguments, "backend": str(name)})
    return result


def _offered(backend: Backend, problem: Problem, device: Device, pass_: Pass) -> list[tuple[Any, Any]]:
    """Return all combinations of a tile pair and a schedule, or an empty list if the backend rejects the problem."""
    if backend.rejection(problem, device, pass_) is not None:
        return []
    pairs: Iterable[Any] = backend.tile_pairs(backend.widened(problem, device, pass_), device, pass_)
    if problem.operator == "fmha":
        pairs = ((q_tile[0], kv_tile[0]) for q_tile, kv_tile in pairs)
    schedules = backend.capabilities.schedules.get(pass_, ())
    return [(pair, schedule) for pair in pairs for schedule in schedules or (None,)]


def target_device(compute_capability: CapabilityLike | None) -> Device:
    """Return a GPU of the given compute capability. For ``None``, return this process's default device.

    Raises:
        NoDeviceError: ``compute_capability`` is ``None``, and JAX finds no device.
    """
    if compute_capability is None:
        try:
            return default_device()
        except NoDeviceError as error:
            raise NoDeviceError(f"{error}. Pass compute_capability for an absent NVIDIA GPU") from error
    return Device("cuda", compute_capability_of(compute_capability), is_present=False)


def query_names() -> list[str]:
    """Return the names of all configuration queries."""
    return list(_queries())


def query_named(name: str) -> ConfigQuery:
    """Return the configuration query with this name.

    Raises:
        LookupError: The name is unknown.
    """
    queries = _queries()
    if name not in queries:
        raise LookupError(f"no configuration query is called {name!r}; there are {', '.join(queries)}")
    return _query(name, *queries[name])


def _queries() -> dict[str, tuple[Backend, Operator, Pass]]:
    """Map the name of each configuration query to its backend, operator and pass."""
    queries: dict[str, tuple[Backend, Operator, Pass]] = {}
    for backend in backends.registered():
        family = backend.capabilities.query_family or backend.family
        for pass_, operator in itertools.product(PASSES, OPERATORS):
            infix = "" if pass_ == "forward" else "bwd_"
            queries[f"get_{infix}configs_for_{family}_{operator}"] = backend, operator, pass_
    return queries


@functools.cache
def _query(name: str, backend: Backend, operator: Operator, pass_: Pass) -> ConfigQuery:
    def get_configs(
        query: Any = None,
        key: Any = None,
        value: Any = None,
        *,
        input_tensor: Any = None,
        compute_capability: CapabilityLike | None = None,
        **window: Any,
    ) -> list[tuple[Any, Any]]:
        """Return query and key/value tiles of the {pass_} pass of {backend}, best first.

        Example:
            >>> import jax, natten_jax
            >>> tokens = jax.ShapeDtypeStruct((1, 4096, 24, 128), "bfloat16")
            >>> configurations = natten_jax.{name}(tokens)

        Args:
            query: The operator's query, or a ``jax.ShapeDtypeStruct``.
            key: The key, if its shape differs from the query's.
            value: The value, if its shape differs from the query's.
            input_tensor: NATTEN's name for the argument ``query``.
            compute_capability: Compute capability of a GPU, such as ``"9.0"``, ``(9, 0)`` or ``9.0``. The tiles are for
                this GPU. ``None`` uses the default device.
            **window: Window arguments of the operator. The default ``kernel_size`` is the whole layout. Attention takes
                only ``is_causal``.

        Returns:
            A list of pairs ``(query tile, key/value tile)``. If the backend has kernel schedules for the pass, each
            item is ``(pair, schedule)``. The list is empty if the backend cannot run the arrays. Tiles are shapes for
            neighborhood attention, and sizes for attention.

        Raises:
            ValueError: The arguments do not describe a problem of the operator, or the compute capability is invalid.
            TypeError: An argument is of the wrong type.
        """
        if input_tensor is not None and query is not None:
            raise TypeError("input_tensor is NATTEN's name for query: give only one of the two")
        device = target_device(compute_capability)
        problem = _describe(name, operator, (input_tensor if query is None else query, key, value), window)
        offered = _offered(backend, problem, device, pass_)
        return [tiles if schedule is None else (tiles, schedule) for tiles, schedule in offered]

    options = {"name": name, "pass_": pass_, "backend": BackendId(backend.family, operator)}
    get_configs.__name__ = get_configs.__qualname__ = name
    get_configs.__doc__ = inspect.cleandoc(get_configs.__doc__ or "").format(**options)
    return get_configs


def _describe(function: str, operator: Operator, arrays: tuple[Any, Any, Any], window: dict[str, Any]) -> Problem:
    """Return the problem that arrays and window arguments describe. Key and value default to the query."""
    query, key, value = (arrays[0] if each is None else each for each in arrays)
    allowed = ("is_causal",) if operator == "fmha" else WindowArguments._fields
    for name in window:
        if name not in allowed:
            raise TypeError(unexpected(function, name, allowed))
    if operator == "fmha":
        return attention_problem(query, key, value, None, window.get("is_causal", False))
    shape = getattr(query, "shape", ())  # anything without a shape is rejected below
    windows = WindowArguments(**window)
    if windows.kernel_size is None:
        windows = windows._replace(kernel_size=shape[1:-2])
    return neighborhood_problem(max(1, min(3, len(shape) - 3)), Inputs(query, key, value), windows)
