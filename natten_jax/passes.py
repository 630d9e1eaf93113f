"""The two passes of attention, and the tiles that a pass is cut into."""

from __future__ import annotations

from typing import Literal

Pass = Literal["forward", "backward"]
PASSES: tuple[Pass, ...] = ("forward", "backward")

#: Query tile and key/value tile: extents in tokens, one per token dimension.
TilePair = tuple[tuple[int, ...], tuple[int, ...]]
