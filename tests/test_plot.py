"""Plots of windows: compare the plotted mask with the oracle's mask, and count the plotted cells."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from natten_jax.plot import plot_window, plot_windows, window_mask
from tests.support import oracle

FACTS = ("kernel_size", "stride", "dilation", "is_causal", "edges")


@pytest.mark.parametrize(
    ("layout", "window"),
    [
        ((11,), ((4,), (3,), (2,), (False,), ("shift",))),
        ((9,), ((9,), (1,), (1,), (True,), ("shift",))),
        ((7, 9), ((3, 4), (2, 1), (2, 2), (False, True), ("cut", "shift"))),
        ((7, 12), ((6, 3), (4, 1), (1, 4), (False, False), ("wrap", "wrap"))),
        ((4, 5, 6), ((2, 3, 3), (2, 1, 3), (1, 1, 2), (True, False, False), ("shift", "cut", "wrap"))),
    ],
)
def test_mask_is_that_of_the_definition(layout, window):
    expected = oracle.neighborhood_mask(layout, *window).reshape(*layout, *layout)
    for query in np.ndindex(*layout):
        np.testing.assert_array_equal(
            window_mask(layout, query, **dict(zip(FACTS, window, strict=True))), expected[query]
        )


def cells_of(patch) -> int:
    """Return the number of cells in a drawn shape. Its path has five points per cell."""
    return len(patch.get_path().codes) // 5


def test_cells_that_are_drawn():
    pytest.importorskip("matplotlib").use("Agg")
    axes = plot_window((6, 7), (2, 3), kernel_size=3, stride=2)
    unseen, seen, query = (cells_of(patch) for patch in axes.patches)
    assert (unseen, seen, query) == (33, 9, 1)
    (sharing,) = axes.lines  # the three other queries that share the window
    assert sorted(map(tuple, np.asarray(sharing.get_xydata()).tolist())) == [(2, 2), (2, 3), (3, 3)]
    assert axes.get_title() == "kernel_size=3, stride=2"
    axes = plot_window((2, 6, 7), (1, 2, 3), kernel_size=(1, 3, 5), is_causal=(True, False, False), title="")
    unseen, seen, query = (cells_of(patch) for patch in axes.patches)
    assert (unseen, seen, query) == (84 - 15, 15, 1)
    assert axes.get_title() == ""
    axes = plot_windows(8, kernel_size=3, edges="cut")
    assert cells_of(axes.patches[1]) == 2 + 6 * 3 + 2
    assert axes.get_title() == "kernel_size=3, edges=cut"
    axes = plot_windows(8, kernel_size=3, is_causal=True)
    assert cells_of(axes.patches[1]) == 1 + 2 + 6 * 3


def test_drawing_on_given_axes(tmp_path):
    plt = pytest.importorskip("matplotlib.pyplot")
    figure, axes = plt.subplots(1, 2)
    assert plot_window((6,), (2,), kernel_size=3, ax=axes[0]) is axes[0]
    assert plot_windows(6, kernel_size=3, ax=axes[1]) is axes[1]
    figure.savefig(tmp_path / "windows.png")


def test_without_matplotlib_the_error_names_the_package_to_install():
    code = """
import sys
sys.modules["matplotlib"] = None
from natten_jax.plot import plot_window, window_mask
assert window_mask((4,), (1,), 3).sum() == 3
plot_window((4,), (1,), 3)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: pictures need Matplotlib: pip install matplotlib" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"query": (1,)}, ValueError, r"query must be coordinates inside of the layout \(5, 6\), got \(1,\)"),
        ({"query": (1, 6)}, ValueError, "query must be coordinates inside"),
        ({"query": (1, -1)}, ValueError, "query must be coordinates inside"),
        ({"query": (1, 2.0)}, TypeError, "query must be a sequence of ints"),
        ({"query": 1}, TypeError, "query must be a sequence of ints"),
        ({"kernel_size": 7}, ValueError, "exceeds the token layout"),
        ({"stride": 4}, ValueError, "stride .* exceeds kernel_size"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        plot_window(**{"layout": (5, 6), "query": (1, 2), "kernel_size": 3, **arguments})


def test_layouts_of_more_dimensions_have_masks_but_no_pictures():
    assert window_mask((3, 3, 3, 3), (0, 0, 0, 0), 2).sum() == 16
    with pytest.raises(ValueError, match="layout must have one to three dimensions to be drawn"):
        plot_window((3, 3, 3, 3), (0, 0, 0, 0), 2)
