"""Numbers that are not finite, or very low, in the operands that are added to logits, and in the scales of heads.

A number that hides its keys, or is as low as all others of its operand, leaves a problem whose results the oracle has.
NaN and infinity have to be seen in the results of every query that sees such a key, and nowhere outside of their batch
entries and heads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from tests.support import oracle

from .spoiled import different_numbers

NAMES = ("relative_bias", "key_bias", "sinks", "scale")
#: Numbers that hide keys: -inf, the lowest number of the operand's element type, and one just above half of that.
HIDING = ("-inf", "min", "0.51 min")
#: Numbers for a whole operand. They are so low that float32 logits lose their products and tie.
TIED = ("-1e9", "-1e30", "0.49 min")
BROKEN = ("nan", "inf")
EXTENTS = ("number", "row", "head", "entry", "all")


@dataclasses.dataclass(frozen=True)
class SpoiledBias:
    """Replacement of numbers in an operand that is added to logits, or in a scale.

    Attributes:
        name: Operand, from ``NAMES``.
        number: Replacement, from ``HIDING``, ``TIED`` or ``BROKEN``.
        extent: A number, a row of the last token dimension, a head, a batch entry, or the operand.
        batch: Batch entry, modulo their number.
        head: Head, modulo their number.
        place: Place among the tokens or offsets, modulo their number.
        is_narrow: Convert the operand to the element type of the query.
    """

    name: str
    number: str
    extent: str
    batch: int = 0
    head: int = 0
    place: int = 0
    is_narrow: bool = False

    @classmethod
    def draw(cls, rng: np.random.Generator, names: list[str]) -> SpoiledBias:
        """Draw a replacement in a named operand."""
        name = str(rng.choice(names))
        number = str(rng.choice((*BROKEN, "-inf") if name == "scale" else (*BROKEN, *HIDING, *TIED)))
        extent = "all" if number in TIED else str(rng.choice(EXTENTS))
        batch, head, place = (int(n) for n in rng.integers(2**16, size=3))
        return cls(name, number, extent, batch, head, place, bool(rng.random() < 0.4) and name != "scale")

    @property
    def is_broken(self) -> bool:
        """Return True if queries that see the numbers must have non-finite results."""
        return self.number in BROKEN or self.name == "scale"

    def apply(self, operands: oracle.Tensors, *, as_drawn: bool = True) -> oracle.Tensors:
        """Return the operands with the replacement, or with 0.5 instead of it."""
        original = getattr(operands, self.name)
        if original is None:
            return operands
        array = np.array(original)
        if self.is_narrow:
            array = array.astype(operands.query.dtype)
        array[self._index(array.shape, operands)] = self._number(array.dtype) if as_drawn else 0.5
        return operands._replace(**{self.name: array})

    def complaints(
        self,
        operands: oracle.Tensors,
        is_broken_row: np.ndarray,
        without: Any,
        spoiled: Any,
        *,
        is_reproducible: bool,
        has_columns: bool,
    ) -> list[str]:
        """List results that are finite but must not be, and results that differ but must not.

        Args:
            operands: The operands.
            is_broken_row: bool ``[batch, *queries, heads]``. Queries that see such a number.
            without: Results with an ordinary number: output and logsumexp, gradients.
            spoiled: Results with the number.
            is_reproducible: Query gradients are equal in every run.
            has_columns: Biases of keys are extra head dimensions, which query heads share.
        """
        found = []
        for name, result in (("out", spoiled[0][0]), ("lse", spoiled[0][1]), ("d_query", spoiled[1].query)):
            if result is None:
                continue
            rows = np.asarray(result).astype(np.float64)[is_broken_row]
            if np.isfinite(rows).any():
                count = int(np.isfinite(rows).sum())
                found.append(f"{self.number} in {self.name}: {count} of {rows.size} numbers of {name} are finite")
        reached = self._reached(operands)
        of_groups = _of_groups(reached, operands) if has_columns else reached
        names = ("out", "lse", *(f"d_{field}" for field in oracle.Tensors._fields))
        for name, *pair in zip(names, (*without[0], *without[1]), (*spoiled[0], *spoiled[1]), strict=True):
            if pair[1] is None:
                continue
            # Gradients of biases in columns are gradients of keys, which query heads share.
            is_of_groups = name == "d_key_bias" or self.name == "key_bias"
            safe = ~(of_groups if is_of_groups else reached)
            one, other = (_by_heads(name, np.asarray(array), safe, _has_heads(operands)) for array in pair)
            differ = different_numbers(name, one, other, is_reproducible)
            if differ.any():
                found.append(
                    f"{self.number} in {self.name} reaches {name} of other entries or heads: "
                    f"{int(differ.sum())} of {differ.size} numbers differ"
                )
        return found

    def _number(self, dtype: Any) -> Any:
        lowest = ml_dtypes.finfo(dtype).min
        factors = {"min": 1.0, "0.51 min": 0.51, "0.49 min": 0.49}
        with np.errstate(over="ignore"):
            if self.number in factors:
                return np.asarray(factors[self.number] * float(lowest), dtype)
            return np.asarray(float(self.number), np.float64).astype(dtype)

    def _index(self, shape: tuple[int, ...], operands: oracle.Tensors) -> tuple[Any, ...]:
        has_entries = self.name == "key_bias"
        has_heads = len(shape) > 0 and (not has_entries or _has_heads(operands))
        leading = [self.batch % shape[0]] if has_entries else []
        if self.extent == "all" or (self.extent == "entry" and not has_entries):
            return ()
        if self.extent == "entry":
            return tuple(leading)
        if has_heads:
            leading.append(self.head % shape[len(leading)])
        places = shape[len(leading) :]
        if self.extent == "head" or not places:
            return tuple(leading)
        tokens = np.unravel_index(self.place % int(np.prod(places)), places)
        return (*leading, *tokens[: -1 if self.extent == "row" else None])

    def _reached(self, operands: oracle.Tensors) -> np.ndarray:
        """Return the batch entries and query heads whose results may differ, bool ``[batch, heads]``."""
        batch, heads = operands.query.shape[0], operands.query.shape[-2]
        shape = np.shape(getattr(operands, self.name))
        index = self._index(shape, operands)
        reached = np.zeros((batch, heads), bool)
        if self.name != "key_bias":
            reached[:, index[0] if index else slice(None)] = True
            return reached
        reached[index[: 1 + _has_heads(operands)]] = True
        return reached


def _of_groups(reached: np.ndarray, operands: oracle.Tensors) -> np.ndarray:
    """Extend ``[batch, heads]`` to all query heads that share keys."""
    groups = reached.reshape(len(reached), operands.key.shape[-2], -1)
    return np.broadcast_to(groups.any(-1, keepdims=True), groups.shape).reshape(reached.shape)


def _has_heads(operands: oracle.Tensors) -> bool:
    """Return True if the bias of keys has a dimension of heads."""
    return operands.key_bias is not None and operands.key_bias.ndim == operands.key.ndim - 1


def _by_heads(name: str, array: np.ndarray, safe: np.ndarray, has_heads: bool) -> np.ndarray:
    """Return the numbers of a result that belong to batch entries and heads that are ``safe``, ``[batch, heads]``."""
    if name in ("d_relative_bias", "d_sinks", "d_scale"):
        return array[safe.all(0)] if array.ndim else array[:0] if safe.all() else np.zeros(0, array.dtype)
    if name == "d_key_bias":
        return array[safe] if has_heads else array[safe.all(1)]
    heads_last = array if name == "lse" else np.moveaxis(array, -2, -1)
    heads = heads_last.shape[-1]
    of_heads = safe.reshape(len(safe), heads, -1).all(-1)
    return np.moveaxis(heads_last, -1, 1)[of_heads]
