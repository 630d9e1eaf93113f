"""Draw the pictures of docs/architecture.md and of the kernel notes: ``make pictures``."""

from __future__ import annotations

from typing import Any

from lib.charts import BLUE, FAINT, INK, LIGHT_BLUE
from matplotlib.patches import Rectangle
from pictures import Draw, picture

from natten_jax.native.module import limits
from natten_jax.problem import problem_of
from natten_jax.windows import window_bounds

LOAD, MATRIX, SOFTMAX, OTHER = "#c9d4e0", BLUE, "#f2b56b", LIGHT_BLUE
ON_COLORS = "#12324f"  # text color on boxes, in every theme
KIB = 1024


def block(
    ax: Any, start: float, row: float, length: float, text: str, color: str, height: float = 0.8, **font: Any
) -> None:
    """Draw a box with a text."""
    ax.add_patch(Rectangle((start, row - height / 2), length, height, facecolor=color, edgecolor="none"))
    ink = "#fdfdfd" if color == MATRIX else ON_COLORS
    ax.text(start + length / 2, row, text, ha="center", va="center", color=ink, **font)


def bare(ax: Any, title: str) -> None:
    """Remove frame and ticks."""
    ax.set(xticks=[], yticks=[], title=title)
    ax.spines[:].set_visible(False)


def timeline(ax: Any) -> None:
    """Draw a timeline of two warpgroups: one uses the tensor cores while the other computes exponentials."""
    rows = {"loads": 3, "warpgroup 1": 2, "warpgroup 2": 1, "matrix units": 0}
    tiles, half, gap = 3, 2.0, 0.12
    for tile in range(tiles + 1):
        at = 2 * half * tile - 1.7
        block(ax, at, 3, half - gap, f"K{tile}", LOAD)
        if tile < tiles:
            block(ax, at + half, 3, half - gap, f"V{tile}", LOAD)
    for group, (row, delay) in enumerate(((2, 0.0), (1, half)), start=1):
        for tile in range(tiles):
            at = 2 * half * tile + delay
            products = "S0" if tile == 0 else f"S{tile}\nO{tile - 1}"
            block(ax, at, row, half - gap, products, MATRIX)
            block(ax, at, 0, half - gap, f"of {group}", MATRIX)
            block(ax, at + half, row, half - gap, f"soft-\nmax {tile}", SOFTMAX)
    ax.set(xlim=(-2, 2 * half * tiles + half + 0.1), ylim=(-0.6, 3.6))
    ax.set(xticks=[], yticks=list(rows.values()), yticklabels=list(rows), xlabel="time (not to scale)")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def shared_memory(ax: Any) -> None:
    """Draw the shared memory of each backward kernel, laid out like BackwardTraits::SharedStorage."""
    hopper = limits("sm90")
    forms, available = hopper["backward"], hopper["shared_memory"]
    for row, form in enumerate(forms):
        head_dim, keys, queries = form["head_dim"], form["kv_tile_tokens"], form["q_tile_tokens"]
        stages = 1 if head_dim == 256 else 2
        splits_keys = keys == 128
        parts = [
            ("K", 2 * keys * head_dim, OTHER),
            ("V", 2 * keys * head_dim, OTHER),
            ("Q", 2 * stages * queries * head_dim, LOAD),
            ("dO", 2 * stages * queries * head_dim, LOAD),
            ("P", 0 if splits_keys else 2 * keys * queries, SOFTMAX),
            ("dS", (2 if splits_keys else 1) * 2 * keys * queries, SOFTMAX),
            ("dQ", 4 * queries * head_dim, MATRIX),
        ]
        at = 0
        for text, size, color in parts:
            if size:
                count = f"{stages}x" if color == LOAD and stages > 1 else ""
                number = f"\n{count}{size // (stages if count else 1) // KIB}"
                label = text + (number if size >= (24 if count else 16) * KIB else "") if size >= 8 * KIB else ""
                block(ax, at + KIB / 2, -row, size - KIB, label, color, 0.62)
                if text == "dS":
                    ax.plot([at, at + 4 * keys * head_dim], [-row - 0.38] * 2, color=INK, linewidth=2)
                    ax.text(at, -row - 0.42, "later dK, dV", va="top", color=INK)
                at += size
        ax.text(available + 3 * KIB, -row, f"{at // KIB} KiB", va="center", color=INK)
    ax.axvline(available, color=INK, linestyle=":", linewidth=1)
    ax.text(available - 3 * KIB, 0.55, f"a block has {available // KIB} KiB", ha="right", color=INK)
    ax.set(xlim=(0, available + 45 * KIB), ylim=(-len(forms) + 0.4, 0.75), xticks=[])
    ax.set(yticks=[-row for row in range(len(forms))], yticklabels=[f"heads to {form['head_dim']}" for form in forms])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def grid(ax: Any, rows: int, columns: int) -> None:
    """Draw the tokens of an image as a grid."""
    ax.hlines(range(rows + 1), 0, columns, color=FAINT, linewidth=0.6)
    ax.vlines(range(columns + 1), 0, rows, color=FAINT, linewidth=0.6)
    ax.set(xlim=(-0.2, columns + 0.2), ylim=(rows + 0.2, -0.2), aspect="equal")


def area(ax: Any, rows: tuple[int, int], columns: tuple[int, int], color: str, **style: Any) -> None:
    """Fill the tokens of a box."""
    corner = columns[0], rows[0]
    ax.add_patch(Rectangle(corner, columns[1] - columns[0], rows[1] - rows[0], facecolor=color, **style))


def small_windows(step: int) -> Draw:
    """Draw one of three panels: a warp's query tile, the box of keys that two tiles see, or the key groups in a box."""
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
    # Groups of keys are adjacent. The first group starts at the first column of the box.
    groups = tuple(range(holds[1][0], holds[1][1], group))
    titles = (
        "a tile:\n16 queries of a warp",
        "a box: keys that\ntwo such tiles see",
        "its groups of 8 keys,\ntwo of them a pair",
    )

    def draw(ax: Any) -> None:
        bare(ax, titles[step])
        grid(ax, extent, extent)
        ax.set(xlim=(2.8, 21.2), ylim=(18.2, 2.8))  # show only the part of the image around the box
        if step > 0:
            width = (groups[0], groups[-1] + group)
            area(ax, holds[0], width if step == 2 else holds[1], LOAD)
        if step == 2:
            for row in range(sees[0][0], sees[0][1]):
                for number, at in enumerate(groups):
                    shade = OTHER if ((row - sees[0][0]) // 2 + number) % 2 == 0 else SOFTMAX
                    area(ax, (row, row + 1), (at, at + group), shade, edgecolor="none", linewidth=1)
        if step == 0:
            area(ax, sees[0], sees[1], LOAD)
        if step < 2:
            for number in range(region[0] if step == 1 else 1):
                shift = number * tile[0]
                area(ax, (own[0][0] + shift, own[0][1] + shift), own[1], MATRIX, edgecolor="none", linewidth=1.2)
        else:
            area(ax, own[0], own[1], "none", edgecolor=INK, linewidth=2)

    return draw


def ring(step: int) -> Draw:
    """Draw four warps that move down a layout together, at one of two consecutive steps.

    Each warp has a tile of queries. The keys that the warps see are loaded in slabs, which are groups of rows.
    """
    layout, kernel_size, side, beside, block, slots = (36, 44), 13, 4, 4, 4, 7
    window = problem_of(layout, kernel_size).axes[0].window
    first = 12, 16  # first query of the first warp
    titles = ("a strip of 4 warps, and\nwhat one of them sees", "a step later: one slab\nis dropped, one is added")

    def seen(first: int, tokens: int, extent: int) -> tuple[int, int]:
        begin, _ = window_bounds(window, first, extent)
        _, end = window_bounds(window, first + tokens - 1, extent)
        return int(begin), int(end)

    def draw(ax: Any) -> None:
        bare(ax, titles[step])
        grid(ax, *layout)
        at = first[0] + step * side
        rows, columns = seen(at, side, layout[0]), seen(first[1], beside * side, layout[1])
        sees = seen(first[1] + side, side, layout[1])
        for slab in range(slots):
            begin = rows[0] + slab * block
            color = LOAD if begin < rows[1] else FAINT  # FAINT slabs are prefetched for later steps
            area(ax, (begin, begin + block), columns, color, edgecolor="white", linewidth=1.5)
        for begin in range(rows[0], rows[1], block):
            for number, start in enumerate(range(*sees, block)):
                shade = OTHER if (begin // block + number) % 2 == 0 else SOFTMAX
                area(ax, (begin, begin + block), (start, start + block), shade, edgecolor="white", linewidth=1)
        for warp in range(beside):
            warp_start = first[1] + warp * side
            area(ax, (at, at + side), (warp_start, warp_start + side), MATRIX, edgecolor="white", linewidth=1.2)

    return draw


ROAD = (
    ("while JAX traces", ("na2d", "run_operator", "attend", "_attend_on_device", "bind")),
    ("while JAX lowers", ("_run_local", "DeviceCall.plan", "_compute_forward", "call_forward", "call")),
    ("when the program runs", ("FFI handler", "launcher", "kernel")),
)
ROLES = (
    ("public function", "canonicalization", "one sub-call", "custom_vjp", "primitive"),
    ("one device", "plan", "operands", "backend", "ffi_call"),
    ("checks again", "grid, tensor maps", "arithmetic"),
)


def road(ax: Any) -> None:
    """Draw the functions that a call runs, with a row for each stage: tracing, lowering and execution."""
    width, step = 3.4, 4.0
    ax.set(xlim=(-width / 2 - 0.2, 4 * step + width / 2 + 0.2), ylim=(-0.7, 5.1))
    bare(ax, "")
    for row, ((stage, functions), roles) in enumerate(zip(ROAD, ROLES, strict=True)):
        y = 4 - 2 * row
        ax.text(-width / 2, y + 0.8, stage, ha="left", va="center", color=INK, fontsize="small")
        for column, (function, role) in enumerate(zip(functions, roles, strict=True)):
            color = LOAD if row < 2 else LIGHT_BLUE
            block(ax, column * step - width / 2, y, width, f"{function}\n{role}", color, 1.0, fontsize="x-small")
            if column + 1 < len(functions):
                arrow = {"arrowstyle": "->", "color": INK, "linewidth": 1}
                ax.annotate("", ((column + 1) * step - width / 2, y), (column * step + width / 2, y), arrowprops=arrow)


def main() -> None:
    """Draw all pictures."""
    picture("road", 2.6, road)
    picture("kernel_forward", 3.0, timeline)
    picture("kernel_backward", 3.6, shared_memory)
    picture("kernel_small_windows", 2.2, *map(small_windows, range(3)))
    picture("kernel_ring", 2.6, *map(ring, range(2)))


if __name__ == "__main__":
    main()
