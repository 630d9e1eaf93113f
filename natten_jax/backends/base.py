"""What a backend is: the facts by which it is chosen, and the functions that run a plan."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from natten_jax.arrays.biases import with_columns
from natten_jax.arrays.boxes import QueryBox
from natten_jax.arrays.operands import Cotangents, Differentiable, Gradients, Inputs, Operands, Output, Saved
from natten_jax.native import module as native
from natten_jax.performance import PASSES, KernelSchedule, Pass, TilePair
from natten_jax.plan.devices import ComputeCapability, Device
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem
from natten_jax.windows import OPTION_DEFAULTS, Edge


@dataclasses.dataclass(frozen=True)
class Platform:
    """The devices that a backend is for.

    Attributes:
        name: ``"cpu"`` or ``"cuda"``.
        compute_capability: The least compute capability of GPUs; ``None`` of other devices.
        is_exact: Whether GPUs of other compute capabilities are no good.
        others: Compute capabilities that are good nevertheless.
    """

    name: str
    compute_capability: ComputeCapability | None = None
    is_exact: bool = False
    others: tuple[ComputeCapability, ...] = ()

    def __str__(self) -> str:
        if self.compute_capability is None:
            return f"platform {self.name} only"
        good = " or ".join([f"{major}.{minor}" for major, minor in (self.compute_capability, *self.others)])
        return f"NVIDIA GPUs of compute capability {good} {'only' if self.is_exact else 'or higher'}"

    def has(self, device: Device) -> bool:
        """Whether a device is one of them."""
        if device.platform != self.name:
            return False
        least, found = self.compute_capability, device.compute_capability
        if least is None:
            return True
        if found is None or found in self.others:
            return found is not None
        return found == least if self.is_exact else found >= least


class Backend(abc.ABC):
    """A family of kernels, addressed as ``<family>-fna`` and ``<family>-fmha``.

    A subclass states what it is for and implements the abstract methods; :func:`natten_jax.backends.register` makes it
    known to operators, configuration queries, profiler and doctor.
    """

    family: ClassVar[str]
    #: What the names of its configuration queries call it, ``get_configs_for_<query_family>_fna``; "" is the family.
    query_family: ClassVar[str] = ""
    #: Whether only calls that name it run it, unless it is wanted by default (:mod:`natten_jax.backends.select`).
    is_by_name_only: ClassVar[bool] = False
    #: The devices that it is for; ``None`` is any.
    platform: ClassVar[Platform | None] = None
    dtypes: ClassVar[Sequence[str]]
    #: The 8-bit element types beside these that its kernels take, in the forward pass.
    float8_dtypes: ClassVar[Sequence[str]] = ()
    #: The element type among `dtypes` that it converts 8-bit arrays to, which is exact; ``None`` where it takes none.
    converts_float8_to: ClassVar[str | None] = None
    #: The passes that it has kernels for; where a call names it, another backend serves the backward pass.
    passes: ClassVar[Sequence[Pass]] = PASSES
    #: Kernels' head dimensions are multiples of the step, up to the largest; ``None`` is any. Others get zeros behind
    #: them (:meth:`Backend.widened`).
    head_dim_step: ClassVar[int] = 1
    largest_head_dim: ClassVar[int | None] = None
    #: The widths that kernels have, where they are few: those of queries and of values are the same.
    head_widths: ClassVar[Sequence[int]] = ()
    #: The custom calls to this package's native library, of each pass.
    targets: ClassVar[Mapping[Pass, Sequence[str]]] = {}
    #: The kernel schedules of each pass, the default one first.
    schedules: ClassVar[Mapping[Pass, Sequence[KernelSchedule]]] = {}
    #: The performance arguments that make a difference to it, or whose promise it keeps; without tiles, which make one
    #: to every backend, and ``kernel_schedule``, which ``schedules`` tells.
    heeds: ClassVar[Collection[str]] = ()
    #: Whether one of its operations has the plan of the pass (:func:`natten_jax.plan.plan.carrying_plan`), as every
    #: custom call does; if not, all of them have.
    carries_plan: ClassVar[bool] = True
    #: What it can make of windows that reach over the ends of a dimension. So is every window option that it has: an
    #: attribute of the option's name with its values, without which it has the default alone.
    edges: ClassVar[Sequence[Edge]] = ("shift",)
    #: Whether some of its kernels know no windows that wrap (:meth:`wraps_in_kernels`), so that keys behind the ends
    #: are calls of their own.
    wraps_by_strips: ClassVar[bool] = False
    #: Whether its kernels take batch entries with layouts of their own (:meth:`takes_layouts_of`).
    takes_own_layouts: ClassVar[bool] = False
    #: Whether it takes extents: layouts of which a part is padding.
    takes_extents: ClassVar[bool] = False
    #: What it adds to logits: names among :attr:`natten_jax.problem.Problem.biases`.
    biases: ClassVar[Collection[str]] = ()
    #: Whether its kernels add no biases of keys, so that these are columns of wider heads (:meth:`needs_columns`).
    key_bias_by_columns: ClassVar[bool] = False
    #: Whether its kernels that add biases of keys take those that all heads share as they are.
    takes_shared_key_bias: ClassVar[bool] = False
    #: Kernels apply the rule of :mod:`natten_jax.arrays.biases` to float32 biases and sinks themselves. For other
    #: backends ``KernelOperands.of`` and ``custom_vjp`` apply it before the call.
    hides_keys: ClassVar[bool] = False
    #: Kernels add sinks in the softmax and return their gradients.
    takes_sinks: ClassVar[bool] = False
    #: Whether it takes additional key/value tokens.
    fuses_additional_kv: ClassVar[bool] = True
    #: Whether it is operations of XLA alone, no kernels: XLA splits these over devices, and plans their memory.
    is_plain_xla: ClassVar[bool] = False
    #: Whether JAX differentiates it, in both modes and to any order; of a :class:`PureJaxBackend` alone.
    is_differentiable: ClassVar[bool] = False
    #: Whether a plan has the tiles of both passes, as one pass's computation is derived from the other's.
    shares_tiles: ClassVar[bool] = False
    #: Whether it is slow, and runs by default only where kernels are missing: a warning says so.
    is_slow_fallback: ClassVar[bool] = False

    def rejection(self, problem: Problem, device: Device, pass_: Pass) -> str | None:
        """Why this backend cannot run a pass of the problem on the device; ``None`` where it can."""
        if self.platform is not None and not self.platform.has(device):
            return f"it runs on {self.platform}, not on {device}"
        if pass_ not in self.passes:
            return f"it has no kernels of the {pass_} pass"
        taken = *self.dtypes, *self.float8_dtypes
        if problem.dtype not in taken and not (problem.element.is_float8 and self.converts_float8_to):
            return f"it supports {', '.join(taken)}, not {problem.dtype}"
        if problem.element.is_float8 and pass_ == "backward":
            return f"{problem.dtype} arrays have no gradients"
        if problem.own_extents and not self.takes_extents:
            return "it takes no extents: its kernels have one layout for all batch entries"
        if problem.own_extents and (refusal := self.layouts_rejection(problem)) is not None:
            return refusal
        reason = self.heads_rejection(problem)
        if reason is not None:
            return reason
        for name, default in OPTION_DEFAULTS.items():
            has = getattr(self, name, (default,))
            unknown = [value for axis in problem.axes if (value := getattr(axis, name)) not in has]
            if unknown:
                return f"it has windows with {name} {' or '.join(map(repr, has))}, not {unknown[0]!r}"
        for name in ("relative_bias", "key_bias"):
            if getattr(problem, name) and name not in self.biases:
                return f"it adds no {name} to logits"
        for axis in problem.axes if self.wraps_by_strips else ():
            tokens = axis.kv_extent // axis.dilation
            if axis.edges == "wrap" and tokens % axis.stride:
                return (
                    f"its windows wrap where stride divides the tokens of a dilation group, not {axis.stride} {tokens}"
                )
        if self.targets and native.load_error is not None:
            return native.load_error  # it would say what the kernels take, too
        if not device.is_present:
            return None
        return next(filter(None, map(native.missing, self.targets.get(pass_, ()))), None)

    def wraps_in_kernels(self, plan: Plan) -> bool:
        """Whether a plan's kernels know windows that wrap, where an array holds all tokens of these dimensions."""
        return not self.wraps_by_strips

    def runs_only_by_name(self, problem: Problem) -> bool:
        """Whether only calls that name it run it for this problem, unless it is wanted by default."""
        return self.is_by_name_only

    @classmethod
    def head_step_of(cls, problem: Problem) -> int:
        """What the head dimensions of the problem's kernels are multiples of."""
        return cls.head_dim_step

    @classmethod
    def takes_layouts_of(cls, problem: Problem) -> bool:
        """Whether a call takes all batch entries of a problem, with layouts of their own; if not, each is a call.

        The keys behind the ends of a dimension that wraps, where they are calls of their own, have one origin.
        """
        if cls.wraps_by_strips and "wrap" in problem.edges:
            return False
        return cls.takes_own_layouts and cls.layouts_rejection(problem) is None

    @classmethod
    def layouts_rejection(cls, problem: Problem) -> str | None:
        """Why its kernels take no layouts of batch entries beside what else the problem has; ``None`` where they do."""
        return None

    @classmethod
    def heads_rejection(cls, problem: Problem) -> str | None:
        """Why this backend has no kernels for the problem's heads; ``None`` where it has."""
        most = cls.largest_head_dim
        for name, head_dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if most is not None and head_dim > most:
                return f"{name} must be at most {most}, not {head_dim}"
        wider = with_columns(problem).head_dim if problem.key_bias and cls.needs_columns(problem) else 0
        if most is not None and wider > most:
            return f"a key_bias takes {wider - problem.head_dim} more columns of heads, which may be {most} wide"
        return None

    @classmethod
    def needs_columns(cls, problem: Problem) -> bool:
        """Whether none of its kernels adds biases of keys to the logits of a problem."""
        return cls.key_bias_by_columns

    def adds_key_bias(self, problem: Problem, device: Device, pass_: Pass, pair: TilePair | None = None) -> bool:
        """Whether the kernels of a pass add biases of keys themselves, rather than by columns of wider heads.

        Args:
            problem: What is computed, with such biases.
            device: Where.
            pass_: The pass.
            pair: Tiles that the caller asks for.
        """
        return not self.needs_columns(problem)

    def widened(self, problem: Problem, device: Device, pass_: Pass, pair: TilePair | None = None) -> Problem:
        """The problem as kernels get it: heads of other widths than theirs are filled up with zeros, which is exact.

        Zeros of queries and keys add nothing to logits, whose scale stays what it is, and those of values are columns
        of the output that are cut off. Biases of keys may be columns, too (:mod:`natten_jax.arrays.biases`).
        Elements that kernels do not take are converted to wider ones: to float32, where factors of keys and values are
        multiplied with them, too.

        Args:
            problem: The problem of the call.
            device: Where it runs.
            pass_: Which pass of it.
            pair: Tiles that the caller asks for.
        """
        if problem.dtype not in self.dtypes and self.converts_float8_to is not None:
            problem = problem.converted("float32" if problem.block_scales else self.converts_float8_to)
        if problem.key_bias and not self.adds_key_bias(problem, device, pass_, pair):
            problem = with_columns(problem)
        return self.with_wide_heads(problem)

    @classmethod
    def with_wide_heads(cls, problem: Problem) -> Problem:
        """The problem with heads as wide as kernels have them."""
        widest = max(problem.head_dim, problem.head_dim_v)
        if widths := [width for width in cls.head_widths if width >= widest]:
            head_dim = head_dim_v = widths[0]
        else:
            step = cls.head_step_of(problem)
            head_dim, head_dim_v = -(-problem.head_dim // step) * step, -(-problem.head_dim_v // step) * step
        if (head_dim, head_dim_v) == (problem.head_dim, problem.head_dim_v):
            return problem
        return dataclasses.replace(problem, head_dim=head_dim, head_dim_v=head_dim_v)

    @classmethod
    def check_heads(cls, problem: Problem) -> None:
        """Refuse heads that there are no kernels for, and so no tiles.

        Raises:
            ValueError: There are none.
        """
        reason = cls.heads_rejection(problem)
        if reason is not None:
            raise ValueError(f"{cls.family} has no tiles for these heads: {reason}")

    @abc.abstractmethod
    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        """Query and key/value tile shapes of a pass, the recommended pair first."""

    @abc.abstractmethod
    def largest_tiles(self, problem: Problem, device: Device, pass_: Pass) -> tuple[int, int]:
        """Most tokens of the query and key/value tiles that a pass takes."""

    def offers(self, problem: Problem, device: Device, pass_: Pass, pair: TilePair) -> bool:
        """Whether the kernels accept this pair of tile shapes, listed or not."""
        return all(
            len(tile) == problem.rank and min(tile) >= 1 and math.prod(tile) <= largest
            for tile, largest in zip(pair, self.largest_tiles(problem, device, pass_), strict=True)
        )

    def predicted_seconds(self, problem: Problem, device: Device, pass_: Pass) -> float | None:
        """How long the pass takes with the recommended tiles, by the cost model; ``None`` where there is none."""
        return None

    def unused_in(self, plan: Plan) -> Mapping[str, str]:
        """The performance arguments among those that it ``heeds`` that make no difference to this plan, and why.

        Each reason goes on a sentence that begins with the backend's name.
        """
        return {}

    @abc.abstractmethod
    def forward(self, plan: Plan, operands: Operands) -> Output:
        """Compute output and logsumexp."""

    @abc.abstractmethod
    def forward_saving(self, plan: Plan, operands: Operands) -> Saved:
        """Compute them for a backward pass."""

    def forward_continued(self, plan: Plan, operands: Operands, saved: Saved, seeing: QueryBox) -> Saved | None:
        """Compute them for a backward pass, of the keys of earlier forward passes, too.

        Args:
            plan: The plan of the pass on these keys.
            operands: The operands of all queries, and of keys that only queries of the box see; with origins.
            saved: What the earlier passes saved.
            seeing: The box.

        Returns:
            What is saved; ``None`` where no kernel does this: passes are merged then.
        """
        return None

    @abc.abstractmethod
    def backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
        """Compute the gradients of the inputs, given the cotangents, of which that of the logsumexp may be ``None``."""


class PureJaxBackend(Backend):
    """A backend whose ``forward`` is all that there is to write: plain JAX, which JAX differentiates.

    One that knows its derivative better overrides ``forward_differentiable``, ``tangents``, ``gradients`` and
    ``backward``.
    """

    carries_plan = False
    is_plain_xla = is_differentiable = shares_tiles = is_slow_fallback = True
    #: Width of ``Differentiable.residuals``; 0 where there are none.
    residual_width: ClassVar[int] = 0

    def forward_differentiable(self, plan: Plan, operands: Operands) -> Differentiable:
        """Compute output and logsumexp, and what their derivative reads besides."""
        output = self.forward(plan, operands)
        return Differentiable(output.out.astype(plan.problem.element.accumulator), output.logsumexp)

    def tangents(self, plan: Plan, operands: Operands, result: Differentiable, tangents: Gradients) -> Output:
        """Compute tangents of ``result``, linear in those of the operands; JAX derives all other derivatives."""

        def output_of(inputs: Inputs) -> Differentiable:
            return self.forward_differentiable(plan, operands._replace(inputs=inputs))

        _, changes = jax.jvp(output_of, (operands.inputs,), (tangents,))
        return Output(changes.out, changes.logsumexp)

    def gradients(
        self, plan: Plan, operands: Operands, result: Differentiable, cotangents: Cotangents, wanted: Any
    ) -> Gradients:
        """Compute the transpose of :meth:`tangents`: cotangents of the operands from those of output and logsumexp.

        Args:
            plan: The plan of the pass.
            operands: The arrays.
            result: What the forward pass returned.
            cotangents: The cotangents of output and logsumexp.
            wanted: :class:`Inputs` of bools: which cotangents are asked for; others may be ``None``.
        """
        transpose = jax.linear_transpose(
            lambda changes: self.tangents(plan, operands, result, changes), operands.inputs
        )
        (gradients,) = transpose(cotangents.of_both())
        return gradients  # type: ignore[no-any-return]

    def forward_saving(self, plan: Plan, operands: Operands) -> Saved:
        """Compute output and logsumexp for a backward pass, which computes everything anew."""
        output = self.forward(plan, operands)
        return Saved(*output, jnp.zeros_like(output.logsumexp))

    def backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
        """Compute the gradients by a second forward pass."""
        _, transpose = jax.vjp(lambda inputs: self.forward(plan, operands._replace(inputs=inputs)), operands.inputs)
        (gradients,) = transpose(cotangents.of_both())
        return gradients  # type: ignore[no-any-return]
