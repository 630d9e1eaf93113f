"""Spoil an operand with non-finite or very low numbers, and check which results they change.

- NaN and infinity in one batch entry and head may change only the results that depend on them. A device loads tiles of
  several batch entries into the same memory, so a wrong kernel may change other results.
- NaN and infinity in a bias, a sink or a scale must also make the results of all queries that they affect non-finite.
- The oracle checks the results if a bias masks out its keys, or if all numbers of a bias are equally low.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tests.support import oracle

Inputs = tuple[oracle.Tensors, tuple[np.ndarray, np.ndarray]]

#: Names of token arrays: operands, and cotangents of output and logsumexp. The arrays in QUERY_ARRAYS have query heads,
#: the others have key/value heads.
NAMES = (*oracle.Tensors._fields[:5], "d_out", "d_lse")
QUERY_ARRAYS = ("query", "d_out", "d_lse")
#: Operands that are added to logits, and the scale of the logits.
ADDED = ("relative_bias", "key_bias", "sinks", "scale")
NUMBERS = ("nan", "inf", "-inf")
BROKEN = ("nan", "inf")
#: Biases that mask out keys: -inf, the lowest number of the bias's element type, and 0.51 times this number.
HIDING = ("-inf", "min", "0.51 min")
#: Numbers that replace all elements of a bias or of the sinks. They are so low that query/key products do not change
#: the float32 sums: all logits are equal.
TIED = ("-1e9", "-1e30", "0.49 min")
EXTENTS = ("number", "row", "head")
EXTENTS_OF_ADDED = (*EXTENTS, "entry", "all")
#: Maximum difference between two runs for a sum that is added up in no fixed order, relative to the largest sum.
TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True)
class Spoiled:
    """Elements of an array, and the number that replaces them.

    Attributes:
        name: Name of the array, from ``NAMES`` or ``ADDED``.
        number: The number as text. From ``BROKEN``, ``HIDING`` or ``TIED`` in biases and sinks, from ``NUMBERS`` in
            other arrays.
        extent: The elements that are replaced: one ``"number"``, a ``"row"`` of the last dimension (in token arrays, a
            token), a ``"head"`` of a batch entry, a batch ``"entry"``, or ``"all"``.
        batch: Index of the batch entry, modulo the batch size.
        head: Index of the head, modulo the number of heads.
        place: Flat index into the other dimensions, modulo their number of elements.
        is_narrow: True to convert the operand to the element type of the query.
    """

    name: str
    number: str
    extent: str
    batch: int = 0
    head: int = 0
    place: int = 0
    is_narrow: bool = False

    @classmethod
    def draw(cls, rng: np.random.Generator, names: Sequence[str]) -> Spoiled:
        """Draw a replacement of elements in one of the named arrays."""
        name = str(rng.choice(names))
        is_added = name in ADDED
        numbers = (*BROKEN, *HIDING, *TIED) if is_added and name != "scale" else NUMBERS
        number = str(rng.choice(numbers))
        extent = "all" if number in TIED else str(rng.choice(EXTENTS_OF_ADDED if is_added else EXTENTS))
        batch, head, place = (int(n) for n in rng.integers(2**16, size=3))
        is_narrow = is_added and name != "scale" and bool(rng.random() < 0.4)
        return cls(name, number, extent, batch, head, place, is_narrow)

    @property
    def is_added(self) -> bool:
        """True if the array is added to logits, or is their scale."""
        return self.name in ADDED

    @property
    def is_broken(self) -> bool:
        """True if results may be non-finite. They are then compared with a second run, not with the oracle."""
        return not self.is_added or self.number in BROKEN or self.name == "scale"

    def apply(self, inputs: Inputs, *, as_drawn: bool = True) -> Inputs:
        """Return the inputs with the elements replaced by the spoiled number.

        If ``as_drawn`` is false, replace the elements by an ordinary number.
        """
        operands, (d_out, d_lse) = inputs
        named: dict[str, Any] = {**operands._asdict(), "d_out": d_out, "d_lse": d_lse}
        if named[self.name] is None:
            return inputs
        array = np.array(named[self.name])
        array = named[self.name] = array.astype(operands.query.dtype) if self.is_narrow else array
        heads_first = array if self.is_added else np.moveaxis(array, -1 if self.name == "d_lse" else -2, 1)
        ordinary = 0.5 if self.is_added else 0
        heads_first[self._index(heads_first.shape, operands)] = self._number(array.dtype) if as_drawn else ordinary
        cotangents = named.pop("d_out"), named.pop("d_lse")
        return oracle.Tensors(**named), cotangents

    def find_errors(
        self,
        operands: oracle.Tensors,
        is_broken_row: np.ndarray,
        without: Any,
        spoiled: Any,
        *,
        is_reproducible: bool,
        has_columns: bool = False,
    ) -> list[str]:
        """List two kinds of errors.

        - Finite results of queries whose results must not be finite.
        - Results that the spoiled number must not change, but that differ between the two runs.

        Args:
            operands: The operands.
            is_broken_row: bool ``[batch, *queries, heads]``. True for queries whose results must not be finite.
            without: Results of a run with ordinary numbers: a pair of output and logsumexp, and the gradients.
            spoiled: Results of the run with the spoiled number, in the same form.
            is_reproducible: True if query gradients are bitwise equal in every run.
            has_columns: True if key biases are columns of keys (additional head dimensions). Several query heads may
                share a key.
        """
        found = []
        for name, result in (("out", spoiled[0][0]), ("lse", spoiled[0][1]), ("d_query", spoiled[1].query)):
            rows = np.zeros(0) if result is None else np.asarray(result).astype(np.float64)[is_broken_row]
            if count := int(np.isfinite(rows).sum()):
                found.append(f"{self.number} in {self.name}: {count} of {rows.size} numbers of {name} are finite")
        reached = self._reached(operands)
        spread = _spread_over_groups(reached, operands) if has_columns else reached
        names = ("out", "lse", *(f"d_{field}" for field in oracle.Tensors._fields))
        for name, *pair in zip(names, (*without[0], *without[1]), (*spoiled[0], *spoiled[1]), strict=True):
            if pair[1] is None or (name == "d_scale" and not self.is_added):  # ``d_scale`` is a sum over the batch
                continue
            # The gradient of a bias in columns is a part of the gradient of a key, which several query heads may share.
            is_of_groups = name == "d_key_bias" or self.name == "key_bias"
            safe = ~(spread if is_of_groups else reached)
            if self.name in ("d_out", "d_lse") and name in ("out", "lse"):
                safe = np.ones_like(safe)
            one, other = (_by_heads(name, np.asarray(array), safe, _has_heads(operands)) for array in pair)
            differ = _different_numbers(name, one, other, is_reproducible)
            if differ.any():
                found.append(
                    f"{self.number} in {self.name} reaches {name} of other entries or heads: "
                    f"{int(differ.sum())} of {differ.size} numbers differ"
                )
        return found

    def _number(self, dtype: Any) -> Any:
        factor, _, is_of_lowest = self.number.partition(" ")
        if self.number.endswith("min"):
            lowest = float(ml_dtypes.finfo(dtype).min)
            return np.asarray((float(factor) if is_of_lowest else 1.0) * lowest, dtype)
        with np.errstate(over="ignore"):
            return np.asarray(float(self.number), np.float64).astype(dtype)

    def _index(self, shape: tuple[int, ...], operands: oracle.Tensors) -> tuple[Any, ...]:
        has_entries = not self.is_added or self.name == "key_bias"
        has_heads = len(shape) > 0 and (self.name != "key_bias" or _has_heads(operands))
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
        """Mark the batch entries and query heads whose results the spoiled number may change.

        The result is bool ``[batch, heads]``.
        """
        batch, heads = operands.query.shape[0], operands.query.shape[-2]
        reached = np.zeros((batch, heads), bool)
        if not self.is_added:
            array_heads = heads if self.name in QUERY_ARRAYS else operands.key.shape[-2]
            by_head = reached.reshape(batch, array_heads, -1)
            by_head[self.batch % batch, self.head % array_heads] = True
        elif self.name == "key_bias":
            assert operands.key_bias is not None
            reached[self._index(operands.key_bias.shape, operands)[: 1 + _has_heads(operands)]] = True
        else:
            index = self._index(np.shape(getattr(operands, self.name)), operands)
            reached[:, index[0] if index else slice(None)] = True
        return reached


def _spread_over_groups(reached: np.ndarray, operands: oracle.Tensors) -> np.ndarray:
    """Mark all query heads of each group that contains a head marked in ``reached``.

    The heads of a group share a key/value head.
    """
    groups = reached.reshape(len(reached), operands.key.shape[-2], -1)
    return np.broadcast_to(groups.any(-1, keepdims=True), groups.shape).reshape(reached.shape)


def _has_heads(operands: oracle.Tensors) -> bool:
    """Return True if the key bias has a head dimension."""
    return operands.key_bias is not None and operands.key_bias.ndim == operands.key.ndim - 1


def _by_heads(name: str, array: np.ndarray, safe: np.ndarray, has_heads: bool) -> np.ndarray:
    """Return the elements of a result whose batch entry and head are marked in ``safe``, bool ``[batch, heads]``."""
    if name in ("d_relative_bias", "d_sinks", "d_scale"):
        return array[safe.all(0)] if array.ndim else np.zeros(0, array.dtype)
    if name == "d_key_bias":
        return array[safe] if has_heads else array[safe.all(1)]
    heads_first = np.moveaxis(array, -1 if name == "lse" else -2, 1)
    return heads_first[safe.reshape(len(safe), heads_first.shape[1], -1).all(-1)]


def _different_numbers(name: str, one: np.ndarray, other: np.ndarray, is_reproducible: bool) -> np.ndarray:
    """Mark the elements that differ between two results.

    Elements must be bitwise equal. Only sums that are added up in no fixed order may differ, by ``TOLERANCE``.
    """
    if name in ("d_query", "d_scale") and not is_reproducible:
        one, other = one.astype(np.float64), other.astype(np.float64)
        return np.asarray(~(np.abs(one - other) <= TOLERANCE * np.abs(one).max(initial=0)))
    unsigned = f"u{one.dtype.itemsize}"
    return np.asarray(np.ascontiguousarray(one).view(unsigned) != np.ascontiguousarray(other).view(unsigned))
