"""Neighborhood attention as the ``attention_fn`` of Flax's own ``MultiHeadAttention``, nnx and linen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import jax
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype

from natten_jax.arguments.names import explained
from natten_jax.arguments.static import Bools, Ints, array_of
from natten_jax.windows import WINDOW_OPTIONS, WindowArguments

from . import arguments
from .arguments import Neighborhood, Options, Performance

__all__ = ["NeighborhoodAttentionFn", "neighborhood_attention_fn"]


@explained(Performance.__annotations__)
@WINDOW_OPTIONS.shown(performance=Performance)
def neighborhood_attention_fn(
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    scale: float | None = None,
    *,
    clamp_window: bool = False,
    **options: Unpack[Options],
) -> NeighborhoodAttentionFn:
    """Make an ``attention_fn`` for ``flax.nnx`` and ``flax.linen``.

    The query's shape says how many token dimensions there are: a module that is called with
    ``[batch, height, width, features]`` attends in two dimensions. Window arguments take one value per
    dimension, or one for all.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from natten_jax.flax_modules.attention_fn import neighborhood_attention_fn
        >>> over_windows = neighborhood_attention_fn(kernel_size=(3, 3))
        >>> layer = nnx.MultiHeadAttention(
        ...     2, 32, attention_fn=over_windows, decode=False, rngs=nnx.Rngs(0)
        ... )
        >>> layer(jnp.ones((1, 4, 4, 32))).shape
        (1, 4, 4, 32)

    Args:
        kernel_size: Window extent in tokens.
        stride: Queries that share a window; at most ``kernel_size``.
        dilation: Distance between neighboring tokens of a window; ``kernel_size * dilation`` fits the layout.
        is_causal: Whether later keys are hidden.
        scale: Factor of the logits; ``None`` is ``head_dim ** -0.5``, which is what Flax does.
        {WindowOptions}
        clamp_window: Whether windows that are larger than the layout become the largest that fit.
        **performance: ``backend``, ``fp8`` and the other performance arguments of :func:`natten_jax.na1d`.

    Returns:
        The function. Functions of equal arguments are equal, so that modules that hold them share compiled programs.

    Raises:
        ValueError: A value breaks a rule above, or ``backend`` is unknown.
        TypeError: An argument is of the wrong type.
    """
    window = WindowArguments(kernel_size, stride, dilation, is_causal).taking(options)
    settings = {**window._asdict(), "scale": scale, "clamp_window": clamp_window, **options}
    return NeighborhoodAttentionFn(arguments.frozen(settings))


@dataclasses.dataclass(frozen=True)
class NeighborhoodAttentionFn:
    """A function with the signature of Flax's ``dot_product_attention``; see :func:`neighborhood_attention_fn`."""

    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.of_rank(self.rank or 1)

    @property
    def rank(self) -> int | None:
        """Token dimensions that the arguments are for; ``None`` where they suit any number."""
        return next((len(v) for v in self.settings.values() if isinstance(v, tuple)), None)

    def of_rank(self, rank: int) -> Neighborhood:
        """The operator for this many token dimensions."""
        others = dict(self.settings)
        window = WindowArguments._make(map(others.pop, WindowArguments._fields))
        return arguments.neighborhood("neighborhood_attention_fn", rank, window, **others)

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        *,
        promote_dtype: Callable[..., Any] = flax_promote_dtype,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Callable[..., jax.Array] | None = None,
        qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
        attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
        input_positions: jax.Array | None = None,
    ) -> jax.Array:
        """Attend.

        What Flax may ask for and neighborhood attention cannot do raises an error instead of being ignored.

        Args:
            query: ``[batch, *layout, heads, head_dim]``, not scaled.
            key: ``[batch, *layout, heads_kv, head_dim]``.
            value: ``[batch, *layout, heads_kv, head_dim_v]``.
            bias: Must be ``None``.
            mask: Must be ``None``.
            broadcast_dropout: Has no effect, as there is no dropout.
            dropout_rng: Has no effect, as there is no dropout.
            dropout_rate: Must be 0 unless ``deterministic``.
            deterministic: Whether dropout is off.
            dtype: Type to compute in; ``None`` takes what the arrays promote to.
            precision: Has no effect: products accumulate in float32 or better whatever it says.
            module: Must be ``None``: attention weights are never there to be sown.
            promote_dtype: Function that casts the arrays to one type.
            is_causal: Only where the function itself is causal, over one token dimension.
            force_fp32_for_softmax: Has no effect: the softmax is always computed in float32 or better.
            einsum_dot_general: Must be ``None``.
            qk_attn_weights_einsum: Must be ``None``.
            attn_weights_value_einsum: Must be ``None``.
            input_positions: Must be ``None``; rotate query and key in a function around this one.

        Returns:
            ``[batch, *layout, heads, head_dim_v]``.

        Raises:
            ValueError: An argument cannot be honoured, or the arrays do not suit the window.
        """
        unsupported = {
            "bias": bias,
            "mask": mask,
            "module": module,
            "einsum_dot_general": einsum_dot_general,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
            "input_positions": input_positions,
        }
        for name, argument in unsupported.items():
            if argument is not None:
                raise ValueError(f"{name} must be None, got {_brief(argument)}: {_REASONS.get(name, _NO_EINSUM)}")
        if dropout_rate > 0 and not deterministic:
            raise ValueError(
                f"dropout_rate must be 0 unless deterministic, got {dropout_rate}: neighborhood attention has no "
                "dropout of attention weights"
            )
        query, key, value = map(array_of, (query, key, value))
        rank = query.ndim - 3
        if rank not in (1, 2, 3) or self.rank not in (None, rank):
            asked = "1, 2 or 3" if self.rank is None else self.rank
            raise ValueError(
                f"query has shape {query.shape}, which is [batch, *layout, heads, head_dim] with {rank} token "
                f"dimension(s), but this attention_fn takes {asked}"
            )
        attend = self.of_rank(rank)
        if is_causal and attend.window.is_causal != (True,):
            raise ValueError(
                "is_causal=True asks for a mask over a sequence of tokens, which cuts windows: "
                "give is_causal to neighborhood_attention_fn instead"
            )
        return attend(*promote_dtype((query, key, value), dtype=dtype))


_REASONS = {
    "bias": "neighborhood attention adds nothing to the logits",
    "mask": "the window alone says which keys a query sees (masks also come from decode=True)",
    "module": "attention weights are never formed, so they cannot be sown",
    "input_positions": "rotate query and key in a function around this one",
}
_NO_EINSUM = "the products are computed inside the operator"


def _brief(argument: Any) -> str:
    shape = getattr(argument, "shape", None)
    return type(argument).__name__ if shape is None else f"an array of shape {shape}"
