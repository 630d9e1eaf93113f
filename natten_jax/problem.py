"""Static description of an attention problem: the function to compute, without performance options.

A :class:`Problem` is immutable, hashable and canonical. The public functions of the package create a problem from their
arrays (:mod:`natten_jax.ops.canonicalize`), and all lower levels of the package use this problem. :func:`problem_of`
creates a problem from numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

from natten_jax.arguments.arrays import scale_or_default
from natten_jax.arguments.names import check_types, reject_unknown_kwargs
from natten_jax.arguments.static import Bools, Ints, int_tuple, layout_tuple
from natten_jax.element_types import ELEMENT_TYPES, SUPPORTED_DTYPES, ElementType
from natten_jax.windows import Axis as Axis  # re-exported: the type of a public field
from natten_jax.windows import Edge, Edges, WindowArguments, describe_axes

Shape = tuple[int, ...]
Operator = Literal["fna", "fmha"]

OPERATORS: tuple[Operator, ...] = ("fna", "fmha")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Static properties of an attention call, without performance options.

    ``attention`` is the special case of one token dimension in which every window is the whole key sequence. Only in
    this case can the query layout and the key/value layout differ.

    Attributes:
        operator: ``"fna"`` (neighborhood attention) or ``"fmha"`` (attention).
        batch: Batch size of the arrays. For a symbolic batch size, the number that plans assume.
        axes: The token dimensions.
        heads: Number of query heads.
        heads_kv: Number of key/value heads, a divisor of ``heads``.
        head_dim: Width of query and key heads.
        head_dim_v: Width of value and output heads.
        dtype: Element type name of query, key and value.
        scale: Factor of the logits.
        additional_kv: Number of additional key/value tokens, which every query sees.
        own_origins: True if the queries are a box of the layout, and the position of this box can differ per batch
            entry.
        own_extents: True if the extents of the layout without padding can differ per batch entry. The layout without
            padding begins at the first token. ``axes`` has the extents with padding.
        relative_bias: True if a bias per offset between query and key is added to the logits.
        key_bias: True if a bias per key is added to the logits.
        out_dtype: Element type name of the output. ``None`` means the default output type of ``dtype``.
        block_scales: True if keys or values have a scale factor per block of tokens. The operators expand these factors
            to one factor per token.
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
        """Check the element type and the heads, and return this problem.

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
        """True if the passes of this problem take the operand ``layouts``."""
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
        """Number of queries per dimension that share one window."""
        return tuple([axis.stride for axis in self.axes])

    @functools.cached_property
    def dilation(self) -> Shape:
        """Distance between neighboring tokens of a window."""
        return tuple([axis.dilation for axis in self.axes])

    @functools.cached_property
    def is_causal(self) -> tuple[bool, ...]:
        """Per dimension, True if keys after the query are masked out."""
        return tuple([axis.is_causal for axis in self.axes])

    @property
    def windows(self) -> WindowArguments:
        """Window arguments, with a value for each dimension."""
        values = (tuple([getattr(axis, name) for axis in self.axes]) for name in WindowArguments._fields)
        return WindowArguments._make(values)

    @functools.cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Boundary mode of each dimension."""
        return tuple([axis.edges for axis in self.axes])

    def with_axes(self, **facts: Sequence[Any]) -> Problem:
        """Return a copy in which fields of :class:`Axis` are replaced. Each argument has one value per dimension."""
        changes = [dict(zip(facts, values, strict=True)) for values in zip(*facts.values(), strict=True)]
        axes = (dataclasses.replace(axis, **change) for axis, change in zip(self.axes, changes, strict=True))
        return dataclasses.replace(self, axes=tuple(axes))

    @property
    def biases(self) -> tuple[str, ...]:
        """Names of the bias operands that are added to the scaled logits."""
        return tuple([name for name in ("relative_bias", "key_bias") if getattr(self, name)])

    @property
    def bias_shape(self) -> Shape:
        """Shape of a head's relative bias.

        In each dimension, entry 0 is the bias of the offset ``1 - kernel_size``. The unit of offsets is ``dilation``
        tokens.
        """
        return tuple([2 * axis.kernel_size - 1 for axis in self.axes])

    @property
    def is_attention(self) -> bool:
        """True if this problem is equivalent to ``attention`` over the flattened tokens.

        Every window must be the whole layout. A relative bias is not allowed, because flattening does not preserve its
        offsets. A causal mask is allowed only if there is one token dimension and no additional token. The problem is
        then causal attention, for any stride.
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
        """Return this problem after a conversion of the arrays to ``dtype``.

        The output has the accumulator type of ``dtype``.
        """
        out_dtype = ELEMENT_TYPES[dtype].accumulator
        return dataclasses.replace(self, dtype=dtype, out_dtype=None if out_dtype == dtype else out_dtype)

    def describe(self) -> str:
        """Return a description of the problem in one line, for traces and messages."""
        name = "attention" if self.operator == "fmha" else f"na{self.rank}d"
        parts = [f"{name} {'x'.join(map(str, self.query_layout))}", *describe_axes(self.axes)]
        if self.additional_kv:
            parts.append(f"add_kv={self.additional_kv}")
        if self.own_layouts:
            parts.append("own " + "+".join(["origins"] * self.own_origins + ["extents"] * self.own_extents))
        parts += self.biases
        return " ".join(parts)


@reject_unknown_kwargs()
@check_types
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
    """Create a problem from numbers, without arrays. The window arguments are the same as in the operators.

    Example:
        >>> from natten_jax.problem import problem_of
        >>> problem_of((30, 48, 80), (18, 24, 24), heads=24, head_dim=128).describe()
        'na3d 30x48x80 k=18x24x24'

    Args:
        layout: Tokens per dimension.
        kernel_size: Tokens in a window: one value for all dimensions, or one per dimension. The other window arguments
            have the same form. ``None`` means windows as large as the layout of the keys.
        stride: Number of queries that share one window.
        dilation: Distance between neighboring tokens of a window.
        is_causal: Mask out the keys after the query.
        edges: Boundary mode of windows that extend beyond an end of the layout. ``"shift"`` moves the window back
            inside. ``"cut"`` drops the keys beyond the end. ``"wrap"`` continues the window at the other
            end, and requires that ``dilation`` divides the extent.
        operator: ``"fna"``, or ``"fmha"`` for ``attention``.
        kv_layout: Key/value tokens per dimension. ``None`` means ``layout``. Only ``attention`` allows a layout that
            differs from ``layout``.
        batch: Batch size.
        heads: Number of query heads.
        heads_kv: Number of key/value heads. ``None`` means the value of ``heads``.
        head_dim: Width of query and key heads.
        head_dim_v: Width of value heads. ``None`` means the value of ``head_dim``.
        dtype: Name of the element type.
        scale: Factor of the logits. ``None`` means ``head_dim ** -0.5``.
        additional_kv: Number of additional key/value tokens, which every query sees.

    Raises:
        ValueError: A value breaks a rule of the operators.
        TypeError: An argument is of the wrong type.
    """
    tokens = layout_tuple("layout", layout)
    kv_tokens = tokens if kv_layout is None else int_tuple("kv_layout", kv_layout, len(tokens), repeat=False)
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
    """Return the equivalent ``attention`` problem. Its keys are the flattened tokens, then the additional tokens.

    Args:
        problem: A problem for which :attr:`Problem.is_attention` is True.
    """
    keys = math.prod(problem.kv_layout) + problem.additional_kv
    is_causal = any(problem.is_causal)
    axis = Axis(math.prod(problem.query_layout), keys, keys, is_causal=is_causal)
    # Without a causal mask, every query sees every key, so that the positions of the queries do not matter.
    own_origins = problem.own_origins and is_causal
    return dataclasses.replace(problem, operator="fmha", axes=(axis,), additional_kv=0, own_origins=own_origins)


def of_additional_tokens(problem: Problem) -> Problem:
    """Return the ``attention`` problem with flattened queries, in which only the additional tokens are keys."""
    axis = Axis(math.prod(problem.query_layout), problem.additional_kv, problem.additional_kv)
    absent: dict[str, Any] = dict.fromkeys(("own_origins", "own_extents", *problem.biases), False)
    return dataclasses.replace(problem, operator="fmha", axes=(axis,), additional_kv=0, **absent)
