"""What the modules for Flax share: their arguments, checked."""

from __future__ import annotations

import dataclasses
import math
import numbers
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Unpack, cast

import jax
from flax.core import FrozenDict

from natten_jax import backends
from natten_jax.arguments.arrays import Counts, Origin, checked_scale
from natten_jax.arguments.names import known_arguments
from natten_jax.arguments.static import Ints, flag, hashable, shown
from natten_jax.ops.canonicalize import check_array
from natten_jax.ops.float8 import float8_name
from natten_jax.ops.neighborhood import na1d, na2d, na3d
from natten_jax.ops.neighborhood_weights import neighborhood_apply, neighborhood_weights
from natten_jax.ops.sub_calls import checked_attention_kwargs
from natten_jax.performance import PERFORMANCE_NAMES, PerformanceArguments, performance_of
from natten_jax.windows import WindowArguments, WindowOptions

_OPERATORS = {1: na1d, 2: na2d, 3: na3d}


class AttentionDropoutWarning(UserWarning):
    """Weights of attention are dropped, and therefore formed."""


class Performance(PerformanceArguments, total=False):
    """Arguments of :func:`natten_jax.na1d` and its like that choose how, not what, is computed."""

    attention_kwargs: Mapping[str, Any] | None
    backend: str | None
    fp8: str | None


class Options(WindowOptions, Performance, total=False):
    """What modules take as the operators do, by keyword and without a word of their own."""


@dataclasses.dataclass(frozen=True)
class Neighborhood:
    """Neighborhood attention with all but its arrays fixed.

    Hashable and comparable, as Flax asks of what a module holds beside its parameters: two modules with equal
    arguments share one compiled program.
    """

    rank: int
    window: WindowArguments
    clamp_window: bool
    scale: float | None
    scale_name: str
    performance: Mapping[str, Any]

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        query_origin: Origin | None = None,
        extents: Counts | None = None,
        upsample: Ints = 1,
        relative_bias: jax.Array | None = None,
        drop: Callable[[jax.Array], jax.Array] | None = None,
    ) -> jax.Array:
        """Attend.

        Args:
            query: ``[*batch, *layout, heads, head_dim]``, with any number of batch dimensions.
            key: ``[*batch, *layout, heads_kv, head_dim]``.
            value: ``[*batch, *layout, heads_kv, head_dim_v]``.
            query_origin: As in the operators, with all batch dimensions.
            extents: Likewise.
            upsample: Likewise.
            relative_bias: As in the operators.
            drop: A dropout of the weights, which are then an array; ``None`` where none are dropped.

        Returns:
            ``[*batch, *layout, heads, head_dim_v]``.

        Raises:
            ValueError: The window does not fit the layout, the scale is too large for the arrays' type, no backend can
                run the problem, or weights are to be dropped of queries that are a box, of padding, of a finer grid or
                of windows that are clamped.
        """
        checked_scale(self.scale, query.dtype.name, name=self.scale_name)
        batch = query.shape[: query.ndim - self.rank - 2]
        arrays = (query, key, value)
        if len(batch) != 1:  # operators have one batch dimension
            query, key, value = (array.reshape(math.prod(batch), *array.shape[len(batch) :]) for array in arrays)
            query_origin, extents = (_with_one_batch_dimension(each, batch) for each in (query_origin, extents))
        attend: Callable[..., jax.Array] = _OPERATORS[self.rank] if drop is None else _dropping(drop)
        try:
            output = attend(
                query,
                key,
                value,
                **self.window._asdict(),
                clamp_window=self.clamp_window,
                scale=self.scale,
                query_origin=query_origin,
                extents=extents,
                upsample=upsample,
                relative_bias=relative_bias,
                **self.performance,
            )
        except ValueError as error:
            if batch or self.rank == 1:
                raise
            raise ValueError(f"{error} (without a batch dimension, {_FLATTENED.format(rank=self.rank)})") from None
        return output if len(batch) == 1 else output.reshape(*batch, *output.shape[1:])


def _dropping(drop: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """Neighborhood attention whose weights are dropped, with the arguments of an operator that it has, too."""

    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        scale: float | None,
        relative_bias: jax.Array | None,
        **others: Any,
    ) -> jax.Array:
        names = "query_origin", "extents", "clamp_window", "fp8"
        given = [name for name in names if not (others.get(name) is None or others.get(name) is False)]
        if given or query.shape[:-2] != key.shape[:-2]:
            beside = ", ".join(given) or "inputs_kv of another layout"
            raise ValueError(f"attn_drop was given with {beside}: weights are dropped of whole layouts only")
        warnings.warn(
            "attn_drop: attention weights are formed as an array, which is slower than the operators and takes "
            "prod(kernel_size) numbers for each query and head; where dropout is off, the operators run",
            AttentionDropoutWarning,
            stacklevel=2,
        )
        window = {name: others[name] for name in WindowArguments._fields}
        weights = neighborhood_weights(query, key, **window, scale=scale, relative_bias=relative_bias)
        return neighborhood_apply(drop(weights), value, **window)

    return attend


def _with_one_batch_dimension(places: Any, batch: tuple[int, ...]) -> Any:
    """Numbers for each entry of the batch ``[*batch, rank]`` as ``[entries, rank]``; others as they are."""
    shape = getattr(places, "shape", ())
    return places.reshape(math.prod(batch), *shape[-1:]) if batch and shape[:-1] == batch else places


def neighborhood(
    module: str,
    rank: int,
    window: WindowArguments,
    scale: float | None,
    *,
    clamp_window: bool = False,
    scale_name: str = "scale",
    **performance: Unpack[Performance],
) -> Neighborhood:
    """Check all that can be checked before there are tokens.

    Messages speak of the ``module`` and call the scale ``scale_name``.

    Raises:
        ValueError: A value breaks a rule of the operator, or ``backend`` is unknown.
        TypeError: An argument is of the wrong type, or no performance argument has that name.
    """
    window = window.checked(rank)
    factor = checked_scale(scale, name=scale_name)
    tiles = cast(dict[str, Any], dict(performance))
    backend, attention_kwargs, fp8 = (tiles.pop(name, None) for name in ("backend", "attention_kwargs", "fp8"))
    if fp8 is not None:
        float8_name("fp8", fp8)
    if backend is not None:
        backends.find(backend, "fna")
    config = performance_of(rank, **known_arguments(module, tiles, PERFORMANCE_NAMES))
    if attention_kwargs is not None:
        checked_attention_kwargs(attention_kwargs, config.flattened())
        attention_kwargs = frozen(attention_kwargs)
    return Neighborhood(
        rank,
        window,
        flag("clamp_window", clamp_window),
        factor,
        scale_name,
        frozen({**dataclasses.asdict(config), "backend": backend, "attention_kwargs": attention_kwargs, "fp8": fp8}),
    )


def bias_shape(relative_bias: bool, num_heads: int, window: WindowArguments) -> tuple[int, ...] | None:
    """The shape of the relative bias of a module with such windows, which are checked; ``None`` where it has none.

    Raises:
        ValueError: The extent of a window is that of the layout, which is not known.
        TypeError: ``relative_bias`` is no bool.
    """
    if not flag("relative_bias", relative_bias):
        return None
    sizes = cast(tuple[int, ...], window.kernel_size)  # as it was checked
    if min(sizes) < 1:
        raise ValueError(
            f"relative_bias=True with kernel_size {sizes}: a bias for each offset takes windows of known extents"
        )
    return num_heads, *(2 * size - 1 for size in sizes)


def frozen(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """A hashable copy, in which sequences and arrays of numbers are tuples."""
    canonical = {k: frozen(v) if isinstance(v, Mapping) else hashable(v) for k, v in arguments.items()}
    return cast(Mapping[str, Any], cast(Any, FrozenDict)(canonical))


def head_counts(num_heads: int, num_kv_heads: int | None) -> tuple[int, int]:
    """Query heads and key/value heads.

    Raises:
        ValueError: The first are no multiple of the second.
        TypeError: An argument is not an int.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_positive(num_heads=num_heads, num_kv_heads=num_kv_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}: "
            "every key/value head serves the same number of query heads"
        )
    return num_heads, num_kv_heads


def head_dim(num_heads: int, in_features: int, qkv_features: int | None) -> int:
    """Features per head.

    Raises:
        ValueError: The heads do not divide the features.
        TypeError: An argument is not an int.
    """
    name, features = ("in_features", in_features) if qkv_features is None else ("qkv_features", qkv_features)
    check_positive(**{name: features})
    if features % num_heads:
        raise ValueError(f"{name} {features} is not a multiple of num_heads {num_heads}: heads are of one size")
    return features // num_heads


def check_positive(**sizes: int) -> None:
    """Check numbers of things.

    Raises:
        ValueError: One is less than 1.
        TypeError: One is not an int.
    """
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name} must be an int, got {shown(value)}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {shown(value)}")


def check_dropout(attn_drop: float, proj_drop: float) -> None:
    """Check the rates of both dropouts.

    Raises:
        ValueError: One is not a probability.
        TypeError: One is no number.
    """
    for name, rate in (("attn_drop", attn_drop), ("proj_drop", proj_drop)):
        if isinstance(rate, bool) or not isinstance(rate, numbers.Real):
            raise TypeError(f"{name} must be a real number, got {shown(rate)}")
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"{name} must be in [0, 1], got {shown(rate)}")


def check_input(inputs: jax.Array, rank: int, in_features: int | None, name: str = "inputs") -> None:
    """Check an array that a module is called with.

    Raises:
        ValueError: It is not ``[*batch, *layout, in_features]``.
        TypeError: It is no array.
    """
    check_array(name, inputs)
    if inputs.ndim < rank + 1:
        raise ValueError(
            f"{name} has shape {inputs.shape}, but NeighborhoodAttention{rank}D takes arrays of at least {rank + 1} "
            f"dimensions [*batch, {LAYOUTS[rank]}, in_features]"
            + (f": {_FLATTENED.format(rank=rank)}" if rank > 1 else "")
        )
    if in_features is not None and inputs.shape[-1] != in_features:
        raise ValueError(
            f"{name} has {inputs.shape[-1]} features (shape {inputs.shape}), but in_features is {in_features}: "
            "they must be equal"
        )


#: What an error says of inputs that may be ``[batch, tokens, features]``.
_FLATTENED = (
    "the last dimensions are the token layout and the features, so that tokens which are flattened to "
    "[batch, tokens, features] need their layout of {rank} dimensions back"
)
#: How published models draw relative biases at first.
BIAS_DEVIATION = 0.02
#: Names of the token dimensions, by rank.
LAYOUTS = {1: "seqlen", 2: "height, width", 3: "depth, height, width"}
