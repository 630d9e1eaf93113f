"""Plots of attention windows with Matplotlib, which the extra ``plot`` installs.

:func:`window_mask` does not need Matplotlib. Masks and plots use the same window arithmetic as the operators
(:mod:`natten_jax.windows`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from natten_jax.arguments.names import reject_unknown_kwargs
from natten_jax.arguments.static import Bools, Ints, int_tuple, python_int, shown
from natten_jax.problem import problem_of
from natten_jax.windows import Axis, Edges, WindowArguments

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_window", "plot_windows", "window_mask"]

#: The colors suit light and dark pages, because tokens that the query does not see are translucent and the gaps between
#: cells are transparent.
_MASKED, _ATTENDED = "#8f9aa63d", "#7fb2d9"
_QUERY, _SHARED = "#e08a2c", "#1f5f99"
_CELL = 0.94  # side of a cell, relative to the distance between cell centers


@reject_unknown_kwargs()
def window_mask(
    layout: Sequence[int],
    query: Sequence[int],
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    *,
    edges: Edges = "shift",
) -> np.ndarray:
    """Return a mask of the layout that is True at the keys that a query sees.

    Example:
        >>> from natten_jax.plot import window_mask
        >>> window_mask((3, 8), query=(0, 4), kernel_size=(1, 3)).astype(int)
        array([[0, 0, 0, 1, 1, 1, 0, 0],
               [0, 0, 0, 0, 0, 0, 0, 0],
               [0, 0, 0, 0, 0, 0, 0, 0]])

    Args:
        layout: Tokens per dimension. Any number of dimensions is allowed.
        query: The query's coordinates.
        kernel_size: Tokens in a window: one value for all dimensions, or one per dimension. The other window arguments
            have the same form.
        stride: Number of queries that share one window.
        dilation: Distance between neighboring tokens of a window.
        is_causal: Mask out the keys after the query.
        edges: Boundary mode of windows that extend beyond an end of the layout. ``"shift"`` moves the window back
            inside. ``"cut"`` drops the keys beyond the end. ``"wrap"`` continues the window at the other
            end, and requires that ``dilation`` divides the extent.

    Returns:
        Boolean array with the shape ``layout``.

    Raises:
        ValueError: A value breaks a rule of the operators, or the query is outside of the layout.
        TypeError: An argument is of the wrong type.
    """
    axes = problem_of(layout, kernel_size, stride, dilation, is_causal, edges=edges).axes
    lines = [axis_mask(axis)[each] for axis, each in zip(axes, _coordinates(query, axes), strict=True)]
    return functools.reduce(np.logical_and.outer, lines)


@reject_unknown_kwargs()
def plot_window(
    layout: Sequence[int],
    query: Sequence[int],
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    *,
    edges: Edges = "shift",
    ax: Axes | None = None,
    title: str | None = None,
) -> Axes:
    """Draw the keys that a query sees, and the queries that share its window.

    Each cell is a token. The query is orange, and the keys that it sees are blue. Dots mark the other queries that see
    exactly the same keys. The slices of a video are drawn side by side.

    Example:
        >>> from natten_jax.plot import plot_window
        >>> axes = plot_window((12, 12), query=(4, 7), kernel_size=5, dilation=2)
        >>> # then plt.show()

    Args:
        layout: Tokens per dimension, for one to three dimensions.
        query: The query's coordinates.
        kernel_size: Tokens in a window: one value for all dimensions, or one per dimension. The other window arguments
            have the same form.
        stride: Number of queries that share one window.
        dilation: Distance between neighboring tokens of a window.
        is_causal: Mask out the keys after the query.
        edges: Boundary mode of windows that extend beyond an end of the layout. ``"shift"`` moves the window back
            inside. ``"cut"`` drops the keys beyond the end. ``"wrap"`` continues the window at the other
            end, and requires that ``dilation`` divides the extent.
        ax: Matplotlib axes to draw on; ``None`` creates a figure.
        title: Title of the plot. ``None`` uses a description of the window.

    Returns:
        The axes.

    Raises:
        ValueError: A value breaks a rule of the operators, or the query is outside of the layout.
        TypeError: An argument is of the wrong type.
        ImportError: Matplotlib is not installed.
    """
    axes = problem_of(layout, kernel_size, stride, dilation, is_causal, edges=edges).axes
    if len(axes) > 3:
        raise ValueError(f"layout must have one to three dimensions to be drawn, got {shown(layout)}")
    at = _coordinates(query, axes)
    sharing = functools.reduce(
        np.logical_and.outer,
        [(masks == masks[each]).all(1) for masks, each in zip(map(axis_mask, axes), at, strict=True)],
    )
    seen = window_mask(layout, at, kernel_size, stride, dilation, is_causal, edges=edges)
    ax = _draw_cells(ax, _slices(seen), _slices(np.ones_like(seen)))
    is_query = np.zeros(sharing.shape, bool)
    is_query[at] = True
    y, x = np.nonzero(_slices(sharing & ~is_query))
    if x.size:
        ax.plot(x, y, ".", color=_SHARED, markersize=4)
    ax.add_patch(_cells(np.argwhere(_slices(is_query)), _QUERY))
    ax.set_title(_described(axes) if title is None else title, fontsize="medium")
    return ax


@reject_unknown_kwargs()
def plot_windows(
    extent: int,
    kernel_size: int,
    stride: int = 1,
    dilation: int = 1,
    is_causal: bool = False,
    *,
    edges: Edges = "shift",
    ax: Axes | None = None,
    title: str | None = None,
) -> Axes:
    """Draw all windows of one dimension: a row for every query, a column for every key.

    Example:
        >>> from natten_jax.plot import plot_windows
        >>> axes = plot_windows(16, kernel_size=5, stride=3)  # then plt.show()

    Args:
        extent: Tokens in the dimension.
        kernel_size: Tokens in a window.
        stride: Number of queries that share one window.
        dilation: Distance between neighboring tokens of a window.
        is_causal: Mask out the keys after the query.
        edges: Boundary mode of windows that extend beyond an end of the layout. ``"shift"`` moves the window back
            inside. ``"cut"`` drops the keys beyond the end. ``"wrap"`` continues the window at the other
            end, and requires that ``dilation`` divides the extent.
        ax: Matplotlib axes to draw on; ``None`` creates a figure.
        title: Title of the plot. ``None`` uses a description of the windows.

    Returns:
        The axes.

    Raises:
        ValueError: A value breaks a rule of the operators.
        TypeError: An argument is of the wrong type.
        ImportError: Matplotlib is not installed.
    """
    layout = int_tuple("extent", extent, 1)
    (axis,) = problem_of(layout, kernel_size, stride, dilation, is_causal, edges=edges).axes
    seen = axis_mask(axis)
    ax = _draw_cells(ax, seen, np.ones_like(seen))
    itself = np.arange(*layout)
    ax.add_patch(_cells(np.stack([itself, itself], axis=1), "none", edge=_QUERY))
    ax.set_xlabel("keys", fontsize="medium")
    ax.set_ylabel("queries", fontsize="medium")
    ax.set_title(_described((axis,)) if title is None else title, fontsize="medium")
    return ax


def _coordinates(query: Sequence[int], axes: Sequence[Axis]) -> tuple[int, ...]:
    given = tuple(map(python_int, query)) if isinstance(query, Sequence) else (None,)
    indices = tuple(each for each in given if each is not None)
    if len(indices) < len(given):
        raise TypeError(f"query must be a sequence of ints, got {shown(query)}")
    extents = tuple(axis.query_extent for axis in axes)
    if len(indices) != len(extents) or any(not 0 <= x < extent for x, extent in zip(indices, extents, strict=True)):
        raise ValueError(f"query must be coordinates inside of the layout {extents}, got {shown(query)}")
    return indices


def axis_mask(axis: Axis) -> np.ndarray:
    """Return a boolean mask ``[queries, keys]`` of one dimension. An element is True if the query sees the key."""
    queries, tokens = np.arange(axis.query_extent)[:, np.newaxis], np.arange(axis.kv_extent)
    first, end = axis.reach(queries)
    # If the dimension wraps, a window can also contain tokens of the previous or next repetition of the layout.
    rounds = (-axis.kv_extent, 0, axis.kv_extent) if axis.edges == "wrap" else (0,)
    is_inside = [(first <= tokens + each) & (tokens + each < end) for each in rounds]
    return np.logical_or.reduce(is_inside) & ((queries - tokens) % axis.dilation == 0)


def _slices(cells: np.ndarray) -> np.ndarray:
    """Arrange the cells of a layout in a 2-D array.

    The slices of a video are side by side, and a column of False separates neighboring slices.
    """
    cells = cells.reshape((1,) * (3 - cells.ndim) + cells.shape)
    with_gaps = np.pad(cells, [(0, 0), (0, 0), (0, 1)])
    return with_gaps.swapaxes(0, 1).reshape(cells.shape[1], -1)[:, :-1]


def _cells(positions: np.ndarray, color: str, *, edge: str = "none") -> Any:
    """Return the cells at ``[(y, x), ...]`` as a single path, because separate paths make image files large."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners = _CELL * np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5), (-0.5, -0.5)])
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    vertices = (positions[:, None, ::-1] + corners).reshape(-1, 2)
    return PathPatch(Path(vertices, codes * len(positions)), facecolor=color, edgecolor=edge, linewidth=0.8)


def _draw_cells(ax: Axes | None, seen: np.ndarray, is_there: np.ndarray) -> Axes:
    height, width = seen.shape
    if ax is None:
        try:
            from matplotlib import pyplot as plt
        except ImportError:
            raise ImportError("pictures need Matplotlib: pip install matplotlib") from None
        _, ax = plt.subplots(figsize=(max(2.0, 0.25 * width), max(1.0, 0.25 * height) + 0.4), layout="constrained")
    elif not hasattr(ax, "add_patch"):
        raise TypeError(f"ax must be one pair of Matplotlib axes or None, got {shown(ax)}")
    for color, positions in ((_MASKED, is_there & ~seen), (_ATTENDED, seen)):
        ax.add_patch(_cells(np.argwhere(positions), color))
    ax.set_xlim(-0.6, width - 0.4)
    ax.set_ylim(height - 0.4, -0.6)
    ax.set_aspect("equal")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    return ax


def _described(axes: Sequence[Axis]) -> str:
    """Describe windows by the window arguments that differ from the defaults."""

    def text(values: Sequence[Any]) -> str:
        return str(values[0]) if len(set(values)) == 1 else "(" + ", ".join(map(str, values)) + ")"

    defaults = WindowArguments()._asdict()
    settings = {name: [getattr(axis, name) for axis in axes] for name in defaults}
    return ", ".join(f"{name}={text(values)}" for name, values in settings.items() if set(values) != {defaults[name]})
