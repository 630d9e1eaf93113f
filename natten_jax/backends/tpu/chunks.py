"""How the keys of a box are cut into chunks: what a program multiplies its queries with at a time.

Boxes are what copies bring, and large: a program takes hundreds of bundles beside its products, a chunk takes few. The
keys of a box are gone over in their order, whatever its shape: as many at a time as keep all matrix units busy.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from natten_jax.problem import Shape

#: Coordinate of a key that no query sees.
NOWHERE = -(2**30)
#: Keys of a chunk, for tiles of few and of many rows. Four matrix units take 128 each.
OF_FEW, OF_MANY, _FEW = 1024, 512, 128
#: Most logits of a chunk, and of the chunks of several heads or packs that go together; most of these.
MOST_LOGITS = 512 * 512
_MOST_OF_ALL, _MOST_TOGETHER = 2 * MOST_LOGITS, 16


def together(leading: int, logits: int) -> int:
    """How many heads or packs of so many go together, where each has one chunk of so many logits."""
    most = max(1, min(_MOST_TOGETHER, _MOST_OF_ALL // logits))
    return math.gcd(leading, 1 << (most.bit_length() - 1))


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of a box, which rows of queries go over.

    Attributes:
        box: Keys of the box along each dimension.
        keys: Keys of a chunk. The last one has some of the one before, where they are not a divisor of the box's.
    """

    box: Shape
    keys: int

    @classmethod
    def of(cls, box: Shape, rows: int, alignment: int) -> Chunks:
        """Those of a box that so many rows go over; they begin at multiples of an alignment."""
        most = min(OF_FEW if rows <= _FEW else OF_MANY, MOST_LOGITS // rows // alignment * alignment)
        return cls(box, min(math.prod(box), max(most, alignment)))

    @property
    def count(self) -> int:
        """How many there are."""
        return -(-math.prod(self.box) // self.keys)

    @property
    def cut(self) -> int:
        """The first dimension along which the box has more than one key."""
        return next((dim for dim, extent in enumerate(self.box) if extent > 1), len(self.box) - 1)

    @property
    def stride(self) -> int:
        """Keys of the box for each one along that dimension."""
        return math.prod(self.box[self.cut + 1 :])

    def coordinates(self) -> np.ndarray:
        """Those of the keys of each chunk in the box, ``[chunks, 3, keys]``, ``NOWHERE`` if an earlier one has them."""
        starts = np.arange(self.count)[:, None] * self.keys
        index = np.minimum(starts, math.prod(self.box) - self.keys) + np.arange(self.keys)
        found = np.stack(np.unravel_index(index, self.box), axis=1)
        return np.where((index >= starts)[:, None], found, NOWHERE).astype(np.int32)
