"""Base classes of backends: the capabilities by which a backend is selected, and the methods that run a plan."""

from __future__ import annotations

import abc
import dataclasses
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from natten_jax.arrays.biases import with_columns
from natten_jax.arrays.boxes import QueryBox
from natten_jax.arrays.operands import Cotangents, Differentiable, Gradients, Inputs, Operands, Output, Saved
from natten_jax.native import module as native
from natten_jax.performance import KernelSchedule, Pass, TilePair
from natten_jax.plan.devices import ComputeCapability, Device
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem
from natten_jax.windows import Edge


@dataclasses.dataclass(frozen=True)
class Platform:
    """The devices that a backend supports.

    Attributes:
        name: JAX platform: ``"cpu"``, ``"cuda"`` or ``"tpu"``.
        compute_capability: Minimum compute capability of GPUs; ``None`` for other devices.
        is_exact: True if only ``compute_capability`` and ``additional`` are supported. False if all
            compute capabilities from ``compute_capability`` on are supported.
        additional: Supported compute capabilities in addition to ``compute_capability``.
    """

    name: str
    compute_capability: ComputeCapability | None = None
    is_exact: bool = False
    additional: tuple[ComputeCapability, ...] = ()

    def __str__(self) -> str:
        if self.compute_capability is None:
            return f"platform {self.name} only"
        good = " or ".join([f"{major}.{minor}" for major, minor in (self.compute_capability, *self.additional)])
        return f"NVIDIA GPUs of compute capability {good} {'only' if self.is_exact else 'or higher'}"

    def has(self, device: Device) -> bool:
        if device.platform != self.name:
            return False
        required, capability = self.compute_capability, device.compute_capability
        if required is None:
            return True
        if capability is None or capability in self.additional:
            return capability is not None
        return capability == required if self.is_exact else capability >= required


@dataclasses.dataclass(frozen=True, eq=False)
class Capabilities:
    """Capabilities of a backend.

    Attributes:
        dtypes: Supported element types of query, key and value, without 8-bit types.
        largest_tiles: Function that returns the maximum number of tokens in a query tile, and in a key/value tile.
        platform: Supported devices; ``None`` if all devices are supported.
        query_family: Family in the names of the configuration queries, such as ``get_configs_for_<query_family>_fna``;
            empty if it is :attr:`Backend.family`.
        is_by_name_only: True if the backend runs only in calls that name it. An environment variable can lift this
            restriction (:mod:`natten_jax.backends.select`).
        is_by_name_only_for_float8: As ``is_by_name_only``, but only for 8-bit arrays.
        float8_dtypes: 8-bit element types that the forward kernels support.
        converts_float8_to: Element type to which 8-bit arrays are converted, without rounding, before the kernels run.
            ``None`` if the backend rejects 8-bit arrays whose type is not in ``float8_dtypes``.
        head_dim_step: The kernels support head dimensions that are multiples of this number.
        float8_head_dim_step: ``head_dim_step`` for 8-bit arrays; ``None`` if it is the same.
        largest_head_dim: Largest supported head dimension; ``None`` if there is no limit.
        head_widths: All supported head dimensions, for kernels whose query and value heads must have the same
            dimension. Empty if the kernels support all multiples of ``head_dim_step``.
        targets: Names of the custom calls that each pass makes to this package's native library.
        schedules: Kernel schedules of each pass; the first one is the default.
        used_arguments: Names of the performance arguments that the backend uses, except tiles and ``kernel_schedule``.
            They include arguments that request a property that the backend's results always have, such as determinism.
        carries_plan: True if the backend attaches the plan of a pass to one operation, such as a custom call
            (:func:`natten_jax.plan.plan.carrying_plan`). If False, all operations of the pass carry the plan.
        edges: Supported values of the window option ``edges``.
        wraps_by_strips: True if some of the kernels do not support windows that wrap (:attr:`Form.wraps`). For these
            kernels, separate calls process the wrapped keys.
        features: Names of supported features. The backend rejects problems with ``"relative_bias"``, ``"key_bias"`` or
            ``"own_extents"`` (layouts with padding) if it does not support this feature. If one of the following
            features is not supported, the caller computes it by other means: ``"own_layouts"`` (batch entries with
            different layouts in one call, see :meth:`Backend.supports_layouts`); ``"additional_kv"`` (additional tokens
            in the same kernels); ``"shared_key_bias"`` (key biases that all heads share, without a copy per head);
            ``"sinks"`` (sinks in the softmax, and their gradients). If ``"sinks"`` is supported, the kernels also apply
            :func:`natten_jax.arrays.biases.with_hidden_keys` to float32 biases and sinks.
        excludes: Pairs of attributes of :class:`Problem` that no kernel supports together, each with the reason.
        needs_columns: Function that returns True if no kernel can add the key biases of a problem. The biases are then
            encoded in additional columns of queries and keys.
        is_plain_jax: True if the backend consists of XLA operations. XLA then partitions them over devices, and JAX
            differentiates them in forward and reverse mode and to any order. Each plan contains the tiles of both
            passes.
        is_slow_fallback: True if the backend is slow. By default, it runs only if no other backend can run the problem.
            The call then warns if this build lacks the kernels of a faster backend.
        residual_width: Last dimension of ``Differentiable.residuals``. A positive number means that the backend has an
            analytic derivative: the methods ``tangents`` and ``gradients``, as in
            :class:`natten_jax.backends.flex.backend.FlexBackend`.
    """

    dtypes: Sequence[str]
    largest_tiles: Callable[[Problem, Device, Pass], tuple[int, int]]
    platform: Platform | None = None
    query_family: str = ""
    is_by_name_only: bool = False
    is_by_name_only_for_float8: bool = False
    float8_dtypes: Sequence[str] = ()
    converts_float8_to: str | None = None
    head_dim_step: int = 1
    float8_head_dim_step: int | None = None
    largest_head_dim: int | None = None
    head_widths: Sequence[int] = ()
    targets: Mapping[Pass, Sequence[str]] = dataclasses.field(default_factory=dict)
    schedules: Mapping[Pass, Sequence[KernelSchedule]] = dataclasses.field(default_factory=dict)
    used_arguments: Collection[str] = ()
    carries_plan: bool = True
    edges: Sequence[Edge] = ("shift",)
    wraps_by_strips: bool = False
    features: Collection[str] = ("additional_kv",)
    excludes: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    needs_columns: Callable[[Problem], bool] = lambda _: False
    is_plain_jax: bool = False
    is_slow_fallback: bool = False
    residual_width: int = 0


class Form(NamedTuple):
    """Features of the kernels that a plan uses.

    Attributes:
        wraps: True if the kernels support windows that wrap. The arrays must then include all tokens of the wrapped
            dimensions.
        continues: True if the forward kernels can merge their results into the results of earlier passes
            (:class:`Earlier`). If False, JAX operations merge them.
        unused: Performance arguments that the backend uses in other plans, but that do not affect this plan. Each
            argument maps to the reason: a clause that follows the backend's name in a warning.
    """

    wraps: bool
    continues: bool = False
    unused: Mapping[str, str] = {}


class Earlier(NamedTuple):
    """Earlier forward passes over other keys. The next pass merges its own results with the results of these passes.

    Attributes:
        saved: Merged results of the earlier passes, for all queries.
        query_box: Box of the queries that see at least one key of the next pass.
    """

    saved: Saved
    query_box: QueryBox


def heads_rejection(has: Capabilities, problem: Problem) -> str | None:
    """Return the reason why kernels do not support the head dimensions of a problem; ``None`` if they do."""
    limit = has.largest_head_dim
    if limit is None:
        return None
    for name in ("head_dim", "head_dim_v"):
        if getattr(problem, name) > limit:
            return f"{name} must be at most {limit}, not {getattr(problem, name)}"
    wider = with_columns(problem).head_dim if problem.key_bias and has.needs_columns(problem) else 0
    if wider > limit:
        return f"a key_bias adds {wider - problem.head_dim} to head_dim, which must then be at most {limit}"
    return None


def with_wide_heads(has: Capabilities, problem: Problem) -> Problem:
    """Return the problem with its head dimensions rounded up to head dimensions that the kernels support."""
    widest = max(problem.head_dim, problem.head_dim_v)
    if widths := [width for width in has.head_widths if width >= widest]:
        head_dim = head_dim_v = widths[0]
    else:
        step = (has.float8_head_dim_step if problem.element.is_float8 else None) or has.head_dim_step
        head_dim, head_dim_v = -(-problem.head_dim // step) * step, -(-problem.head_dim_v // step) * step
    if (head_dim, head_dim_v) == (problem.head_dim, problem.head_dim_v):
        return problem
    return dataclasses.replace(problem, head_dim=head_dim, head_dim_v=head_dim_v)


class Backend(abc.ABC):
    """A family of kernels; users name its two operators ``<family>-fna`` and ``<family>-fmha``.

    A subclass defines ``family`` and ``capabilities``, and implements the abstract methods.
    :func:`natten_jax.backends.register` makes an instance available to the operators, configuration queries, profiler
    and doctor.
    """

    family: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def rejection(self, problem: Problem, device: Device, pass_: Pass) -> str | None:
        """Return the reason why this backend cannot run a pass of a problem on a device; ``None`` if it can."""
        has = self.capabilities
        if has.platform is not None and not has.platform.has(device):
            return f"it runs on {has.platform}, not on {device}"
        taken = *has.dtypes, *has.float8_dtypes
        if problem.dtype not in taken and not (problem.element.is_float8 and has.converts_float8_to):
            return f"it supports {', '.join(taken)}, not {problem.dtype}"
        if problem.element.is_float8 and pass_ == "backward":
            return f"{problem.dtype} arrays have no gradients"
        if problem.own_extents and "own_extents" not in has.features:
            return "it does not support extents: its kernels use one layout for all batch entries"
        if lacking := [name for name in problem.biases if name not in has.features]:
            return f"it does not add {lacking[0]} to logits"
        for pair, reason in has.excludes.items():
            if all(operator.attrgetter(*pair)(problem)):
                return reason
        if (rejection := heads_rejection(has, problem)) is not None:
            return rejection
        unknown = [edge for edge in problem.edges if edge not in has.edges]
        if unknown:
            return f"it has windows with edges {' or '.join(map(repr, has.edges))}, not {unknown[0]!r}"
        for axis in problem.axes if has.wraps_by_strips else ():
            stride, tokens = axis.stride, axis.kv_extent // axis.dilation
            if axis.edges == "wrap" and tokens % stride:
                return f"it wraps windows if stride divides the {tokens} tokens of a dilation group, not with {stride}"
        if has.targets and native.load_error is not None:
            return native.load_error  # without the library, the limits of the kernels are unknown
        if not device.is_present:
            return None
        return next(filter(None, map(native.missing, has.targets.get(pass_, ()))), None)

    def supports_layouts(self, problem: Problem) -> bool:
        """Return True if one call supports batch entries with different layouts. If not, each entry needs its own call.

        The result is False if wrapped keys may be processed in additional calls, because such a call has one origin for
        all entries.
        """
        has, with_layouts = self.capabilities, dataclasses.replace(problem, own_extents=True)
        if "own_layouts" not in has.features or (has.wraps_by_strips and "wrap" in problem.edges):
            return False
        return not any(all(operator.attrgetter(*pair)(with_layouts)) for pair in has.excludes)

    def widened(self, problem: Problem, device: Device, pass_: Pass, pair: TilePair | None = None) -> Problem:
        """Return the problem that the kernels compute for a call.

        It may differ from the problem of the call in three ways:

        - Heads are padded with zeros to a supported head dimension. This does not change results: zeros in queries and
          keys do not change the logits, the scale stays the same, and the caller drops the output columns of padded
          values.
        - Key biases become additional columns of queries and keys (:mod:`natten_jax.arrays.biases`).
        - 8-bit elements are converted to ``converts_float8_to``, or to float32 if keys and values have a scale factor
          per block.

        Args:
            problem: The problem of the call.
            device: The device.
            pass_: The pass.
            pair: Requested query and key/value tile; ``None`` to use the recommended tiles.
        """
        has = self.capabilities
        if problem.dtype not in has.dtypes and has.converts_float8_to is not None:
            problem = problem.converted("float32" if problem.block_scales else has.converts_float8_to)
        if problem.key_bias and has.needs_columns(problem):
            problem = with_columns(problem)
        return with_wide_heads(has, problem)

    @abc.abstractmethod
    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        """Return the pairs of query and key/value tiles to choose from, with the recommended pair first."""

    def offers(self, problem: Problem, device: Device, pass_: Pass, pair: TilePair) -> bool:
        largest = self.capabilities.largest_tiles(problem, device, pass_)
        return all(
            len(tile) == problem.rank and min(tile) >= 1 and math.prod(tile) <= limit
            for tile, limit in zip(pair, largest, strict=True)
        )

    def kernels(self, problem: Problem, pass_: Pass, pair: TilePair) -> str | None:
        """Return ``Plan.kernels`` for a pair of tiles: the name of the selected kernels, ``None`` for the default."""
        return None

    def predicted_seconds(self, problem: Problem, device: Device, pass_: Pass) -> float | None:
        """Return the predicted seconds of a pass with the recommended tiles; ``None`` if there is no cost model."""
        return None

    def form(self, plan: Plan) -> Form:
        """Return the features of the kernels that a plan uses."""
        return Form(wraps=not self.capabilities.wraps_by_strips)

    @abc.abstractmethod
    def forward(self, plan: Plan, operands: Operands, *, saves: bool = False, earlier: Earlier | None = None) -> Saved:
        """Compute output and logsumexp.

        Args:
            plan: The plan of the pass.
            operands: The operands, with all queries. If ``earlier`` is given, the operands have origins, and queries
                outside ``earlier.query_box`` see no key of this pass.
            saves: True to compute the remainder, which a backward pass reads. If False, ``Saved.remainder`` is
                unspecified.
            earlier: Earlier forward passes, whose results this pass merges with its own. Only for plans with
                ``Form.continues``.
        """

    @abc.abstractmethod
    def backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
        """Compute the gradients of the inputs. The logsumexp cotangent may be ``None``, which stands for zeros."""


class PureJaxBackend(Backend):
    """A backend in plain JAX. A subclass implements only ``attend`` and ``tile_pairs``; JAX differentiates ``attend``.

    A subclass with an analytic derivative also overrides ``forward_differentiable`` and ``backward``, and its
    capabilities have a positive ``residual_width``.
    """

    @abc.abstractmethod
    def attend(self, plan: Plan, operands: Operands) -> Output:
        """Compute output and logsumexp."""

    def forward_differentiable(self, plan: Plan, operands: Operands) -> Differentiable:
        """Compute output, logsumexp, and the residuals that the derivative reads."""
        output = self.attend(plan, operands)
        return Differentiable(output.out.astype(plan.problem.element.accumulator), output.logsumexp)

    def forward(self, plan: Plan, operands: Operands, *, saves: bool = False, earlier: Earlier | None = None) -> Saved:
        """Compute output and logsumexp; :meth:`backward` recomputes them."""
        output = self.attend(plan, operands)
        return Saved(*output, jnp.zeros_like(output.logsumexp) if saves else None)

    def backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
        """Compute the gradients: run :meth:`attend` again and differentiate it."""

        def attend(inputs: Inputs) -> Output:
            return self.attend(plan, operands._replace(inputs=inputs))

        return jax.vjp(attend, operands.inputs)[1](cotangents.with_zeros())[0]
