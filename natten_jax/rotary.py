"""Rotary position embeddings for sequences, images and videos.

Pairs of features of queries and keys are rotated by angles proportional to the token's coordinates, so that the logit
of a query and a key depends on their distance and direction. Each token dimension rotates separate features.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arguments.static import int_tuple, shown
from natten_jax.ops.canonicalize import ArrayLike, as_jax_array

__all__ = ["apply_rotary", "rotary_angles"]


def rotary_angles(
    layout: Sequence[int],
    head_dim: int,
    *,
    features: Sequence[int] | None = None,
    positions: Sequence[ArrayLike] | None = None,
    theta: float = 10000.0,
) -> jax.Array:
    """Return the angles by which each token's feature pairs are rotated.

    Pair ``i`` of a dimension with ``n`` features rotates by ``position * theta ** (-2 * i / n)`` radians.

    Example:
        >>> from natten_jax.rotary import rotary_angles
        >>> rotary_angles((30, 48, 80), head_dim=128).shape
        (30, 48, 80, 64)
        >>> rotary_angles((30, 48, 80), head_dim=128, features=(16, 56, 56)).shape
        (30, 48, 80, 64)

    Args:
        layout: Tokens per dimension.
        head_dim: Width of query and key heads.
        features: Features of a head that each dimension rotates: even numbers whose sum is at most ``head_dim``; the
            remaining features are not rotated. ``None`` distributes all features equally, with the remainder for the
            first dimension.
        positions: For each dimension, positions ``[extent]`` of its tokens, not necessarily integers; ``None`` counts
            from 0.
        theta: Base of the angles.

    Returns:
        ``[*layout, sum(features) // 2]``, float32.

    Raises:
        ValueError: A value breaks a rule above.
        TypeError: An argument is of the wrong type.
    """
    extents = int_tuple("layout", layout, len(layout), repeat=False)
    (width,) = int_tuple("head_dim", head_dim, 1)
    shares = _shares(features, width, len(extents))
    if not np.isfinite(theta) or theta <= 0:
        raise ValueError(f"theta must be finite and above 0, got {shown(theta)}")
    if positions is not None and len(positions) != len(extents):
        raise ValueError(f"positions must have {len(extents)} arrays, one per token dimension, got {len(positions)}")
    angles = []
    for dimension, (extent, share) in enumerate(zip(extents, shares, strict=True)):
        at = jnp.arange(extent) if positions is None else as_jax_array(f"positions[{dimension}]", positions[dimension])
        if at.shape != (extent,):
            raise ValueError(f"positions[{dimension}] has shape {at.shape}, but layout {extents} requires ({extent},)")
        frequencies = theta ** (-np.arange(0, share, 2) / max(share, 1))
        line = at.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None]
        shape = [1] * len(extents)
        shape[dimension] = extent
        angles.append(jnp.broadcast_to(line.reshape(*shape, share // 2), (*extents, share // 2)))
    return jnp.concatenate(angles, axis=-1)


def apply_rotary(tokens: ArrayLike, angles: ArrayLike, *, interleaved: bool = True) -> jax.Array:
    """Rotate the features of queries or keys.

    Example:
        >>> import jax.numpy as jnp
        >>> from natten_jax.rotary import apply_rotary, rotary_angles
        >>> query = jnp.ones((2, 8, 8, 4, 32))
        >>> apply_rotary(query, rotary_angles((8, 8), head_dim=32)).shape
        (2, 8, 8, 4, 32)

    Args:
        tokens: ``[..., *layout, heads, head_dim]``, queries or keys.
        angles: ``[*layout, pairs]`` of :func:`rotary_angles`; features after the first ``2 * pairs`` are not rotated.
        interleaved: A pair is two neighboring features (as in FLUX or Wan). Otherwise it is feature ``i`` and ``pairs +
            i`` (as in GPT-NeoX).

    Returns:
        An array of the shape and type of ``tokens``; computed in float32 or better.

    Raises:
        ValueError: The shapes disagree.
        TypeError: An argument is not an array.
    """
    tokens, angles = as_jax_array("tokens", tokens), as_jax_array("angles", angles)
    rank = angles.ndim - 1
    turned = 2 * angles.shape[-1] if angles.ndim else 0
    if rank < 1 or tokens.ndim < rank + 2 or tokens.shape[-2 - rank : -2] != angles.shape[:-1]:
        raise ValueError(
            f"angles has shape {angles.shape}, which is [*layout, pairs], but tokens has {tokens.shape}: "
            "[..., *layout, heads, head_dim] is expected"
        )
    if turned > tokens.shape[-1]:
        raise ValueError(f"angles turn {turned} features (shape {angles.shape}), but tokens have {tokens.shape[-1]}")
    wide = "float64" if tokens.dtype == "float64" else "float32"
    halves = (turned // 2, 2) if interleaved else (2, turned // 2)
    pairs = tokens[..., :turned].astype(wide).reshape(*tokens.shape[:-1], *halves)
    at = -1 if interleaved else -2
    first, second = jnp.take(pairs, 0, axis=at), jnp.take(pairs, 1, axis=at)
    per_token = (*(1,) * (tokens.ndim - rank - 2), *angles.shape[:-1], 1, angles.shape[-1])
    cosine, sine = (f(angles.astype(wide)).reshape(per_token) for f in (jnp.cos, jnp.sin))
    rotated = jnp.stack([first * cosine - second * sine, first * sine + second * cosine], axis=at)
    rotated = rotated.reshape(*tokens.shape[:-1], turned).astype(tokens.dtype)
    return jnp.concatenate([rotated, tokens[..., turned:]], axis=-1)


def _shares(features: Sequence[int] | None, head_dim: int, rank: int) -> tuple[int, ...]:
    """Return how many features each dimension rotates: the given numbers after checks, or equal shares."""
    if features is None:
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, because features turn in pairs, got {head_dim}; or give features")
        each = head_dim // 2 // rank * 2
        return (head_dim - each * (rank - 1), *(each,) * (rank - 1))
    shares = int_tuple("features", features, rank, repeat=False)
    if any(share % 2 for share in shares) or sum(shares) > head_dim:
        raise ValueError(f"features must be even and sum up to at most head_dim {head_dim}, got {shown(features)}")
    return shares
