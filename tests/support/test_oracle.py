"""Compare the oracle's gradients with finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support import oracle


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
