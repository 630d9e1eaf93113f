"""The two passes of attention, and the tiles that kernels cut its tokens into."""

from __future__ import annotations

from typing import Literal

Pass = Literal["forward", "backward"]

#: The forward pass is the first.
PASSES: tuple[Pass, ...] = ("forward", "backward")

#: Tokens of a query and of a key/value tile, per token dimension.
TilePair = tuple[tuple[int, ...], tuple[int, ...]]


def outer_and_inner(pair: TilePair, pass_: Pass) -> TilePair:
    """A query and a key/value tile, in the order in which a kernel's loops go over them in a pass.

    A thread block owns an *outer* tile, of queries in the forward pass and of keys and values in the backward pass, and
    goes over *inner* tiles of the other side.
    """
    return pair if pass_ == "forward" else pair[::-1]
