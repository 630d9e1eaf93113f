"""Window arithmetic of neighborhood attention: the keys that a query sees, and the queries that see a key.

The mask is separable, so this module handles one dimension at a time. Tokens whose coordinates are equal modulo the
dilation form a *dilation group*. The *index* of a token is its position in its group. A window is a contiguous range of
indices. ``csrc/include/natten_jax/windows.h`` implements the same arithmetic for native code.

If the dimension wraps, every integer is an index: index ``i`` is the token ``i % length`` of a group of ``length``
tokens. A range of indices is at most as long as the group.

The functions accept Python ints, NumPy arrays and (with ``xp=jax.numpy``) traced JAX arrays.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from natten_jax.arguments.static import Bools, Ints, bool_tuple, choice_tuple, int_tuple, layout_tuple

Index = Any  # int, numpy.ndarray or jax.Array: the arithmetic below works for all three

#: Boundary mode of a window that crosses an end of a dimension: shift it back inside, cut it to the existing keys, or
#: wrap it around to the other end.
Edge = Literal["shift", "cut", "wrap"]
EDGES: tuple[Edge, ...] = get_args(Edge)
#: A boundary mode for each dimension, or a single mode for all dimensions.
Edges = Edge | Sequence[Edge]


class Window(NamedTuple):
    """The windows inside the dilation groups of one dimension.

    Attributes:
        kernel_size: Number of keys in a full window.
        stride: Number of queries that share one window; at most ``kernel_size``. These queries are a *stride group*,
            and they share the window of their *leader*. The leader is the middle query (the later of two middle
            queries), or the last query if ``is_causal``.
        is_causal: Mask out the keys after each query.
        edges: Boundary mode. Ignored for causal windows, which end at the query.
    """

    kernel_size: int
    stride: int = 1
    is_causal: bool = False
    edges: Edge = "shift"


def group_length(extent: Index, dilation: int, group: Index) -> Index:
    """Return the number of tokens in dilation group ``group`` of a dimension of ``extent`` tokens.

    Example:
        >>> from natten_jax.windows import group_length
        >>> group_length(7, 2, 0), group_length(7, 2, 1)
        (4, 3)
    """
    return extent - group if dilation == 1 else (extent - group + dilation - 1) // dilation


def window_bounds(window: Window, index: Index, length: Index, *, xp: ModuleType = np) -> tuple[Index, Index]:
    """Return the half-open range ``[start, end)`` of key indices that the query at ``index`` sees.

    Example:
        >>> from natten_jax.windows import Window, window_bounds
        >>> start, end = window_bounds(Window(kernel_size=3), 0, 8)  # shifted at the edge
        >>> int(start), int(end)
        (0, 3)
        >>> start, end = window_bounds(Window(kernel_size=3, edges="wrap"), 0, 8)  # keys 7, 0 and 1
        >>> int(start), int(end)
        (-1, 2)

    Args:
        window: The windows.
        index: Query index inside its dilation group. It can be ``length`` or more only if the window is the whole key
            sequence (``kernel_size == length``), as in attention between sequences of different lengths.
        length: Number of keys in the dilation group; at least ``kernel_size``.
        xp: Array namespace, ``numpy`` or ``jax.numpy``.
    """
    kernel_size, stride, is_causal, edges = window
    group_start = index if isinstance(stride, int) and stride == 1 else (index // stride) * stride
    if is_causal:
        leader = xp.minimum(group_start + stride - 1, length - 1)
        return xp.maximum(leader - kernel_size + 1, 0), xp.minimum(index + 1, length)
    leader = xp.minimum(group_start + stride // 2, length - 1)
    if edges != "shift":
        start = leader - kernel_size // 2
        end = start + kernel_size
        return (start, end) if edges == "wrap" else (xp.maximum(start, 0), xp.minimum(end, length))
    start = xp.minimum(xp.maximum(leader - kernel_size // 2, 0), length - kernel_size)
    return start, start + kernel_size


def inverse_window_bounds(
    window: Window, index: Index, query_length: Index, key_length: Index, *, xp: ModuleType = np
) -> tuple[Index, Index]:
    """Return the half-open range ``[first, last)`` of the indices of all queries that see the key at ``index``.

    If the dimension wraps, ``index`` can be any integer.

    Example:
        >>> from natten_jax.windows import Window, inverse_window_bounds
        >>> first, last = inverse_window_bounds(Window(kernel_size=3), 1, 8, 8)
        >>> int(first), int(last)
        (0, 3)

    Args:
        window: The windows.
        index: Key index inside its dilation group.
        query_length: Number of queries in the dilation group. It differs from ``key_length`` only if ``kernel_size ==
            key_length``.
        key_length: Number of keys in the dilation group.
        xp: Array namespace, ``numpy`` or ``jax.numpy``.
    """
    kernel_size, stride, is_causal, edges = window
    left = kernel_size // 2
    right = kernel_size - 1 - left
    if not is_causal and edges != "shift":
        ends = index - right, index + left + 1
        first, last = (_first_led_from(window, end, key_length, xp) for end in ends)
        return first, last
    seen_to_the_end = index >= key_length - kernel_size
    if is_causal:
        first = index
        last = xp.where(seen_to_the_end, query_length, _rounded_down(index + kernel_size, stride))
    else:
        # The first stride group that sees the key is the first group whose leader is at `index - right` or later. The
        # leader of group `n` is at `n * stride + stride // 2`. So `index - right + offset`, rounded down to a multiple
        # of the stride, is the first query of this group.
        offset = stride - stride // 2 - 1
        first = xp.where(index < kernel_size, 0, _rounded_down(index - right + offset, stride))
        last = xp.where(seen_to_the_end, query_length, _rounded_down(index + left + offset + 1, stride))
    last = xp.minimum(last, query_length)
    return xp.minimum(first, last), last


def _first_led_from(window: Window, index: Index, length: Index, xp: ModuleType) -> Index:
    """Return the first query whose leader is at or after ``index``, for the modes ``"cut"`` and ``"wrap"``."""
    stride = window.stride
    wraps = window.edges == "wrap"
    if isinstance(stride, int) and stride == 1:
        return index if wraps else xp.minimum(xp.maximum(index, 0), length)
    offset = stride - stride // 2 - 1  # a leader is `stride // 2` after the first query of its group
    period_start = index // length * length if wraps else 0  # stride groups start over every `length` indices
    local_index = index - period_start if wraps else xp.maximum(index, 0)
    # The leader of the last group can be before the last token. So it is possible that no leader is at or after
    # `local_index`. In this case `first` is `length`.
    first = xp.where(local_index < length, xp.minimum(_rounded_down(local_index + offset, stride), length), length)
    return period_start + first


def _rounded_down(index: Index, step: int) -> Index:
    """Round down to a multiple of ``step``, without a division for step 1."""
    return index if isinstance(step, int) and step == 1 else (index // step) * step


@dataclasses.dataclass(frozen=True)
class Axis:
    """A token dimension: its tokens, and the windows over them.

    Attributes:
        query_extent: Number of query tokens in the global layout.
        kv_extent: Number of key/value tokens in the global layout.
        kernel_size: Window extent in tokens.
        stride: Number of queries that share one window.
        dilation: Distance between neighboring tokens of a window.
        is_causal: Mask out the keys after each query.
        edges: Boundary mode; ``"shift"`` if all modes give the same windows.
    """

    query_extent: int
    kv_extent: int
    kernel_size: int
    stride: int = 1
    dilation: int = 1
    is_causal: bool = False
    edges: Edge = "shift"

    @property
    def facts(self) -> tuple[int | str, ...]:
        """Constructor arguments for serialization. ``edges`` is omitted if it has the default value."""
        facts = dataclasses.astuple(self)
        return facts[:-1] if self.edges == "shift" else facts

    @property
    def window(self) -> Window:
        """The windows of this dimension, as an argument of :func:`window_bounds`."""
        return Window(self.kernel_size, self.stride, self.is_causal, self.edges)

    def lengths(self, group: Index) -> tuple[Index, Index]:
        """Return the numbers of queries and keys in a dilation group."""
        d = self.dilation
        return group_length(self.query_extent, d, group), group_length(self.kv_extent, d, group)

    def dilation_groups(self) -> Iterator[tuple[int, int, int]]:
        """Yield ``(groups, queries, keys)``: how many dilation groups have these numbers of queries and keys."""
        # If the dilation does not divide an extent, the first `extent % dilation` groups have one token more than the
        # other groups.
        extents, d = (self.query_extent, self.kv_extent), self.dilation
        for first, end in itertools.pairwise(sorted({0, d, *[extent % d for extent in extents]})):
            queries, keys = [-(-(extent - first) // d) for extent in extents]
            yield end - first, queries, keys

    def bounds(
        self, index: Index, lengths: tuple[Index, Index], *, of_query: bool = True, xp: ModuleType = np
    ) -> tuple[Index, Index]:
        """Return the range ``[start, end)`` of the keys that a query sees, or of the queries that see a key.

        Args:
            index: Index of the query or key inside its dilation group.
            lengths: Number of queries and number of keys in the dilation group.
            of_query: True if ``index`` is a query index, False if it is a key index.
            xp: Array namespace, ``numpy`` or ``jax.numpy``.
        """
        queries, keys = lengths
        if of_query:
            return window_bounds(self.window, index, keys, xp=xp)
        return inverse_window_bounds(self.window, index, queries, keys, xp=xp)

    def within(self, query_extent: Index, kv_extent: Index, *, xp: ModuleType = np) -> Axis:
        """Restrict the dimension to fewer tokens, and clip window extent and stride to fit.

        Args:
            query_extent: New number of query tokens; can be a traced value.
            kv_extent: New number of key/value tokens; can be a traced value.
            xp: Array namespace, ``numpy`` or ``jax.numpy``.
        """
        largest = xp.maximum(kv_extent // self.dilation, xp.minimum(kv_extent, 1))  # 0 if there are no keys
        kernel_size: Any = xp.minimum(self.kernel_size, largest)
        stride: Any = 1 if self.stride == 1 else xp.maximum(xp.minimum(self.stride, kernel_size), 1)
        return dataclasses.replace(
            self, query_extent=query_extent, kv_extent=kv_extent, kernel_size=kernel_size, stride=stride
        )

    def reach(self, queries: Index) -> tuple[Index, Index]:
        """Return the coordinate of the first key that each query sees, and one past the coordinate of its last key.

        If the dimension wraps, a coordinate beyond one end of the dimension refers to a token at the other end.
        """
        group = queries % self.dilation
        start, end = self.bounds(queries // self.dilation, self.lengths(group))
        return start * self.dilation + group, (end - 1) * self.dilation + group + 1


#: Returns the integer fields of an axis that native kernels read, in the order of
#: csrc/include/natten_jax/axis_fields.h.
axis_numbers = operator.attrgetter("query_extent", "kv_extent", "kernel_size", "stride", "dilation")


def fitted(kernel_size: Ints, layout: Sequence[int], dilation: Ints = 1) -> tuple[int, ...]:
    """Clip window extents to the largest extents that fit a layout.

    Example:
        >>> from natten_jax.windows import fitted
        >>> fitted(7, (5, 32), dilation=(1, 6))
        (5, 5)

    Args:
        kernel_size: Window extent in tokens, per dimension or one value for all dimensions; -1 is the whole extent.
        layout: Number of tokens of each dimension.
        dilation: Distance between neighboring tokens of a window, per dimension or one value for all dimensions.

    Returns:
        For each dimension ``min(kernel_size, extent // dilation)``, but at least 1, because a token always sees itself.

    Raises:
        ValueError: A number is out of range, or an argument does not have one value per dimension.
        TypeError: An argument contains a value that is not an int.
    """
    extents = layout_tuple("layout", layout)
    sizes = int_tuple("kernel_size", kernel_size, len(extents), words=_WORDS)
    steps = int_tuple("dilation", dilation, len(extents))
    most = [max(extent // step, 1) for extent, step in zip(extents, steps, strict=True)]
    return tuple([largest if size in _WORDS else min(size, largest) for size, largest in zip(sizes, most, strict=True)])


#: Value of ``kernel_size`` that means the whole extent of the dimension.
WHOLE_EXTENT = -1
_WORDS = {WHOLE_EXTENT: "the whole extent"}


class WindowArguments(NamedTuple):
    """Window arguments of the operators: one value for all token dimensions, or a value per dimension.

    If ``kernel_size`` is ``None``, each window is as large as the layout of the keys.

    Attributes:
        kernel_size: Window extent in tokens; -1 is the whole extent (with dilation, the largest window that fits).
        stride: Number of queries that share a window; at most ``kernel_size``.
        dilation: Distance between neighboring tokens of a window. ``kernel_size * dilation`` must not exceed the extent
            of the dimension.
        is_causal: Mask out the keys after each query.
        edges: Boundary mode of a window that crosses an end of the dimension. ``"shift"`` moves the window back inside.
            ``"cut"`` drops the keys beyond the end. ``"wrap"`` continues the window at the other end; ``dilation`` must
            then divide the extent.
    """

    kernel_size: Ints | None = None
    stride: Ints = 1
    dilation: Ints = 1
    is_causal: Bools = False
    edges: Edges = "shift"

    def checked(self, rank: int) -> WindowArguments:
        """Expand each argument to a value per dimension, and check all rules that do not depend on a layout.

        Raises:
            ValueError: A value breaks a rule.
            TypeError: A value is of the wrong type.
        """
        kernel_size = int_tuple("kernel_size", self.kernel_size, rank, words=_WORDS)
        stride = int_tuple("stride", self.stride, rank)
        dilation = int_tuple("dilation", self.dilation, rank)
        is_causal = bool_tuple("is_causal", self.is_causal, rank)
        if [1 for s, k in zip(stride, kernel_size, strict=True) if s > k and k not in _WORDS]:
            raise ValueError(f"stride {stride} exceeds kernel_size {kernel_size}: stride <= kernel_size must hold")
        edges = choice_tuple("edges", self.edges, EDGES, rank)
        if ("wrap", True) in zip(edges, is_causal, strict=True):
            raise ValueError(
                f"edges {edges} with is_causal {is_causal}: a dimension that wraps has no first token and no "
                "order, so it cannot be causal"
            )
        return WindowArguments(kernel_size, stride, dilation, is_causal, edges)

    def with_extents(self, layout: Sequence[int]) -> WindowArguments:
        """Replace each :data:`WHOLE_EXTENT` by the window extent in tokens, and check the arguments.

        Raises:
            ValueError: A value breaks a rule.
            TypeError: A value is of the wrong type.
        """
        given = self._replace(kernel_size=layout) if self.kernel_size is None else self
        checked = given.checked(len(layout))
        sizes: Any = checked.kernel_size
        if WHOLE_EXTENT not in sizes:
            return checked
        largest = fitted(WHOLE_EXTENT, layout, checked.dilation)
        known = tuple([most if k in _WORDS else k for k, most in zip(sizes, largest, strict=True)])  # type: ignore[arg-type]
        return checked if known == sizes else checked._replace(kernel_size=known).checked(len(layout))

    def clamped(self, layout: Sequence[int]) -> WindowArguments:
        """Clip windows to the largest windows that fit a layout.

        The stride is clipped to the number of keys in a window. If a dimension has fewer tokens than the dilation,
        windows have one key. The dilation then has no effect, and is replaced by 1.

        Raises:
            ValueError: A value breaks a rule.
            TypeError: A value is of the wrong type.
        """
        given = self.with_extents(layout)
        sizes = fitted(given.kernel_size, layout, given.dilation)  # type: ignore[arg-type]
        strides, dilations = given.stride, given.dilation
        return given._replace(
            kernel_size=sizes,
            stride=tuple(map(min, strides, sizes)),  # type: ignore[arg-type]
            dilation=tuple(d if d <= extent else 1 for d, extent in zip(dilations, layout, strict=True)),  # type: ignore[arg-type]
        )

    def axes(self, query_layout: Sequence[int], kv_layout: Sequence[int]) -> tuple[Axis, ...]:
        """Return an :class:`Axis` with these windows for each dimension of a token layout.

        Raises:
            ValueError: A value breaks a rule, or a window exceeds the layout of the keys.
            TypeError: A value is of the wrong type.
        """
        windows = self.with_extents(kv_layout)
        axes = [Axis(*facts) for facts in zip(query_layout, kv_layout, *windows, strict=True)]  # type: ignore[arg-type]
        for axis in axes:
            if axis.edges == "wrap" and axis.kv_extent % axis.dilation:
                raise ValueError(
                    f"edges {windows.edges} with dilation {windows.dilation} and the token layout {kv_layout}: "
                    f"dilation must divide the extent of a dimension that wraps ({axis.dilation} does not divide "
                    f"{axis.kv_extent})"
                )
            spread = axis.kernel_size * axis.dilation
            if spread > axis.kv_extent:
                product = "kernel_size" if axis.dilation == 1 else "kernel_size * dilation"
                raise ValueError(
                    f"kernel_size {windows.kernel_size} with dilation {windows.dilation} exceeds the token layout "
                    f"{kv_layout}: {product} <= extent must hold in every dimension ({spread} > {axis.kv_extent})"
                )
        return tuple([_with_decisive_edges(axis) for axis in axes])


def _with_decisive_edges(axis: Axis) -> Axis:
    """Replace ``edges`` by ``"shift"`` if all modes give the same windows."""
    has_no_effect = axis.edges != "shift" and (axis.kernel_size == 1 or axis.is_causal)
    return dataclasses.replace(axis, edges="shift") if has_no_effect else axis


def describe_axes(axes: Sequence[Axis]) -> Iterator[str]:
    """Yield a short text for each window argument that does not have its default value."""
    shorts = {"kernel_size": ("k", "x"), "stride": ("s", "x"), "dilation": ("d", "x"), "is_causal": ("causal", "")}
    for name, default in WindowArguments()._asdict().items():
        short, separator = shorts.get(name, (name, ","))
        values = [getattr(axis, name) for axis in axes]
        if values != [default] * len(values):
            texts = [each if isinstance(each, str) else str(int(each)) for each in values]
            yield f"{short}={separator.join(texts)}"
