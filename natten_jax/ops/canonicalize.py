"""Check the arrays of a call, and convert them to the form that the passes read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arguments import static
from natten_jax.arguments.arrays import Counts, Origin, Scale, checked_counts, checked_origin, scale_or_default
from natten_jax.arguments.static import Bools, Ints
from natten_jax.arrays.biases import in_accumulator, with_hidden_keys
from natten_jax.arrays.boxes import is_real
from natten_jax.arrays.operands import Inputs, Output, Role
from natten_jax.element_types import ELEMENT_TYPES, SUPPORTED_DTYPES
from natten_jax.execution import custom_vjp
from natten_jax.native.module import KERNEL_RANK
from natten_jax.plan.plan import Request
from natten_jax.problem import Axis, Operator, Problem
from natten_jax.sharding.explicit import replicated, reshaped, split_as, split_like
from natten_jax.windows import WindowArguments


def hint_of_heads_first(describe: Callable[[Inputs], Problem], inputs: Inputs) -> str:
    """Return a hint for an error message if rejected arrays seem to have heads before tokens, otherwise ``""``.

    The function moves the second dimension of each array after the tokens. It returns the hint if ``describe`` accepts
    the resulting arrays, and if their number of heads is at most the longest token extent.
    """

    def moved(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        batch, heads, *tokens, width = array.shape
        return jax.ShapeDtypeStruct((batch, *tokens, heads, width), array.dtype)

    if any(each.ndim < 4 for each in jax.tree.leaves(inputs)):
        return ""
    try:
        problem = describe(jax.tree.map(moved, inputs))
    except (TypeError, ValueError):
        return ""
    if problem.heads > max(*problem.query_layout, *problem.kv_layout):
        return ""
    return ". Do heads come first in these arrays? They come after the tokens: jnp.moveaxis(array, 1, -2)"


#: A JAX array, or a NumPy array, which is converted as ``jnp.asarray`` converts it.
ArrayLike = jax.Array | np.ndarray[Any, Any]
#: An array, or only its shape and dtype, which suffice to describe a problem.
Shaped = jax.Array | jax.ShapeDtypeStruct


def as_jax_array(name: str, array: ArrayLike | None) -> jax.Array:
    """Convert an argument to an array that JAX's functions accept.

    An object that has ``__jax_array__`` is converted to an array. A NumPy array becomes a JAX array only if JAX's
    settings do not allow its dtype. Other valid arrays are returned unchanged.

    Raises:
        TypeError: :func:`check_array` rejects the argument.
    """
    if getattr(array, "__jax_array__", None) is not None:  # plain arrays skip this call
        array = static.array_of(array)
    dtype = getattr(array, "dtype", None)
    if not isinstance(dtype, np.dtype) or not dtype.isnative:  # valid arrays skip this call
        check_array(name, array)
    if isinstance(array, np.ndarray) and jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        array = jnp.asarray(array)
    return array  # type: ignore[return-value]  # JAX's functions accept NumPy arrays


#: Dtypes that biases and sinks can have. All of these dtypes can represent infinity.
_LOGIT_DTYPES = ("float16", "bfloat16", "float32", "float64")


def as_logit_term(name: str, array: ArrayLike | None) -> jax.Array:
    """Convert a bias or the argument ``sinks`` to an array that JAX's functions accept, and check its dtype.

    Raises:
        ValueError: The dtype is not supported.
        TypeError: :func:`check_array` rejects the argument.
    """
    array = as_jax_array(name, array)
    if array.dtype.name not in _LOGIT_DTYPES:
        hint = f"; jnp.where({name}, 0.0, -jnp.inf) masks False entries" if array.dtype == jnp.bool_ else ""
        raise ValueError(
            f"{name} has dtype {array.dtype.name}, but it is added to logits: {', '.join(_LOGIT_DTYPES)} are "
            f"supported{hint}"
        )
    return array


def neighborhood_problem(
    rank: int,
    inputs: Inputs,
    window: WindowArguments,
    scale: float | None = None,
    parts: Sequence[int] | None = None,
    *,
    clamp_window: bool = False,
    is_box: bool = False,
) -> Problem:
    """Check the arguments of ``na{rank}d`` and describe the problem.

    Only shapes and dtypes of the arrays are read.

    Args:
        rank: Number of token dimensions.
        inputs: The arrays.
        window: The window arguments.
        scale: The scale; ``None`` uses ``head_dim ** -0.5``.
        parts: Number of equal shards per token dimension. The arrays contain a single shard, but the returned problem
            has the whole layout. ``None`` if the layout is not sharded.
        clamp_window: True to reduce windows that are larger than the layout to the largest windows that fit.
        is_box: True if the queries are a box inside the layout of the keys.
    """
    query, key, value = inputs.query, inputs.key, inputs.value
    _check_arrays(query, key, value, rank + 3, f"na{rank}d")
    layout = query.shape[1:-2]
    if is_box:
        layout = _layout_of_box(query, key)
    for name, array in (("key", key), ("value", value)):
        if array.shape[1:-2] != layout:
            raise ValueError(
                f"{name} has token layout {array.shape[1:-2]}, but query has {layout}: "
                "query, key and value must share one token layout"
            )
    window.checked(rank)  # raises if kernel_size is missing; `axes` would use the layout's extents
    tokens = tuple([extent * each for extent, each in zip(layout, parts or (1,) * rank, strict=True)])
    axes = (window.clamped(tokens) if clamp_window else window).axes(tokens, tokens)
    return _problem("fna", axes, query, key, value, scale, _check_additional_kv(inputs))


def attention_problem(
    query: Shaped, key: Shaped, value: Shaped, scale: float | None, is_causal: Bools, *, is_box: bool = False
) -> Problem:
    """Check the arguments of ``attention`` and describe the problem, as :func:`neighborhood_problem` does."""
    _check_arrays(query, key, value, 4, "attention")
    if key.shape[1] != value.shape[1]:
        raise ValueError(
            f"value has {value.shape[1]} tokens, but key has {key.shape[1]}: "
            "key and value must have the same sequence length"
        )
    layout = _layout_of_box(query, key) if is_box else query.shape[1:2]
    axes = WindowArguments(is_causal=static.flag("is_causal", is_causal)).axes(layout, key.shape[1:2])
    return _problem("fmha", axes, query, key, value, scale)


def _problem(
    operator: Operator,
    axes: tuple[Axis, ...],
    query: Shaped,
    key: Shaped,
    value: Shaped,
    scale: float | None,
    additional_kv: int = 0,
) -> Problem:
    batch, *_, heads, head_dim = query.shape
    heads_kv, head_dim_v = value.shape[-2:]
    dtype = query.dtype.name
    scale = scale_or_default(scale, head_dim, dtype)
    sizes = static.planned_batch(batch), axes, heads, heads_kv, head_dim, head_dim_v
    return Problem(operator, *sizes, dtype, scale, additional_kv).checked()


def check_array(name: str, array: Any) -> None:
    """Check that an argument is an array.

    Raises:
        TypeError: ``array`` is not an array, or its byte order is not this machine's. JAX supports no other byte order.
    """
    dtype = getattr(array, "dtype", None)
    if not isinstance(dtype, np.dtype):
        hint = f": jnp.from_dlpack({name}) converts it to a JAX array" if hasattr(array, "__dlpack__") else ""
        raise TypeError(f"{name} must be an array, got {type(array).__name__}{hint}")
    if not dtype.isnative:
        raise TypeError(
            f"{name} has dtype {dtype.str!r}, whose byte order is not this machine's, which JAX does not support: "
            f"{name}.astype({dtype.name!r}) converts it"
        )


def _layout_of_box(query: Shaped, key: Shaped) -> tuple[int, ...]:
    """Return the layout of the keys, after checking that the queries fit inside this layout."""
    layout = key.shape[1:-2]
    if any(some > every for some, every in zip(query.shape[1:-2], layout, strict=True)):
        raise ValueError(
            f"query has token layout {query.shape[1:-2]}, which is larger than key's token layout, {layout}: with "
            "query_origin the queries must be a box inside the layout of the keys"
        )
    return layout


def _check_arrays(query: Shaped, key: Shaped, value: Shaped, ndim: int, function: str) -> None:
    arrays = {"query": query, "key": key, "value": value}
    for name, array in arrays.items():
        check_array(name, array)
        if array.ndim != ndim:
            fitting = f": na{array.ndim - 3}d takes it" if function != "attention" and 4 <= array.ndim <= 6 else ""
            raise ValueError(
                f"{name} has shape {array.shape}, but {function} takes {ndim}-dimensional arrays "
                f"[batch, *token layout, heads, head_dim]{fitting}"
            )
        static.check_extents(name, array.shape, ("batch", *("a token extent",) * (ndim - 3), "heads", "head_dim"))
        if 0 in array.shape[1:]:
            raise ValueError(f"{name} has shape {array.shape}: every extent but the batch must be at least 1")
    if query.dtype.name not in SUPPORTED_DTYPES:
        raise ValueError(f"query has dtype {query.dtype.name}; supported are {', '.join(SUPPORTED_DTYPES)}")
    for name in ("key", "value"):
        if arrays[name].dtype != query.dtype:
            raise ValueError(
                f"{name} has dtype {arrays[name].dtype.name}, but query has {query.dtype.name}: query, key and "
                f"value must share one dtype (supported: {', '.join(SUPPORTED_DTYPES)})"
            )
        if arrays[name].shape[0] != query.shape[0]:
            raise ValueError(
                f"{name} has batch size {arrays[name].shape[0]}, but query has {query.shape[0]}: they must be equal"
            )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"value has {value.shape[-2]} heads, but key has {key.shape[-2]}: they must be equal")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"key has head_dim {key.shape[-1]}, but query has {query.shape[-1]}: they must be equal")


def _check_additional_kv(inputs: Inputs) -> int:
    keys, values = inputs.additional_keys, inputs.additional_values
    if keys is None and values is None:
        return 0
    if keys is None or values is None:
        given, missing, array = ("keys", "values", keys) if values is None else ("values", "keys", values)
        shape = getattr(array, "shape", None)
        raise ValueError(
            f"additional_{given} (shape {shape}) was given without additional_{missing}: give both or neither"
        )
    tokens: Any = keys.shape[1] if keys.ndim == 4 else "n"
    for name, array, source in (("key", keys, inputs.key), ("value", values, inputs.value)):
        if array.ndim == 4:
            static.check_extents(
                f"additional_{name}s", array.shape, ("batch", "the number of tokens", "heads", "head_dim")
            )
        expected = (inputs.query.shape[0], tokens, *source.shape[-2:])
        if array.shape != expected or tokens < 1:
            raise ValueError(
                f"additional_{name}s has shape {array.shape}, but [batch, n, heads_kv, head_dim] of {name} requires "
                f"{expected} with n >= 1"
            )
        if array.dtype != source.dtype:
            raise ValueError(f"additional_{name}s has dtype {array.dtype.name}, but {name} has {source.dtype.name}")
    return int(tokens)


class LogitTerms(NamedTuple):
    """The arguments that change the logits or the softmax.

    Attributes:
        scale: A number, or an array with the shape ``[]`` or ``[heads]``. Factor of the logits.
        relative_bias: ``[heads, 2 * kernel_size - 1, ...]``. Bias per offset of a key from a query.
        key_bias: ``[batch, *layout]`` or ``[batch, heads, *layout]``. Bias per key.
        sinks: ``[heads]``. One extra logit per head in the softmax denominator.
    """

    scale: Scale | None = None
    relative_bias: ArrayLike | None = None
    key_bias: ArrayLike | None = None
    sinks: ArrayLike | None = None


def with_biases(
    problem: Problem,
    inputs: Inputs,
    terms: LogitTerms,
    grid: UpsampledGrid | None = None,
    kernel_size: Sequence[int] | None = None,
) -> tuple[Problem, Inputs]:
    """Add biases and sinks to a problem and its arrays.

    Args:
        problem: The problem without biases.
        inputs: The arrays without biases and sinks.
        terms: The biases and sinks to add.
        grid: The query grid, if it is finer than the key grid and its queries are folded into heads. ``None`` if the
            query grid equals the key grid.
        kernel_size: Window extents that the caller passed. They determine the shape of the relative bias, and differ
            from the problem's window extents if windows are clamped. ``None`` uses the problem's window extents.

    Raises:
        ValueError: A shape or an element type is wrong.
        TypeError: A bias or ``sinks`` is not an array.
    """
    _, relative_bias, key_bias, sinks = terms
    if sinks is not None:
        inputs = inputs._replace(sinks=_checked_sinks(problem, sinks, grid))
    if relative_bias is None and key_bias is None:
        return problem, inputs
    if relative_bias is not None and grid is not None:
        raise ValueError(
            "relative_bias and upsample were both given: a relative_bias has no entries for queries between tokens"
        )
    if relative_bias is not None:
        table = checked_table(problem, relative_bias, kernel_size)
        inputs = inputs._replace(relative_bias=table.reshape(problem.heads, -1)[None])
    if key_bias is not None:
        inputs = _with_key_bias(problem, inputs, key_bias, grid)
    has = dataclasses.replace(problem, relative_bias=relative_bias is not None, key_bias=key_bias is not None)
    return has, inputs


def checked_table(problem: Problem, relative_bias: ArrayLike, kernel_size: Sequence[int] | None = None) -> jax.Array:
    """Check a relative bias, convert it to the accumulator's element type, and crop it to the problem's windows.

    If windows are clamped, only the entries in the middle of the table belong to offsets inside the windows.

    Args:
        problem: The problem.
        relative_bias: ``[heads, 2 * kernel_size - 1, ...]``.
        kernel_size: Window extents that the caller passed. ``None`` uses the problem's window extents.

    Returns:
        ``[heads, 2 * problem.kernel_size - 1, ...]``.

    Raises:
        ValueError: The shape or the element type is wrong.
        TypeError: ``relative_bias`` is not an array.
    """
    table = as_logit_term("relative_bias", relative_bias)
    sizes = problem.kernel_size if kernel_size is None else tuple(kernel_size)
    expected = (problem.heads, *(2 * size - 1 for size in sizes))
    if table.shape != expected:
        raise ValueError(
            f"relative_bias has shape {table.shape}, but [heads, 2 * kernel_size - 1, ...] of {problem.heads} query "
            f"heads and kernel_size {sizes} requires {expected}"
        )
    table = in_accumulator(table, ELEMENT_TYPES[problem.dtype].accumulator)
    if sizes == problem.kernel_size:
        return table
    starts = [0, *(size - clamped for size, clamped in zip(sizes, problem.kernel_size, strict=True))]
    return jax.lax.slice(table, starts, [n - start for n, start in zip(table.shape, starts, strict=True)])


def _with_key_bias(problem: Problem, inputs: Inputs, key_bias: ArrayLike, grid: UpsampledGrid | None) -> Inputs:
    bias = as_jax_array("key_bias", key_bias)
    if bias.dtype == jnp.bool_:
        bias = jnp.where(bias, 0.0, -jnp.inf)
    bias = as_logit_term("key_bias", bias)
    batch, *layout, _, _ = inputs.key.shape
    full_shape, by_head = (batch, *layout), (batch, problem.heads // (1 if grid is None else grid.queries), *layout)
    if bias.shape not in (full_shape, by_head):
        raise ValueError(
            f"key_bias has shape {bias.shape}, but [batch, *layout] or [batch, heads, *layout] of the keys requires "
            f"{full_shape} or {by_head}"
        )
    bias = in_accumulator(bias, ELEMENT_TYPES[problem.dtype].accumulator)
    if bias.ndim == len(full_shape):
        return inputs._replace(shared_key_bias=bias)
    bias = jnp.moveaxis(bias if grid is None else grid.scales(bias), 1, -1)
    return inputs._replace(key_bias=split_as(bias[..., None], inputs, Role.PER_KEY))


def _checked_sinks(problem: Problem, sinks: ArrayLike, grid: UpsampledGrid | None) -> jax.Array:
    sinks = as_logit_term("sinks", sinks)
    expected = (problem.heads // (1 if grid is None else grid.queries),)
    if sinks.shape != expected:
        raise ValueError(f"sinks has shape {sinks.shape}, but one per query head is required: {expected}")
    sinks = in_accumulator(sinks, ELEMENT_TYPES[problem.dtype].accumulator)[None]
    return (sinks if grid is None else grid.scales(sinks))[..., None]


def defer_sinks(requests: Sequence[Request], inputs: Inputs) -> tuple[Inputs, jax.Array | None]:
    """Return the inputs for the passes of a call, and the sinks that :func:`with_sinks` must add to the output.

    The sinks are ``None`` if the call has no sinks, or if the pass itself adds them. The pass adds the sinks unless one
    of these conditions holds:

    - The call consists of several requests.
    - The request has token axes.
    - The arrays are 8-bit. With ``fp8``, the logsumexp is corrected after the pass, before the sinks are added.
    - One plain JAX backend runs the pass on all platforms, so that JAX can differentiate the pass
      (:func:`natten_jax.execution.custom_vjp.plain_backend`).
    """
    (request, *rest), sinks = requests, inputs.sinks
    is_after = rest or request.token_axes or request.problem.element.is_float8
    if sinks is None or not (is_after or custom_vjp.plain_backend(request) is not None):
        return inputs, None
    return inputs._replace(sinks=None), sinks[0, :, 0]


def with_sinks(output: Output, sinks: jax.Array | None) -> Output:
    """Add sinks to the softmax denominator of an output and its logsumexp. Without sinks, return both unchanged."""
    if sinks is None:
        return output
    sinks = jnp.expand_dims(sinks, range(output.logsumexp.ndim - 1))
    return _with_sinks(output, split_like(sinks, output.logsumexp))


@jax.jit
def _with_sinks(output: Output, sinks: jax.Array) -> Any:
    accumulator = ELEMENT_TYPES[output.out.dtype.name].accumulator
    sinks = with_hidden_keys(in_accumulator(sinks, accumulator))
    sinks = jnp.where(sinks == jnp.inf, sinks - jnp.inf, sinks)  # NaN, because exp(inf - inf) is NaN
    # If all keys of a query are masked out, the logsumexp is -inf. It is replaced because its derivatives would be NaN.
    is_empty = jnp.isneginf(output.logsumexp)
    keys = jnp.where(is_empty, 0, output.logsumexp)
    # This form of the logistic function has an accurate derivative even if the weight of the sink is tiny.
    share = jnp.where(is_empty, 0, jnp.exp(-jax.nn.softplus(sinks - keys)))
    logsumexp = jnp.where(is_empty, sinks, jnp.logaddexp(keys, sinks))
    return Output((output.out.astype(accumulator) * share[..., None]).astype(output.out.dtype), logsumexp)


class BoxArguments(NamedTuple):
    """Arguments about the positions of queries and keys. Only ``attention`` has the two ``*_lengths`` arguments."""

    query_origin: Origin | None = None
    extents: Counts | None = None
    upsample: Ints = 1
    clamp_window: bool = False
    query_lengths: Counts | None = None
    kv_lengths: Counts | None = None

    @property
    def has_extents(self) -> bool:
        """True if some tokens can be padding."""
        return self.extents is not None or self.query_lengths is not None or self.kv_lengths is not None


class TokenOffsets(NamedTuple):
    """The fields ``origins`` and ``layouts`` of :class:`natten_jax.arrays.operands.Operands`."""

    origins: jax.Array | None = None
    layouts: jax.Array | None = None

    @property
    def is_whole(self) -> bool:
        """True if the queries cover the whole layout and there is no padding."""
        return self.origins is None and self.layouts is None

    def without_padding(self, query: jax.Array) -> jax.Array:
        """Return the query array with its padding set to zero."""
        assert self.layouts is not None
        inside = is_real(self.layouts, query.shape[1:-2], for_queries=True)[..., None, None]
        return jnp.where(split_like(inside, query), query, 0)

    def mask_padding(self, output: Output) -> Output:
        """Set the output of padding tokens to zero, and their logsumexp to ``-inf``."""
        assert self.layouts is not None
        inside = is_real(self.layouts, output.out.shape[1:-2], for_queries=True)[..., None]
        return Output(
            jnp.where(split_like(inside[..., None], output.out), output.out, 0),
            jnp.where(split_like(inside, output.logsumexp), output.logsumexp, -jnp.inf),
        )


def token_offsets(inputs: Inputs, box: BoxArguments) -> TokenOffsets:
    """Check a call's origins and extents, and convert them to arrays for the passes.

    Raises:
        ValueError: A number is out of range, or an argument has a wrong shape.
        TypeError: An argument contains values that are not integers.
    """
    if box.query_origin is None and not box.has_extents:
        return TokenOffsets()
    batch, *queries, _, _ = inputs.query.shape
    layout = inputs.key.shape[1:-2]
    query_counts = key_counts = checked_counts("extents", box.extents, batch, layout, is_length=False)
    if box.extents is None:
        query_counts = checked_counts("query_lengths", box.query_lengths, batch, queries, is_length=True)
        key_counts = checked_counts("kv_lengths", box.kv_lengths, batch, layout, is_length=True)
    origin = checked_origin(box.query_origin, batch, [k - q for q, k in zip(queries, layout, strict=True)])
    if box.extents is None and query_counts is not None and origin is not None:
        query_counts = query_counts + origin
    origin, query_counts, key_counts = (
        None if each is None else replicated(each) for each in (origin, query_counts, key_counts)
    )
    # If a mesh shards the axis that jax.vmap maps, JAX cannot stack mapped arrays with unmapped arrays. Therefore each
    # array is padded to the shape of the result, and the padded arrays are added.
    missing = KERNEL_RANK - len(layout)
    if query_counts is None and key_counts is None and (origin is None or origin.ndim == 1):
        return TokenOffsets(None if origin is None else jnp.pad(origin[None], ((0, 1), (missing, 0))))
    zeros, ones = [0] * len(layout), [1] * missing
    extents_of_queries = queries if origin is None else layout
    constants = (
        [0] * KERNEL_RANK,
        [*ones, *(extents_of_queries if query_counts is None else zeros)],
        [*ones, *(layout if key_counts is None else zeros)],
    )
    layouts = jnp.broadcast_to(jnp.asarray(constants, jnp.int32), (batch, 3, KERNEL_RANK))
    for row, each in enumerate((origin, query_counts, key_counts)):
        if each is not None:
            layouts += jnp.pad(jnp.atleast_2d(each)[:, None], ((0, 0), (row, 2 - row), (missing, 0)))
    return TokenOffsets(layouts=layouts)


class UpsampledGrid(NamedTuple):
    """A query grid whose extents are multiples of the extents of the key grid.

    The queries form *cells*, one per key. The queries of a cell are folded into heads.

    Attributes:
        factors: Number of queries in a cell along each token dimension.
    """

    factors: tuple[int, ...]

    @classmethod
    def from_upsample(cls, upsample: Ints, rank: int) -> UpsampledGrid | None:
        """Create the grid from the argument ``upsample``. Return ``None`` if the query and key grids are equal.

        Raises:
            ValueError: ``upsample`` has a wrong length, or contains a number below 1.
            TypeError: ``upsample`` contains values that are not ints.
        """
        factors = static.int_tuple("upsample", upsample, rank)
        return None if set(factors) == {1} else cls(factors)

    @property
    def queries(self) -> int:
        """Number of queries in a cell."""
        return math.prod(self.factors)

    def folded(self, inputs: Inputs, is_box: bool) -> Inputs:
        """Fold the queries of each cell into heads.

        Args:
            inputs: The inputs.
            is_box: True if the query array can be smaller than the query grid.

        Raises:
            ValueError: The layout of the queries does not match ``upsample``, or the query heads are not a multiple of
                the key heads.
        """
        query, rank = inputs.query, len(self.factors)
        if query.ndim != rank + 3:  # rejected later
            return inputs
        batch, *layout, heads, width = query.shape
        if any(isinstance(n, int) and n % factor for n, factor in zip(layout, self.factors, strict=True)):
            raise ValueError(
                f"query has token layout {tuple(layout)}, which is not a multiple of upsample {self.factors}"
            )
        cells_of_key = inputs.key.shape[1:-2]
        if not is_box and len(cells_of_key) == rank and all(isinstance(n, int) for n in (*layout, *cells_of_key)):
            expected = tuple(n * factor for n, factor in zip(cells_of_key, self.factors, strict=True))
            if tuple(layout) != expected:
                raise ValueError(
                    f"query has token layout {tuple(layout)}, but upsample {self.factors} of the layout of key, "
                    f"{cells_of_key}, requires {expected}"
                )
        if inputs.key.ndim == rank + 3 and heads % inputs.key.shape[-2]:
            raise ValueError(
                f"query has {heads} heads, which is not a multiple of the {inputs.key.shape[-2]} heads of key and value"
            )
        cells = [n // factor for n, factor in zip(layout, self.factors, strict=True)]
        split = [n for pair in zip(cells, self.factors, strict=True) for n in pair]
        order = [0, *range(1, 2 * rank, 2), 2 * rank + 1, *range(2, 2 * rank + 1, 2), 2 * rank + 2]
        sources = [0, *(n for i in range(rank) for n in (1 + i, None)), rank + 1, rank + 2]
        query = reshaped(jnp.asarray(query), (batch, *split, heads, width), sources).transpose(order)
        sources = [*range(rank + 2), 2 * rank + 2]
        return inputs._replace(query=reshaped(query, (batch, *cells, heads * self.queries, width), sources))

    def unfolded(self, output: Output) -> Output:
        """Undo :meth:`folded` for an output and its logsumexp."""
        return Output(self._unfolded(output.out), self._unfolded(output.logsumexp[..., None])[..., 0])

    def scales(self, scale: jax.Array) -> jax.Array:
        """Repeat each head of an array ``[batch, heads, ...]`` per query of a cell, in the head order of ``folded``."""
        batch, heads, *rest = scale.shape
        repeated = jnp.broadcast_to(jnp.expand_dims(scale, 2), (batch, heads, self.queries, *rest))
        sources = [0, 1, *range(3, repeated.ndim)]
        return reshaped(repeated, (batch, heads * self.queries, *rest), sources)

    def _unfolded(self, array: jax.Array) -> jax.Array:
        rank = len(self.factors)
        batch, *cells, folded, width = array.shape
        heads = folded // self.queries
        sources: list[int | None] = [*range(rank + 2), *[None] * rank, rank + 2]
        array = reshaped(array, (batch, *cells, heads, *self.factors, width), sources)
        order = [0, *(n for i in range(rank) for n in (1 + i, rank + 2 + i)), rank + 1, 2 * rank + 2]
        layout: list[Any] = [n * factor for n, factor in zip(cells, self.factors, strict=True)]
        sources = [0, *range(1, 2 * rank, 2), 2 * rank + 1, 2 * rank + 2]
        return reshaped(array.transpose(order), (batch, *layout, heads, width), sources)
