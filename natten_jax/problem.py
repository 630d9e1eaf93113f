"""The static description of an attention problem: the function to compute, without performance options.

A problem is frozen, hashable and canonical; all code below the public functions uses it. It is made from numbers
(:func:`problem_of`), and its rules are checked only here. :mod:`natten_jax.ops.canonicalize` makes a problem from
arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence, Sized
from typing import Any, Literal

from natten_jax.arguments.arrays import scale_or_default
from natten_jax.arguments.names import reject_unknown_kwargs
from natten_jax.arguments.static import Bools, Ints, int_tuple
from natten_jax.element_types import ELEMENT_TYPES, SUPPORTED_DTYPES, ElementType
from natten_jax.windows import Axis as Axis  # re-exported: the type of a public field
from natten_jax.windows import Edge, Edges, WindowArguments, describe_axes

Shape = tuple[int, ...]
Operator = Literal["fna", "fmha"]

OPERATORS: tuple[Operator, ...] = ("fna", "fmha")


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static facts of an attention call, without performance options.

    ``attention`` is the special case of one dimension whose window is the whole key sequence, the only
    case in which query and key/value layouts may differ.

    Attributes:
        operator: ``"fna"`` (neighborhood attention) or ``"fmha"`` (attention).
        batch: Batch size of the arrays, or the size to plan for if it is not known yet.
        axes: The token dimensions.
        heads: Query heads.
        heads_kv: Key/value heads; divides ``heads``.
        head_dim: Width of query and key heads.
        head_dim_v: Width of value and output heads.
        dtype: Element type name of query, key and value.
        scale: Factor of the logits.
        additional_kv: Number of key/value tokens that every query sees.
        own_origins: The queries of each batch entry are a box of the layout, at a different position per entry.
        own_extents: Each batch entry has a separate layout, which begins at the first token; the axes are the largest
            layout. The remaining tokens are padding.
        relative_bias: Add a bias to the logits for each offset of a key from a query.
        key_bias: Add a bias to the logits of each key.
        out_dtype: Element type name of the output; ``None`` is the default output type of ``dtype``.
        block_scales: Keys and values have a factor per token, in addition to the factors per head.
    """

    operator: Operator
    batch: int
    axes: tuple[Axis, ...]
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    scale: float
    additional_kv: int = 0
    own_origins: bool = False
    own_extents: bool = False
    relative_bias: bool = False
    key_bias: bool = False
    out_dtype: str | None = None
    block_scales: bool = False

    def checked(self) -> Problem:
        """Return this problem after checks of the element type and the heads.

        Raises:
            ValueError: The element type or the number of heads is not supported.
        """
        if self.dtype not in SUPPORTED_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(SUPPORTED_DTYPES)}, got {self.dtype!r}")
        if self.heads % self.heads_kv:
            raise ValueError(
                f"query has {self.heads} heads, which is not a multiple of the {self.heads_kv} heads of key and value "
                "(heads_kv)"
            )
        return self

    @property
    def own_layouts(self) -> bool:
        """Return True if passes have an operand ``layouts``."""
        return self.own_origins or self.own_extents

    @functools.cached_property
    def rank(self) -> int:
        """Number of token dimensions."""
        return len(self.axes)

    @functools.cached_property
    def query_layout(self) -> Shape:
        """Global extents of the query tokens, one per dimension."""
        return tuple([axis.query_extent for axis in self.axes])

    @functools.cached_property
    def kv_layout(self) -> Shape:
        """Global extents of the key/value tokens."""
        return tuple([axis.kv_extent for axis in self.axes])

    @functools.cached_property
    def kernel_size(self) -> Shape:
        """Window extents in tokens."""
        return tuple([axis.kernel_size for axis in self.axes])

    @functools.cached_property
    def stride(self) -> Shape:
        """Queries per dimension that share one window."""
        return tuple([axis.stride for axis in self.axes])

    @functools.cached_property
    def dilation(self) -> Shape:
        """Distance between neighboring tokens of a window."""
        return tuple([axis.dilation for axis in self.axes])

    @functools.cached_property
    def is_causal(self) -> tuple[bool, ...]:
        """Per dimension, True if later keys are hidden."""
        return tuple([axis.is_causal for axis in self.axes])

    @property
    def windows(self) -> WindowArguments:
        """Window arguments, with a value for each dimension."""
        facts = (tuple([getattr(axis, name) for axis in self.axes]) for name in WindowArguments._fields)
        return WindowArguments._make(facts)

    @functools.cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Boundary mode of each dimension."""
        return tuple([axis.edges for axis in self.axes])

    def with_axes(self, **facts: Sequence[Any]) -> Problem:
        """Return the problem with other values of fields of :class:`Axis`, one value per dimension."""
        changes = [dict(zip(facts, values, strict=True)) for values in zip(*facts.values(), strict=True)]
        axes = (dataclasses.replace(axis, **change) for axis, change in zip(self.axes, changes, strict=True))
        return dataclasses.replace(self, axes=tuple(axes))

    @property
    def biases(self) -> tuple[str, ...]:
        """Operand names of the biases that are added to the scaled logits."""
        return tuple([name for name in ("relative_bias", "key_bias") if getattr(self, name)])

    @property
    def bias_shape(self) -> Shape:
        """Shape of a head's relative bias: key offsets per dimension, in dilation steps from ``1 - kernel_size`` on."""
        return tuple([2 * axis.kernel_size - 1 for axis in self.axes])

    @property
    def is_attention(self) -> bool:
        """Return True if every query sees every key of the layout, so that flattened attention is equivalent.

        In one dimension a causal window over the whole sequence is causal attention for any stride. Flattened tokens do
        not preserve the offsets of a relative bias.
        """
        if self.operator == "fna" and self.own_extents:  # valid tokens are not contiguous once flattened
            return False
        if self.relative_bias:
            return False
        for axis in self.axes:
            if axis.kernel_size != axis.kv_extent or axis.edges == "cut":
                return False
        return not any(self.is_causal) or (self.rank == 1 and self.additional_kv == 0)

    @functools.cached_property
    def element(self) -> ElementType:
        """The element type of query, key and value."""
        return ELEMENT_TYPES[self.dtype]

    @property
    def output_dtype(self) -> str:
        """The element type name of the output."""
        return self.out_dtype or self.element.output or self.dtype

    def converted(self, dtype: str) -> Problem:
        """Return the problem for arrays converted to ``dtype``; its output has the accumulator's type."""
        out_dtype = ELEMENT_TYPES[dtype].accumulator
        return dataclasses.replace(self, dtype=dtype, out_dtype=None if out_dtype == dtype else out_dtype)

    def describe(self) -> str:
        """Format the problem in one line for traces and messages."""
        name = "attention" if self.operator == "fmha" else f"na{self.rank}d"
        parts = [f"{name} {'x'.join(map(str, self.query_layout))}", *describe_axes(self.axes)]
        if self.additional_kv:
            parts.append(f"add_kv={self.additional_kv}")
        if self.own_layouts:
            parts.append("own " + "+".join(["origins"] * self.own_origins + ["extents"] * self.own_extents))
        parts += self.biases
        return " ".join(parts)


@reject_unknown_kwargs()
def problem_of(
    layout: Sequence[int],
    kernel_size: Ints | None = None,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    *,
    edges: Edges = "shift",
    operator: Operator = "fna",
    kv_layout: Sequence[int] | None = None,
    batch: int = 1,
    heads: int = 1,
    heads_kv: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: str = "bfloat16",
    scale: float | None = None,
    additional_kv: int = 0,
) -> Problem:
    """Describe a problem without arrays; arguments are as in :func:`natten_jax.na1d`.

    Example:
        >>> from natten_jax.problem import problem_of
        >>> problem_of((30, 48, 80), (18, 24, 24), heads=24, head_dim=128).describe()
        'na3d 30x48x80 k=18x24x24'

    Args:
        layout: Tokens per dimension.
        kernel_size: Window extent, per dimension or one value for all; the next three arguments accept the same forms.
            ``None`` is the layout of the keys.
        stride: Queries that share a window.
        dilation: Distance between neighboring tokens of a window.
        is_causal: Hide later keys.
        edges: Boundary mode: ``"shift"`` moves a window that crosses an end back inside, ``"cut"`` drops its keys
            beyond the end, ``"wrap"`` continues it at the other end (``dilation`` must divide the extent).
        operator: ``"fna"``, or ``"fmha"`` for ``attention``.
        kv_layout: Key/value tokens per dimension; ``None`` is ``layout``. Only ``attention`` may have another layout.
        batch: Batch size.
        heads: Query heads.
        heads_kv: Key/value heads; ``None`` is ``heads``.
        head_dim: Width of query and key heads.
        head_dim_v: Width of value heads; ``None`` is ``head_dim``.
        dtype: Name of the element type.
        scale: Factor of the logits; ``None`` is ``head_dim ** -0.5``.
        additional_kv: Tokens that every query sees.

    Raises:
        ValueError: A value breaks a rule of the operators.
        TypeError: An argument is of the wrong type.
    """
    rank = len(layout) if isinstance(layout, Sized) else 1
    tokens = int_tuple("layout", layout, rank, repeat=False)
    kv_tokens = tokens if kv_layout is None else int_tuple("kv_layout", kv_layout, rank, repeat=False)
    return Problem(
        operator=operator,
        batch=batch,
        axes=WindowArguments(kernel_size, stride, dilation, is_causal, edges).axes(tokens, kv_tokens),
        heads=heads,
        heads_kv=heads if heads_kv is None else heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        dtype=dtype,
        scale=scale_or_default(scale, head_dim, dtype),
        additional_kv=additional_kv,
    ).checked()


def flattened(problem: Problem) -> Problem:
    """Return the equivalent ``attention`` problem over the flattened tokens; additional tokens come last.

    Args:
        problem: A problem in which every query sees every key (:attr:`Problem.is_attention`).
    """
    keys = math.prod(problem.kv_layout) + problem.additional_kv
    is_causal = any(problem.is_causal)
    axis = Axis(math.prod(problem.query_layout), keys, keys, is_causal=is_causal)
    # Without causality every query sees every key, whatever its position.
    own_origins = problem.own_origins and is_causal
    return dataclasses.replace(problem, operator="fmha", axes=(axis,), additional_kv=0, own_origins=own_origins)


def of_additional_tokens(problem: Problem) -> Problem:
    """Return the ``attention`` problem of the flattened queries and only the additional tokens."""
    axis = Axis(math.prod(problem.query_layout), problem.additional_kv, problem.additional_kv)
    absent: dict[str, Any] = dict.fromkeys(("own_origins", "own_extents", *problem.biases), False)
    return dataclasses.replace(problem, operator="fmha", axes=(axis,), additional_kv=0, **absent)
