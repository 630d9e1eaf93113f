"""Rotary position embeddings for sequences, images and videos.

The features of queries and keys are rotated in pairs, and each token dimension has its own feature pairs. The angle of
a pair is proportional to the token's coordinate in the pair's dimension. A logit therefore depends on positions only
through the differences between the coordinates of the query and the key.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arguments.arrays import checked_scale
from natten_jax.arguments.static import int_tuple, layout_tuple, shown
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
    """Return the rotation angle of each feature pair of each token.

    For a token dimension with ``n`` features, the angle of pair ``i`` is ``position * theta ** (-2 * i / n)`` radians.

    Example:
        >>> from natten_jax.rotary import rotary_angles
        >>> rotary_angles((30, 48, 80), head_dim=128).shape
        (30, 48, 80, 64)
        >>> rotary_angles((30, 48, 80), head_dim=128, features=(16, 56, 56)).shape
        (30, 48, 80, 64)

    Args:
        layout: Number of tokens per dimension.
        head_dim: Features per head of queries and keys.
        features: Number of features of a head that each dimension rotates. The numbers must be even, and their sum at
            most ``head_dim``. The remaining features are not rotated. ``None`` distributes all features equally over
            the dimensions, and gives the remainder to the first.
        positions: Arrays ``[extent]``, one per dimension, with the positions of the tokens along the dimension.
            Positions need not be integers. ``None`` numbers the tokens from 0.
        theta: Base of the power in the formula above.

    Returns:
        ``[*layout, sum(features) // 2]``, float32.

    Raises:
        ValueError: The value of an argument is not supported.
        TypeError: An argument is of the wrong type.
    """
    extents = layout_tuple("layout", layout)
    (width,) = int_tuple("head_dim", head_dim, 1)
    shares = _shares(features, width, len(extents))
    base = checked_scale(theta, name="theta")
    if base is None or base <= 0:
        raise ValueError(f"theta must be finite and above 0, got {shown(theta)}")
    if positions is not None and (not isinstance(positions, Sized) or len(positions) != len(extents)):
        raise ValueError(f"positions must have {len(extents)} arrays, one per token dimension, got {shown(positions)}")
    angles = []
    for dimension, (extent, share) in enumerate(zip(extents, shares, strict=True)):
        at = jnp.arange(extent) if positions is None else as_jax_array(f"positions[{dimension}]", positions[dimension])
        if at.shape != (extent,):
            raise ValueError(f"positions[{dimension}] has shape {at.shape}, but layout {extents} requires ({extent},)")
        frequencies = base ** (-np.arange(0, share, 2) / max(share, 1))
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
        angles: ``[*layout, pairs]``, from :func:`rotary_angles`. Only the first ``2 * pairs`` features are rotated.
        interleaved: True if pair ``i`` consists of the features ``2 * i`` and ``2 * i + 1`` (as in FLUX or Wan). False
            if it consists of the features ``i`` and ``pairs + i`` (as in GPT-NeoX).

    Returns:
        An array with the shape and element type of ``tokens``. The rotation is computed in float32, or float64 for
        float64 ``tokens``.

    Raises:
        ValueError: The shapes of ``tokens`` and ``angles`` do not match.
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
        raise ValueError(f"angles rotate {turned} features (shape {angles.shape}), but tokens have {tokens.shape[-1]}")
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
    """Check ``features``, or compute equal shares if it is ``None``. Return the number of features per dimension."""
    if features is None:
        if head_dim % 2:
            raise ValueError(
                f"head_dim must be even, because pairs of features are rotated, got {head_dim}; or give features"
            )
        each = head_dim // 2 // rank * 2
        return (head_dim - each * (rank - 1), *(each,) * (rank - 1))
    shares = int_tuple("features", features, rank, repeat=False)
    if any(share % 2 for share in shares) or sum(shares) > head_dim:
        raise ValueError(f"features must be even and sum up to at most head_dim {head_dim}, got {shown(features)}")
    return shares
