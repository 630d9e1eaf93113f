"""Inputs with numbers that are not finite, and what must be the same with them and without.

Numbers of one batch entry and head are replaced. What does not depend on these has to be the same to the last bit as
with zeros in their place: the device keeps tiles of one entry where it loads those of the next one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tests.support import oracle

Inputs = tuple[oracle.Tensors, tuple[np.ndarray, np.ndarray]]

#: What may be replaced: operands of tokens, and cotangents of output and logsumexp.
NAMES = (*oracle.Tensors._fields[:5], "d_out", "d_lse")
NUMBERS = ("nan", "inf", "-inf")
EXTENTS = ("number", "token", "entry")
#: Arrays that one head of queries has; the others belong to a head of keys.
OF_QUERIES = ("query", "d_out", "d_lse")
#: What sums that are added up in another order in each run are compared by, of the largest of them.
TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True)
class Spoiled:
    """Which numbers of a problem's inputs are not finite.

    Attributes:
        name: One of ``NAMES``.
        number: What they are, one of ``NUMBERS``.
        extent: How many: one number, a token's, or all of the entry's.
        batch: Batch entry, of which there may be fewer: they are counted around.
        head: Head, likewise.
        place: Token and element, likewise.
    """

    name: str
    number: str
    extent: str
    batch: int
    head: int
    place: tuple[int, int]

    @classmethod
    def draw(cls, rng: np.random.Generator, has_additional: bool) -> Spoiled:
        """Any."""
        names = [name for name in NAMES if has_additional or not name.startswith("additional")]
        name, number, extent = (str(rng.choice(choices)) for choices in (names, NUMBERS, EXTENTS))
        batch, head, token, element = (int(n) for n in rng.integers(2**16, size=4))
        return cls(name, number, extent, batch, head, (token, element))

    def apply(self, inputs: Inputs, number: float) -> Inputs:
        """The inputs with these numbers replaced by another one."""
        operands, (d_out, d_lse) = inputs
        named = {**operands._asdict(), "d_out": d_out, "d_lse": d_lse}
        original = named.get(self.name)
        if original is None:
            return inputs
        array = np.array(original)
        tokens = _by_tokens(array, self.name == "d_lse")[self.batch % len(array)]
        tokens = tokens[:, self.head % tokens.shape[1]]
        token, element = (n % extent for n, extent in zip(self.place, tokens.shape, strict=True))
        tokens[{"number": (token, element), "token": (token,), "entry": ()}[self.extent]] = number
        named[self.name] = array
        d_out, d_lse = named.pop("d_out"), named.pop("d_lse")
        return oracle.Tensors(**named), (d_out, d_lse)

    def leaks(self, without: Any, spoiled: Any, is_reproducible: bool) -> list[str]:
        """What differs that does not depend on the numbers.

        Args:
            without: Results with zeros in place of the numbers: output and logsumexp, gradients.
            spoiled: Results with the numbers.
            is_reproducible: Whether query gradients are the same in every run.
        """
        found = []
        for name, of_zeros, result in zip(
            ("out", "lse", *(f"d_{field}" for field in oracle.Tensors._fields)),
            (*without[0], *without[1]),
            (*spoiled[0], *spoiled[1]),
            strict=True,
        ):
            if result is None or name == "d_scale":  # a sum over all entries
                continue
            pair = [_by_tokens(np.asarray(array), name == "lse") for array in (of_zeros, result)]
            safe = self._safe(name, pair[0].shape[0], pair[0].shape[2], without)
            own, other = (array.transpose(0, 2, 1, 3)[safe] for array in pair)
            differ = different_numbers(name, own, other, is_reproducible)
            if differ.any():
                broken = int((~np.isfinite(other.astype(np.float64))).sum())
                found.append(
                    f"{self.number} in {self.name} reaches {name} of other entries: "
                    f"{int(differ.sum())} of {differ.size} numbers differ, {broken} are not finite"
                )
        return found

    def _safe(self, result: str, batch: int, heads: int, results: Any) -> np.ndarray:
        """Which entries of a result, ``[batch, heads]``, do not depend on the numbers."""
        safe = np.ones((batch, heads), bool)
        if self.name in ("d_out", "d_lse") and result in ("out", "lse"):
            return safe
        query_heads, kv_heads = (results[1][i].shape[-2] for i in (0, 1))
        own = self.head % (query_heads if self.name in OF_QUERIES else kv_heads)
        group = query_heads // kv_heads
        is_query_result = result in ("out", "lse", "d_query")
        if self.name in OF_QUERIES:
            reached = slice(own, own + 1) if is_query_result else slice(own // group, own // group + 1)
        else:
            reached = slice(own * group, (own + 1) * group) if is_query_result else slice(own, own + 1)
        safe[self.batch % batch, reached] = False
        return safe


def different_numbers(name: str, one: np.ndarray, other: np.ndarray, is_reproducible: bool) -> np.ndarray:
    """Return where two results differ: in any bit, or, of sums without a fixed order, by more than ``TOLERANCE``."""
    if name in ("d_query", "d_scale") and not is_reproducible:
        one, other = one.astype(np.float64), other.astype(np.float64)
        return np.asarray(~(np.abs(one - other) <= TOLERANCE * np.abs(one).max(initial=0)))
    return np.asarray(_bits(one) != _bits(other))


def _by_tokens(array: np.ndarray, is_statistic: bool) -> np.ndarray:
    """A view ``[batch, tokens, heads, width]``."""
    array = array[..., None] if is_statistic else array
    return array.reshape(array.shape[0], -1, *array.shape[-2:])


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view({2: np.uint16, 4: np.uint32, 8: np.uint64}[array.dtype.itemsize])
