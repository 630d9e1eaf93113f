"""Compare rotary embeddings with multiplications by complex numbers of magnitude 1."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax.rotary import apply_rotary, rotary_angles


def expected_angles(layout, features, theta=10000.0, positions=None):
    """Compute the expected angles token by token, in float64."""
    angles = np.zeros((*layout, sum(features) // 2))
    for token in np.ndindex(*layout):
        places = token if positions is None else [line[x] for line, x in zip(positions, token, strict=True)]
        pairs = zip(places, features, strict=True)
        angles[token] = np.concatenate([place / theta ** (np.arange(0, share, 2) / share) for place, share in pairs])
    return angles


@pytest.mark.parametrize(
    ("layout", "head_dim", "given", "features"),
    [
        ((9,), 8, None, (8,)),
        ((3, 5), 8, None, (4, 4)),
        ((2, 3, 4), 16, None, (8, 4, 4)),
        ((2, 3, 4), 16, (2, 6, 4), (2, 6, 4)),
    ],
)
def test_angles(layout, head_dim, given, features):
    found = rotary_angles(layout, head_dim, features=given)
    np.testing.assert_allclose(found, expected_angles(layout, features), rtol=1e-5, atol=1e-6)


def test_positions_and_theta():
    positions = [np.array([0.0, 0.5, 1.0]), np.array([10, -1])]
    angles = rotary_angles((3, 2), 8, positions=positions, theta=100.0)
    np.testing.assert_allclose(angles, expected_angles((3, 2), (4, 4), 100.0, positions), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_features_turn_as_complex_numbers(interleaved, dtype, tolerance):
    tokens = jax.random.normal(jax.random.key(0), (2, 3, 5, 4, 12), dtype)
    angles = rotary_angles((3, 5), 12, features=(4, 4))
    turned = np.asarray(apply_rotary(tokens, angles, interleaved=interleaved), np.float64)
    given = np.asarray(tokens, np.float64)
    real, imaginary = [(slice(0, 8, 2), slice(1, 8, 2)), (slice(0, 4), slice(4, 8))][not interleaved]
    rotations = np.exp(1j * expected_angles((3, 5), (4, 4)))[..., None, :]
    expected = (given[..., real] + 1j * given[..., imaginary]) * rotations
    np.testing.assert_allclose(turned[..., real], expected.real, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(turned[..., imaginary], expected.imag, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(turned[..., 8:], given[..., 8:])


def test_logits_depend_only_on_distances():
    tokens = [np.tile(np.random.default_rng(i).normal(size=16), (1, 6, 7, 1, 1)) for i in range(2)]
    query, key = (apply_rotary(each, rotary_angles((6, 7), 16)) for each in tokens)
    logits = jnp.einsum("byxhd,bvuhd->yxvu", query, key)
    np.testing.assert_allclose(logits[0, 1, 2, 3], logits[3, 4, 5, 6], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(logits[4, 1, 1, 2], logits[3, 2, 0, 3], rtol=1e-3, atol=1e-4)
    assert abs(logits[0, 1, 2, 3] - logits[0, 1, 3, 3]) > 1e-3


def test_batch_dimensions_and_tracing():
    angles = rotary_angles((5,), 8)
    tokens = jax.random.normal(jax.random.key(0), (2, 3, 5, 4, 8))
    whole = apply_rotary(tokens, angles)
    np.testing.assert_allclose(jax.jit(jax.vmap(apply_rotary, (0, None)))(tokens, angles), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(apply_rotary(tokens[0, 0], angles), whole[0, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layout": (3, 0)}, ValueError, "layout must be at least 1"),
        ({"head_dim": 7}, ValueError, "head_dim must be even"),
        ({"head_dim": 2.0}, TypeError, "head_dim must be an int"),
        ({"features": (4,)}, ValueError, "features must have 2 value"),
        ({"features": (3, 5)}, ValueError, "features must be even"),
        ({"features": (4, 6)}, ValueError, "at most head_dim 8"),
        ({"theta": 0.0}, ValueError, "theta must be finite and above 0"),
        ({"positions": [np.arange(3)]}, ValueError, "positions must have 2 arrays"),
        ({"positions": [np.arange(3), np.arange(3)]}, ValueError, r"positions\[1\] has shape \(3,\)"),
        ({"positions": [np.arange(3), "here"]}, TypeError, r"positions\[1\]"),
    ],
)
def test_wrong_angles(arguments, error, message):
    with pytest.raises(error, match=message):
        rotary_angles(**{"layout": (3, 4), "head_dim": 8, **arguments})


@pytest.mark.parametrize(
    ("tokens", "angles", "message"),
    [
        ((1, 3, 4, 2, 8), (4, 3, 4), "angles has shape"),
        ((4, 8), (4, 4), "angles has shape"),
        ((1, 4, 2, 8), (4,), "angles has shape"),
        ((1, 4, 2, 8), (4, 5), "angles rotate 10 features"),
    ],
)
def test_shapes_that_disagree(tokens, angles, message):
    with pytest.raises(ValueError, match=message):
        apply_rotary(jnp.ones(tokens), jnp.ones(angles))
