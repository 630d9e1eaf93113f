"""Draws the pictures of the kernels in docs/architecture.md: ``make pictures``."""

from __future__ import annotations

from typing import Any

from matplotlib.patches import Rectangle
from pictures import Draw, picture

from natten_jax.native.module import limits
from natten_jax.problem import problem_of
from natten_jax.windows import window_bounds

LOAD, MATRIX, SOFTMAX, OTHER, LINE = "#c9d4e0", "#1f5f99", "#f2b56b", "#7fb2d9", "#12324f"
KIB = 1024


def block(ax: Any, start: float, row: float, length: float, text: str, color: str, height: float = 0.8) -> None:
    """A box with a text in it."""
    ax.add_patch(Rectangle((start, row - height / 2), length, height, facecolor=color, edgecolor="white", linewidth=1))
    ink = "white" if color == MATRIX else LINE
    ax.text(start + length / 2, row, text, ha="center", va="center", fontsize=9, color=ink)


def bare(ax: Any, title: str) -> None:
    """No frame and no ticks."""
    ax.set(xticks=[], yticks=[], title=title)
    ax.spines[:].set_visible(False)


def timeline(ax: Any) -> None:
    """Two warpgroups take turns: one has the matrix units while the other one takes exponentials."""
    rows = {"loads (copy engine)": 3, "warpgroup 1": 2, "warpgroup 2": 1, "matrix units": 0}
    tiles, half = 5, 2.0
    for tile in range(tiles + 1):
        at = 2 * half * tile - 1.7
        block(ax, at, 3, half - 0.2, f"K{tile}", LOAD)
        if tile < tiles:
            block(ax, at + half - 0.1, 3, half - 0.2, f"V{tile}", LOAD)
    for group, (row, delay) in enumerate(((2, 0.0), (1, half)), start=1):
        for tile in range(tiles):
            at = 2 * half * tile + delay
            products = "S0" if tile == 0 else f"S{tile}, O{tile - 1}"
            block(ax, at, row, half, products, MATRIX)
            block(ax, at, 0, half, f"{group}: {products}", MATRIX)
            block(ax, at + half, row, half, f"softmax {tile}", SOFTMAX)
    ax.set(xlim=(-2, 2 * half * tiles + half + 0.1), ylim=(-0.6, 3.6))
    ax.set(xticks=[], yticks=list(rows.values()), yticklabels=list(rows), xlabel="time (not to scale)")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def shared_memory(ax: Any) -> None:
    """What the forms of the backward pass keep in shared memory, as BackwardTraits::SharedStorage lays it out."""
    hopper = limits("sm90")
    forms, available = hopper["backward"], hopper["shared_memory"]
    for row, form in enumerate(forms):
        head_dim, keys, queries = form["head_dim"], form["kv_tile_tokens"], form["q_tile_tokens"]
        stages = 1 if head_dim == 256 else 2
        splits_keys = keys == 128
        parts = [
            ("K", 2 * keys * head_dim, OTHER),
            ("V", 2 * keys * head_dim, OTHER),
            *((f"Q{i}" if stages > 1 else "Q", 2 * queries * head_dim, LOAD) for i in range(stages)),
            *((f"dO{i}" if stages > 1 else "dO", 2 * queries * head_dim, LOAD) for i in range(stages)),
            ("P", 0 if splits_keys else 2 * keys * queries, SOFTMAX),
            ("dS", (2 if splits_keys else 1) * 2 * keys * queries, SOFTMAX),
            ("dQ, float32", 4 * queries * head_dim, MATRIX),
        ]
        at = 0
        for text, size, color in parts:
            if size:
                label = f"{text}\n{size // KIB}" if size >= 8 * KIB else ""
                block(ax, at, -row, size, label, color, 0.62)
                if text == "dS":
                    ax.plot([at, at + 4 * keys * head_dim], [-row - 0.38] * 2, color=LINE, linewidth=2)
                    ax.text(at, -row - 0.42, "dK and dV, at the end", fontsize=8, va="top", color=LINE)
                at += size
        ax.text(at + 2 * KIB, -row, f"{at // KIB} KiB", va="center", fontsize=9, color=LINE)
    ax.axvline(available, color=LINE, linestyle=":", linewidth=1)
    ax.text(available - KIB, 0.55, f"{available // KIB} KiB", ha="right", fontsize=8, color=LINE)
    ax.set(xlim=(0, available + 22 * KIB), ylim=(-len(forms) + 0.4, 0.75), xticks=[])
    ax.set(yticks=[-row for row in range(len(forms))], yticklabels=[f"heads to {form['head_dim']}" for form in forms])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def grid(ax: Any, rows: int, columns: int) -> None:
    """Tokens of an image."""
    ax.hlines(range(rows + 1), 0, columns, color="#d7dde4", linewidth=0.6)
    ax.vlines(range(columns + 1), 0, rows, color="#d7dde4", linewidth=0.6)
    ax.set(xlim=(-0.2, columns + 0.2), ylim=(rows + 0.2, -0.2), aspect="equal")


def area(ax: Any, rows: tuple[int, int], columns: tuple[int, int], color: str, **style: Any) -> None:
    """Tokens of a box."""
    corner = columns[0], rows[0]
    ax.add_patch(Rectangle(corner, columns[1] - columns[0], rows[1] - rows[0], facecolor=color, **style))


def small_windows(step: int) -> Draw:
    """From the tile of a warp to the groups of tokens that it multiplies with."""
    extent, kernel_size, tile, region = 24, 7, (2, 8), (2, 1)
    group = limits("small")["column_tokens"]
    window = problem_of((extent, extent), kernel_size).axes[-1].window
    first = 8, 8

    def seen(first: int, tokens: int) -> tuple[int, int]:
        bounds = (window_bounds(window, index, extent) for index in (first, first + tokens - 1))
        (begin, _), (_, end) = bounds
        return int(begin), int(end)

    own = tuple((at, at + size) for at, size in zip(first, tile, strict=True))
    owns = tuple((at, at + size * count) for at, size, count in zip(first, tile, region, strict=True))
    sees = tuple(seen(at, end - at) for at, end in own)
    holds = tuple(seen(at, end - at) for at, end in owns)
    # Groups lie side by side from the first token that the box holds on.
    groups = tuple(range(holds[1][0], holds[1][1], group))
    titles = (
        "a tile: 16 queries of a warp",
        "a box: keys that a region of tiles sees",
        "its groups of 8 keys: 2 are a pair",
    )

    def draw(ax: Any) -> None:
        bare(ax, titles[step])
        grid(ax, extent, extent)
        if step > 0:
            width = (groups[0], groups[-1] + group)
            area(ax, holds[0], width if step == 2 else holds[1], LOAD)
        if step == 2:
            for row in range(sees[0][0], sees[0][1]):
                for number, at in enumerate(groups):
                    shade = OTHER if ((row - sees[0][0]) // 2 + number) % 2 == 0 else SOFTMAX
                    area(ax, (row, row + 1), (at, at + group), shade, edgecolor="white", linewidth=1)
        if step == 0:
            area(ax, sees[0], sees[1], LOAD)
        if step < 2:
            for number in range(region[0] if step == 1 else 1):
                shift = number * tile[0]
                area(ax, (own[0][0] + shift, own[0][1] + shift), own[1], MATRIX, edgecolor="white", linewidth=1.2)
        else:
            area(ax, own[0], own[1], "none", edgecolor=LINE, linewidth=2)

    return draw


def main() -> None:
    """Draw all pictures."""
    picture("kernel_forward", 13, 2.9, timeline)
    picture("kernel_backward", 13, 3.4, shared_memory)
    picture("kernel_small_windows", 13, 4.4, *map(small_windows, range(3)))


if __name__ == "__main__":
    main()
