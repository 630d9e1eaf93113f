"""Base class of backends with native kernels: operands, attributes and results of their custom calls.

Native kernels expect three token dimensions. Arrays with fewer get leading token dimensions of extent 1.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arguments.arrays import LARGEST
from natten_jax.arrays.biases import over_tokens, products_of_heads, sinks_gradient
from natten_jax.arrays.boxes import without_padding
from natten_jax.arrays.operands import Cotangents, Gradients, Inputs, Operands, Saved, roles_of
from natten_jax.backends.base import Backend, Earlier, heads_rejection
from natten_jax.native import module as native
from natten_jax.native.module import KERNEL_RANK, ResultType, axis_rows, with_kernel_tiles
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem, Shape

#: Features that all families with native kernels support.
NATIVE_FEATURES = "own_layouts", "own_extents", "key_bias", "sinks", "additional_kv"

#: Lower bounds of ``HeadScales.query_factor`` by element type. If the factor were smaller, the kernels' query gradients
#: would lose digits: the smallest positive float16 number is 2^-24.
_SMALLEST_FACTOR = {"float16": 2.0**-10}
_SMALLEST_FACTOR_OF_OTHERS = 2.0**-64


@dataclasses.dataclass(frozen=True)
class HeadScales:
    """Scales of the logits, one per batch entry and head.

    Kernels multiply logits by ``abs(scale)``. They multiply query gradients by ``query_factor``, which is
    ``abs(scale)`` unless the scale is zero or so small that the gradients would lose digits. In these cases
    ``query_factor`` is larger. :meth:`convert_gradients` computes the correct gradients of query and scale from the
    kernels' query gradient.

    Attributes:
        scale: float32 ``[batch, heads]``. Scales that are infinite or too large for the kernels are NaN here. Only
            array operands can have such values: a Python number is checked earlier, and raises an error.
        query_factor: float32 ``[batch, heads]``. Factor by which kernels multiply query gradients.
    """

    scale: jax.Array
    query_factor: jax.Array

    @classmethod
    def from_scale(cls, problem: Problem, scale: jax.Array) -> HeadScales:
        """Compute the scales and factors from the ``scale`` operand."""
        scale = jnp.where(jnp.abs(scale) <= LARGEST, scale, jnp.nan)
        smallest = _SMALLEST_FACTOR.get(problem.dtype, _SMALLEST_FACTOR_OF_OTHERS)
        return cls(scale, jnp.maximum(jnp.where(jnp.isnan(scale), smallest, jnp.abs(scale)), np.float32(smallest)))

    def signed(self, query: jax.Array) -> jax.Array:
        """Multiply the query by the sign of the scale. If the scale is zero, infinite elements become NaN."""
        return query * over_tokens(jnp.sign(self.scale), query).astype(query.dtype)

    def operand(self) -> jax.Array:
        """Return the kernels' operand ``[batch, heads, 2]``: scale and query factor, both positive and finite."""
        # Kernels require positive scales, so 1 replaces a scale of NaN or 0. In these cases signed() has already
        # multiplied the query by NaN or 0.
        is_used = jnp.abs(self.scale) > 0
        return jnp.stack([jnp.where(is_used, jnp.abs(self.scale), 1), self.query_factor], axis=-1)

    def convert_gradients(self, gradients: Gradients, query: jax.Array) -> Gradients:
        """Convert the kernels' gradients to gradients with respect to the call's query and scale.

        Args:
            gradients: Gradients that the kernels return. The query gradient is with respect to the query that
                :meth:`signed` returns, and is multiplied by ``query_factor`` instead of the scale.
            query: The query of the call.
        """
        wide = gradients.query.astype(jnp.float32)
        products = products_of_heads(wide, query.astype(jnp.float32))
        query_gradient = wide * over_tokens(self.scale / self.query_factor, query)
        return gradients._replace(query=query_gradient.astype(query.dtype), scale=products / self.query_factor)


def with_heads_of_queries(inputs: Inputs) -> Inputs:
    """Repeat keys and values so that each query head has its own copy."""
    groups = inputs.query.shape[-2] // inputs.key.shape[-2]
    return _map_key_values(lambda array: jnp.repeat(array, groups, axis=-2), inputs)


def sum_shared_heads(gradients: Gradients, inputs: Inputs) -> Gradients:
    """Sum gradients of keys and values over the query heads that share a key/value head.

    This is the transpose of :func:`with_heads_of_queries`.
    """
    heads_kv = inputs.key.shape[-2]

    def summed(array: jax.Array) -> jax.Array:
        *outer, heads, width = array.shape
        groups = array.reshape(*outer, heads_kv, heads // heads_kv, width)
        return jnp.sum(groups, axis=-2, dtype=jnp.float32).astype(array.dtype)

    return _map_key_values(summed, gradients)


def _map_key_values(change: Callable[[jax.Array], jax.Array], inputs: Inputs) -> Inputs:
    """Apply a function to all inputs whose head dimension counts key/value heads."""
    roles = jax.tree.unflatten(jax.tree.structure(inputs), roles_of(inputs))
    return jax.tree.map(lambda array, role: change(array) if role.is_key_value else array, inputs, roles)


#: Scale attribute of the kernels if the problem's scale is zero, since kernels require a positive scale. In this case
#: the query is multiplied by zero. The number is so small that no accumulator overflows.
_SCALE_FOR_ZERO = 2.0**-64


class NativeBackend(Backend):
    """A backend whose forward pass is one custom call. The call's first results are output, logsumexp and remainder."""

    @abc.abstractmethod
    def call_forward(self, plan: Plan, operands: Operands, types: list[ResultType]) -> list[jax.Array]:
        """Make the forward custom call.

        Args:
            plan: Plan of the pass.
            operands: Operands of the call.
            types: Types of the output, the logsumexp and the remainder.
        """

    def forward(self, plan: Plan, operands: Operands, *, saves: bool = False, earlier: Earlier | None = None) -> Saved:
        """Compute output and logsumexp, and the remainder if ``saves`` is set."""
        *per_query, _ = operands.inputs.query.shape
        shape = *with_kernel_rank(operands.inputs.query, plan.problem.rank).shape[:-1], operands.inputs.value.shape[-1]
        types = [
            ResultType(shape, jnp.dtype(plan.problem.output_dtype)),
            ResultType(shape[:-1], jnp.float32),
            ResultType(shape[:-1] if saves else (0,), jnp.float32),
        ]
        out, logsumexp, remainder, *_ = self.call_forward(plan, operands, types)
        saved = Saved(out.reshape(*per_query, shape[-1]), logsumexp.reshape(per_query), None)
        return saved._replace(remainder=remainder.reshape(per_query)) if saves else saved

    @abc.abstractmethod
    def call_backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
        """Call the backward kernels. Query heads that share keys and values must have the same scale.

        Args:
            plan: Plan of the pass.
            operands: Operands of the call.
            saved: Saved results of the forward pass.
            cotangents: Cotangents of output and logsumexp.
        """

    def backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
        problem, inputs = plan.problem, operands.inputs
        if inputs.scale is None or problem.heads == problem.heads_kv:
            return self.call_backward(plan, operands, saved, cotangents)
        # Kernels sum a key's gradient over the query heads that share the key, and multiply the sum by the scale. If
        # each head has its own scale, repeat the keys per query head, so that heads share no keys.
        plan = dataclasses.replace(plan, problem=dataclasses.replace(problem, heads_kv=problem.heads))
        repeated = operands._replace(inputs=with_heads_of_queries(inputs))
        return sum_shared_heads(self.call_backward(plan, repeated, saved, cotangents), inputs)


def narrowest_forms(backend: type[Backend], forms: Sequence[Any], problem: Problem) -> list[Mapping[str, Any]]:
    """Return the kernel variants with the smallest head dimension that is sufficient for a problem.

    Raises:
        ValueError: The backend does not support the problem's head dimensions.
    """
    if reason := heads_rejection(backend.capabilities, problem):
        raise ValueError(f"{backend.family} has no tiles for these heads: {reason}")
    able = [form for form in forms if form["head_dim"] >= max(problem.head_dim, problem.head_dim_v)]
    narrowest = min(form["head_dim"] for form in able)
    return [form for form in able if form["head_dim"] == narrowest]


def with_kernel_rank(array: jax.Array, rank: int) -> jax.Array:
    """Reshape an array to three token dimensions after the batch; missing leading dimensions get extent 1."""
    return array.reshape(array.shape[0], *(1,) * (KERNEL_RANK - rank), *array.shape[1:])


def with_kernel_ranks(problem: Problem, saved: Saved, cotangents: Cotangents) -> tuple[Saved, Cotangents]:
    """Reshape the arrays of a backward pass to three token dimensions."""
    return jax.tree.map(functools.partial(with_kernel_rank, rank=problem.rank), (saved, cotangents))


def _times_sign_of_scale(problem: Problem, array: jax.Array) -> jax.Array:
    """Multiply a query, or its gradient, by the sign of the problem's scale, because kernels require positive scales.

    The sign is determined after rounding the scale to float32. If the scale is then zero, the array is multiplied by
    zero. Infinities and NaN become NaN, as they would in the logits.
    """
    factor = int(np.sign(np.float32(problem.scale)))
    return array if factor == 1 else array * jnp.asarray(factor, array.dtype)


def kernel_operands(problem: Problem, operands: Operands) -> list[jax.Array]:
    """Return the operands with which every custom call begins. Empty arrays stand for operands that are ``None``."""
    inputs = operands.inputs
    query, key, value = [with_kernel_rank(array, problem.rank) for array in (inputs.query, inputs.key, inputs.value)]
    if inputs.scale is None:
        query, scales = _times_sign_of_scale(problem, query), or_empty(None)
    else:
        head_scales = HeadScales.from_scale(problem, inputs.scale)
        query, scales = head_scales.signed(query), head_scales.operand()
    additional_keys, additional_values = inputs.additional_keys, inputs.additional_values
    if additional_keys is None or additional_values is None:
        additional_keys = jnp.zeros((key.shape[0], 0, *key.shape[-2:]), key.dtype)
        additional_values = jnp.zeros((value.shape[0], 0, *value.shape[-2:]), value.dtype)
    origins = or_empty(operands.origins, (0, KERNEL_RANK), jnp.int32)
    return [query, key, value, additional_keys, additional_values, origins, scales]


def forward_operands(problem: Problem, operands: Operands) -> list[jax.Array]:
    """Return the operands with which every forward custom call begins.

    Only the last operand differs from :func:`kernel_operands`. It is ``[batch, heads, 2]``, and contains the scale and
    the sink of each head. Without sinks, the second column is ``-inf``. The last operand is empty if the scale is not
    an array and there are no sinks.
    """
    *arrays, scales = kernel_operands(problem, operands)
    inputs = operands.inputs
    if inputs.scale is None and inputs.sinks is None:
        return [*arrays, scales]
    shape = inputs.query.shape[0], inputs.query.shape[-2]
    logit_scales = jnp.full(shape, scale_of_kernels(problem), jnp.float32) if inputs.scale is None else scales[..., 0]
    sinks = -jnp.inf if inputs.sinks is None else inputs.sinks[..., 0]
    return [*arrays, jnp.stack([logit_scales, jnp.broadcast_to(sinks, shape)], axis=-1)]


def or_empty(array: jax.Array | None, shape: Shape = (0,), dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """Return an array, or an empty array for ``None``: filling a larger array would launch a kernel."""
    return jnp.zeros(shape, dtype) if array is None else array


def layouts_operand(operands: Operands) -> jax.Array:
    """Return the ``layouts`` operand of kernels that support different layouts of batch entries."""
    return or_empty(operands.layouts, (0, KERNEL_RANK, KERNEL_RANK), jnp.int32)


def key_bias_operand(problem: Problem, operands: Operands) -> jax.Array:
    """Return the key biases of a call: ``[batch, *keys, heads]``, or ``[batch, *keys, 1]`` if all heads share them."""
    per_head, shared = operands.inputs.key_bias, operands.inputs.shared_key_bias
    if per_head is not None:
        return with_kernel_rank(per_head[..., 0], problem.rank)
    return or_empty(None) if shared is None else with_kernel_rank(shared[..., None], problem.rank)


def key_bias_gradient_type(problem: Problem, operands: Operands) -> ResultType:
    """Return the type of the key biases' gradient, which is per query head even if all heads share the biases."""
    biases = key_bias_operand(problem, operands)
    heads = operands.inputs.query.shape[-2]
    return ResultType((*biases.shape[:-1], heads) if biases.ndim > 1 else (0,), jnp.float32)


def with_key_bias_gradient(gradients: Gradients, inputs: Inputs, key_bias_gradient: jax.Array) -> Gradients:
    """Return the gradients with the gradient of the key biases, which is summed over heads that share a bias."""
    per_head, shared = inputs.key_bias, inputs.shared_key_bias
    return gradients._replace(
        key_bias=None if per_head is None else key_bias_gradient.reshape(per_head.shape),
        shared_key_bias=None if shared is None else jnp.sum(key_bias_gradient, axis=-1).reshape(shared.shape),
    )


def with_sinks_gradient(gradients: Gradients, inputs: Inputs, logsumexp: jax.Array, delta: jax.Array) -> Gradients:
    """Return the gradients with the gradient of the sinks (:func:`natten_jax.arrays.biases.sinks_gradient`)."""
    sinks = inputs.sinks
    return gradients if sinks is None else gradients._replace(sinks=sinks_gradient(sinks, logsumexp, delta))


def entry_maps(operands: Operands, per_entry: int) -> ResultType:
    """Return the type of the scratch memory for tensor maps: ``per_entry`` maps per batch entry.

    If all batch entries have the same layout, no maps in scratch memory are needed, and the memory is empty.
    """
    batch = 0 if operands.layouts is None else operands.layouts.shape[0]
    return ResultType((batch * per_entry, _MAP_BYTES), jnp.uint8)


#: Size of a tensor map in bytes.
_MAP_BYTES = 128


def call_for_gradients(
    target: str,
    plan: Plan,
    operands: Operands,
    per_query: Sequence[jax.Array],
    further_results: Sequence[ResultType],
    **more: int,
) -> tuple[Gradients, Sequence[jax.Array]]:
    """Make a backward custom call. Its first results are the gradients of query, key, value and additional tokens.

    Args:
        target: Name of the custom call target.
        plan: Plan of the backward pass.
        operands: Operands of the call.
        per_query: Operands that follow the operands from :func:`kernel_operands`.
        further_results: Types of the results that follow these gradients, such as gradients of biases.
        **more: Further attributes.

    Returns:
        The gradients of the inputs, and the results with the types ``further_results``.
    """
    problem, inputs = plan.problem, operands.inputs
    arrays = kernel_operands(problem, operands)
    *with_gradients, _, _ = arrays  # without origins and scales
    types = [ResultType(array.shape, array.dtype) for array in with_gradients]
    results = native.call(target, [*types, *further_results], *arrays, *per_query, **attributes(plan), **more)
    pairs = zip(inputs, results[: len(types)], strict=False)
    gradients = Inputs(*[input_ if input_ is None else new.reshape(input_.shape) for input_, new in pairs])  # type: ignore[arg-type]
    if inputs.scale is None:
        gradients = gradients._replace(query=_times_sign_of_scale(problem, gradients.query))
    else:
        # The scale's gradient is a sum of products of the query and the query's gradient. In the padding, the gradient
        # is zero, but the query may be NaN, and zero times NaN is NaN. So set the query's padding to zero.
        query = without_padding(operands.layouts, inputs).query
        gradients = HeadScales.from_scale(problem, inputs.scale).convert_gradients(gradients, query)
    return gradients, results[len(types) :]


def scale_of_kernels(problem: Problem) -> float:
    """Return the kernels' scale attribute. Kernels use it unless they have an operand with the scale of each head."""
    return abs(float(problem.scale)) if np.float32(problem.scale) else _SCALE_FOR_ZERO


def attributes(plan: Plan) -> dict[str, Shape | float]:
    """Return the attributes of every custom call. The scale is positive: its sign multiplies the query instead."""
    problem = plan.problem
    q_tile, kv_tile = with_kernel_tiles(problem, plan.tiles)
    shapes = {"q_tile_shape": q_tile, "kv_tile_shape": kv_tile}
    return {"axes": axis_rows(problem), "scale": scale_of_kernels(problem), **shapes}
