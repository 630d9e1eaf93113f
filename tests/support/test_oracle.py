"""The oracle itself: its gradients against finite differences, its relative biases against their formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support import oracle


def test_entries_of_a_relative_bias_are_those_of_the_formula() -> None:
    layout, kernel_size, dilation = (5, 7), (3, 2), (1, 3)
    mask = oracle.neighborhood_mask(layout, kernel_size, (2, 1), dilation, (False, False))
    entries = oracle.relative_entries(layout, kernel_size, (2, 1), dilation, (False, False)).reshape(*layout, *layout)
    for q0, q1, k0, k1 in np.argwhere(mask.reshape(*layout, *layout)):
        row, column = k0 - q0 + 3 - 1, (k1 - q1) / 3 + 2 - 1
        assert entries[q0, q1, k0, k1] == row * 3 + column


def test_offsets_go_around_where_a_line_wraps() -> None:
    offsets = oracle.line_offsets(6, 3, 1, 1, False, "wrap")
    assert [offsets[0, 5], offsets[0, 0], offsets[0, 1], offsets[5, 0]] == [-1, 0, 1, 1]
    assert [oracle.line_offsets(6, 3, 1, 1, False)[0, n] for n in (0, 1, 2)] == [0, 1, 2]


@pytest.mark.parametrize("additional", [0, 2])
@pytest.mark.parametrize("scales", [None, 0.4, [0.4, -0.6, 0.0, 1.1]])
@pytest.mark.parametrize("biases", ["", "tokens", "heads"])
def test_gradients_equal_finite_differences(additional: int, scales: Any, biases: str) -> None:
    rng = np.random.default_rng(0)
    draw = rng.standard_normal
    extra = (draw((2, additional, 2, 3)), draw((2, additional, 2, 4))) if additional else ()
    operands = oracle.Tensors(draw((2, 3, 4, 4, 3)), draw((2, 3, 4, 2, 3)), draw((2, 3, 4, 2, 4)), *extra)
    if scales is not None:
        operands = operands._replace(scale=np.asarray(scales))
    if biases:
        key_bias = draw((2, 3, 4) if biases == "tokens" else (2, 4, 3, 4))
        key_bias.reshape(-1)[:3] = -np.inf
        operands = operands._replace(relative_bias=draw((4, 3, 5)), key_bias=key_bias, sinks=draw(4))
    entries = oracle.relative_entries((3, 4), (2, 3), (1, 2), (1, 1), (True, False))
    mask = oracle.neighborhood_mask((3, 4), (2, 3), (1, 2), (1, 1), (True, False))
    d_out, d_lse = draw((2, 3, 4, 4, 4)), draw((2, 3, 4, 4))
    scale = -0.7

    def objective(values: oracle.Tensors) -> float:
        result = oracle.forward(values, mask, scale, entries)
        return float((result.out * d_out).sum() + (result.lse * d_lse).sum())

    gradients = oracle.reference(operands, mask, scale, d_out, d_lse, entries=entries).gradients
    for name, gradient in gradients._asdict().items():
        if gradient is None:
            continue
        value = getattr(operands, name)
        direction, step = draw(value.shape) * np.isfinite(value), 1e-5
        ahead, behind = (objective(operands._replace(**{name: value + sign * step * direction})) for sign in (1, -1))
        np.testing.assert_allclose((gradient * direction).sum(), (ahead - behind) / (2 * step), rtol=1e-8)
