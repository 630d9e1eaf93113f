"""Attention in float64 on the host, with a mask over all pairs of tokens: what a backend is checked against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from natten_jax.problem import Problem
from natten_jax.windows import Axis


class Arrays(NamedTuple):
    """Inputs of a check, as NumPy arrays.

    Attributes:
        query: ``[batch, *layout, heads, head_dim]``.
        key: ``[batch, *layout, heads_kv, head_dim]``.
        value: ``[batch, *layout, heads_kv, head_dim_v]``.
        additional_keys: ``[batch, additional_kv, heads_kv, head_dim]``; ``None`` where there are none.
        additional_values: ``[batch, additional_kv, heads_kv, head_dim_v]``, likewise.
        out_cotangent: Cotangent of the output.
        logsumexp_cotangent: Cotangent of the logsumexp, ``[batch, *layout, heads]``.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    additional_keys: np.ndarray | None
    additional_values: np.ndarray | None
    out_cotangent: np.ndarray
    logsumexp_cotangent: np.ndarray

    @property
    def operands(self) -> dict[str, np.ndarray]:
        """The arrays that the operator is called with, by name."""
        named = self._asdict()
        return {name: named[name] for name in self._fields[:5] if named[name] is not None}


def visible(problem: Problem) -> np.ndarray:
    """Which keys each query sees, ``[query tokens, key tokens]``, additional ones last."""
    mask = np.ones((1, 1), bool)
    for axis in problem.axes:
        mask = np.kron(mask, _along(axis)).astype(bool)
    return np.pad(mask, [(0, 0), (0, problem.additional_kv)], constant_values=True)


def _along(axis: Axis) -> np.ndarray:
    query, key, d = np.arange(axis.query_extent)[:, None], np.arange(axis.kv_extent), axis.dilation
    group = query % d
    first, end = axis.bounds(query // d, axis.lengths(group))
    seen: np.ndarray = (key % d == group) & (first <= key // d) & (key // d < end)
    return seen


def results(problem: Problem, arrays: Arrays) -> Mapping[str, np.ndarray]:
    """Output, logsumexp and the gradient of each operand, by name, in the operands' shapes.

    Args:
        problem: A problem of windows that stay inside the layout.
        arrays: Its inputs, of any element type.
    """
    mask = visible(problem)
    inputs = {name: array.astype(np.float64) for name, array in arrays.operands.items()}
    rows = arrays.query.shape[:-1]
    found = {"out": np.zeros((*rows, problem.head_dim_v)), "lse": np.zeros(rows)}
    found |= {f"d_{name}": np.zeros(array.shape) for name, array in inputs.items()}
    tokens = len(mask[0]) - problem.additional_kv
    for entry, head, kv_head in _heads(problem):

        def flat(array: np.ndarray, of: int, entry: int = entry) -> np.ndarray:
            view: np.ndarray = array[entry, ..., of, :].reshape(-1, array.shape[-1])
            return view.astype(np.float64)

        keys, values = (
            np.concatenate([flat(inputs[name], kv_head) for name in names if name in inputs])
            for names in (("key", "additional_keys"), ("value", "additional_values"))
        )
        query, out_cotangent = flat(inputs["query"], head), flat(arrays.out_cotangent, head)
        logits = np.where(mask, problem.scale * query @ keys.T, -np.inf)
        highest = logits.max(axis=1, keepdims=True)
        exponentials = np.exp(logits - highest)
        sums = exponentials.sum(axis=1, keepdims=True)
        weights = exponentials / sums
        out = weights @ values
        delta = (out_cotangent * out).sum(axis=1) - arrays.logsumexp_cotangent[entry, ..., head].reshape(-1)
        of_logits = problem.scale * weights * (out_cotangent @ values.T - delta[:, None])

        found["out"][entry, ..., head, :] = out.reshape(*problem.query_layout, -1)
        found["lse"][entry, ..., head] = (highest + np.log(sums)).reshape(problem.query_layout)
        found["d_query"][entry, ..., head, :] = (of_logits @ keys).reshape(*problem.query_layout, -1)
        for names, gradient in (
            (("d_key", "d_additional_keys"), of_logits.T @ query),
            (("d_value", "d_additional_values"), weights.T @ out_cotangent),
        ):
            for name, part in zip(names, np.split(gradient, [tokens]), strict=True):
                if name in found:
                    view = found[name][entry, ..., kv_head, :]
                    view += part.reshape(view.shape)  # query heads that share a key head add up
    return found


def _heads(problem: Problem) -> Iterator[tuple[int, int, int]]:
    """Batch entries and heads, with the key/value head of each."""
    for entry in range(problem.batch):
        for head in range(problem.heads):
            yield entry, head, head // (problem.heads // problem.heads_kv)
