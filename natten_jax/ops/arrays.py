"""The array arguments of the public functions: what they have to agree in, and the problem that they describe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arguments.stand_ins import array_of
from natten_jax.arguments.static import one_bool
from natten_jax.arguments.symbolic_batch import check_extents, planned_batch
from natten_jax.arrays.operands import Inputs
from natten_jax.element_types import SUPPORTED_DTYPES
from natten_jax.problem import Problem, problem_of
from natten_jax.windows import WindowArguments

#: An array that becomes a JAX array as ``jnp.asarray`` makes it.
ArrayLike = jax.Array | np.ndarray[Any, Any]
#: An array, or what stands for one that is not there: a problem takes shapes and element types alone.
Shaped = jax.Array | jax.ShapeDtypeStruct


def as_jax_array(name: str, array: ArrayLike | None) -> jax.Array:
    """``array``, or what it stands for, as a JAX array; a NumPy one in the element type that JAX's settings allow.

    Raises:
        TypeError: It is none that :func:`check_array` takes.
    """
    if getattr(array, "__jax_array__", None) is not None:  # a call less for each array that is one
        array = array_of(array)
    dtype = getattr(array, "dtype", None)
    if not isinstance(dtype, np.dtype) or not dtype.isnative:  # a call less for each array that is right
        check_array(name, array)
    if isinstance(array, np.ndarray) and jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        array = jnp.asarray(array)
    return array  # type: ignore[return-value]  # JAX's functions take NumPy's arrays as they are


#: Dtypes of operands that are added to logits. They have infinities.
_LOGIT_DTYPES = ("float16", "bfloat16", "float32", "float64")


def as_logit_term(name: str, array: ArrayLike | None) -> jax.Array:
    """``array``, which is added to logits, as a JAX array in its own element type.

    Raises:
        ValueError: Its dtype is not supported.
        TypeError: It is not an array, or :func:`check_array` rejects it.
    """
    array = as_jax_array(name, array)
    if array.dtype.name not in _LOGIT_DTYPES:
        raise ValueError(
            f"{name} has dtype {array.dtype.name}, but it is added to logits: {', '.join(_LOGIT_DTYPES)} are supported"
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

    Arrays, of which shapes and element types are read, are one of so many equal ``parts`` of each token dimension;
    ``None`` is one of each. ``clamp_window`` takes windows that fit in place of larger ones.
    Queries are a box of the layout where ``is_box``.
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
    window.checked(rank)  # without a layout in the place of a kernel_size
    tokens = [extent * each for extent, each in zip(layout, parts or (1,) * rank, strict=True)]
    return problem_of(
        tokens,
        **(window.clamped(tokens) if clamp_window else window)._asdict(),
        scale=scale,
        additional_kv=_check_additional_kv(inputs),
        **_sizes(query, key, value),
    )


def attention_problem(
    query: Shaped,
    key: Shaped,
    value: Shaped,
    scale: float | None,
    is_causal: bool | np.ndarray[Any, Any] | jax.Array,
    *,
    is_box: bool = False,
) -> Problem:
    """Check the arguments of ``attention`` and describe the problem; ``is_box`` as in neighborhood attention."""
    _check_arrays(query, key, value, 4, "attention")
    if key.shape[1] != value.shape[1]:
        raise ValueError(
            f"value has {value.shape[1]} tokens, but key has {key.shape[1]}: "
            "key and value must have the same sequence length"
        )
    return problem_of(
        _layout_of_box(query, key) if is_box else query.shape[1:2],
        is_causal=one_bool("is_causal", is_causal),
        operator="fmha",
        kv_layout=key.shape[1:2],
        scale=scale,
        **_sizes(query, key, value),
    )


def check_array(name: str, array: Any) -> None:
    """Check that an argument is an array.

    Raises:
        TypeError: It is none, or one in another byte order than this machine's, which JAX does not take.
    """
    dtype = getattr(array, "dtype", None)
    if not isinstance(dtype, np.dtype):
        raise TypeError(f"{name} must be an array, got {type(array).__name__}")
    if not dtype.isnative:
        raise TypeError(
            f"{name} has dtype {dtype.str!r}, whose bytes are in another order than this machine's, and JAX takes no "
            f"such arrays: {name}.astype({dtype.name!r}) puts them in order"
        )


def _layout_of_box(query: Shaped, key: Shaped) -> tuple[int, ...]:
    """The layout of keys, of which queries are a box."""
    layout = key.shape[1:-2]
    if any(some > every for some, every in zip(query.shape[1:-2], layout, strict=True)):
        raise ValueError(
            f"query has token layout {query.shape[1:-2]}, which is larger than that of key, {layout}: with "
            "query_origin the queries are a box of the layout of the keys"
        )
    return layout


def _sizes(query: Shaped, key: Shaped, value: Shaped) -> dict[str, Any]:
    return {
        "batch": planned_batch(query.shape[0]),
        "heads": query.shape[-2],
        "heads_kv": key.shape[-2],
        "head_dim": query.shape[-1],
        "head_dim_v": value.shape[-1],
        "dtype": query.dtype.name,
    }


def _check_arrays(query: Shaped, key: Shaped, value: Shaped, ndim: int, function: str) -> None:
    arrays = {"query": query, "key": key, "value": value}
    for name, array in arrays.items():
        check_array(name, array)
        if array.ndim != ndim:
            raise ValueError(
                f"{name} has shape {array.shape}, but {function} takes {ndim}-dimensional arrays "
                "[batch, *token layout, heads, head_dim]"
            )
        check_extents(name, array.shape, ("batch", *("a token extent",) * (ndim - 3), "heads", "head_dim"))
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
    query, key, value, keys, values, *_ = inputs
    if keys is None and values is None:
        return 0
    if keys is None or values is None:
        given, missing = ("additional_keys", "additional_values")[:: 1 if values is None else -1]
        shape = getattr(keys if values is None else values, "shape", None)
        raise ValueError(f"{given} (shape {shape}) was given without {missing}: give both or neither")
    for name, array, source, source_name in (
        ("additional_keys", keys, key, "key"),
        ("additional_values", values, value, "value"),
    ):
        check_array(name, array)
        if array.ndim == 4:
            check_extents(name, array.shape, ("batch", "the number of tokens", "heads", "head_dim"))
        expected = (query.shape[0], keys.shape[1] if keys.ndim == 4 else "n", *source.shape[-2:])
        if array.ndim != 4 or array.shape != expected or array.shape[1] < 1:
            raise ValueError(
                f"{name} has shape {array.shape}, but [batch, n, heads_kv, head_dim] of {source_name} asks for "
                f"{expected} with n >= 1"
            )
        if array.dtype != source.dtype:
            raise ValueError(f"{name} has dtype {array.dtype.name}, but {source_name} has {source.dtype.name}")
    return int(keys.shape[1])
