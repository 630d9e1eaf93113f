"""The arrays of a call, by what they are to its passes.

Beside its role, the type of an array says its shape, in jaxtyping's words: names of extents, of which ``*queries`` and
``*keys`` are those of as many token dimensions as the problem has. An extent is the same wherever a call has its name.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from natten_jax.arrays.roles import Role


class Inputs(NamedTuple):
    """The arrays of one call that have gradients, heads last, in the caller's rank.

    Attributes:
        query: Queries.
        key: Keys.
        value: Values.
        additional_keys: Keys that every query sees, or ``None``.
        additional_values: Their values, or ``None``.
        scale: In the accumulator's element type: factors of the logits, in place of the problem's; ``None`` where that
            is the scale.
        relative_bias: In the accumulator's element type: what is added to logits, for each offset of a key from a query
            within a window, as :attr:`natten_jax.problem.Problem.bias_shape` has them, flattened; or ``None``. One
            table for all batch entries; where mapped axes have become a part of the batch, one for each.
        key_bias: Likewise: what is added to the logits of a key; or ``None``.
        shared_key_bias: In place of ``key_bias`` where all heads have the same; or ``None``.
        sinks: In the accumulator's element type: a logit of a head in its softmax's denominator, and no key stands
            behind; or ``None``. As many as tables: one for all batch entries, or one for each.
        key_scale: float32: factors of keys, beside those that the factors of logits have; or ``None``.
        value_scale: Likewise of values.
        out_scale: float32: factors of the output of 8-bit arrays, which the values of a head share; or ``None``.
    """

    query: Annotated[jax.Array, Role.QUERY, "batch *queries heads head_dim"]
    key: Annotated[jax.Array, Role.KEY_VALUE, "batch *keys heads_kv head_dim"]
    value: Annotated[jax.Array, Role.KEY_VALUE, "batch *keys heads_kv head_dim_v"]
    additional_keys: Annotated[jax.Array | None, Role.ADDITIONAL, "batch additional_kv heads_kv head_dim"] = None
    additional_values: Annotated[jax.Array | None, Role.ADDITIONAL, "batch additional_kv heads_kv head_dim_v"] = None
    scale: Annotated[jax.Array | None, Role.PER_HEAD, "batch heads"] = None
    relative_bias: Annotated[jax.Array | None, Role.PER_HEAD_OF_ALL, "tables heads entries"] = None
    key_bias: Annotated[jax.Array | None, Role.PER_KEY, "batch *keys heads 1"] = None
    shared_key_bias: Annotated[jax.Array | None, Role.PER_KEY_OF_ALL_HEADS, "batch *keys"] = None
    sinks: Annotated[jax.Array | None, Role.PER_HEAD_OF_ALL, "tables heads 1"] = None
    key_scale: Annotated[jax.Array | None, Role.KEY_VALUE, "batch *keys heads_kv 1"] = None
    value_scale: Annotated[jax.Array | None, Role.KEY_VALUE, "batch *keys heads_kv 1"] = None
    out_scale: Annotated[jax.Array | None, Role.PER_HEAD, "batch heads"] = None


#: Cotangents of the inputs, in their shapes and element types.
Gradients = Inputs


class Operands(NamedTuple):
    """The arrays of a pass.

    Attributes:
        inputs: Those that have gradients.
        origins: int32: where the local query and key/value tokens start in the global layout,
            last dimension last; ``None`` where both are the whole layout.
        layouts: int32, in place of origins where batch entries differ: where the queries of an entry
            start, how many queries its layout has, and how many keys and values; last dimension last. ``None`` where
            entries are alike.
    """

    inputs: Inputs
    origins: Annotated[jax.Array | None, Role.WHOLE, "2 3"] = None
    layouts: Annotated[jax.Array | None, Role.PER_ENTRY, "batch 3 3"] = None

    @property
    def is_placed(self) -> bool:
        """Whether queries are a box of a layout, or keys a part of it: some may see none."""
        return self.origins is not None or self.layouts is not None

    def with_origins_alone(self) -> Operands:
        """The same of one entry of the batch, all of whose layout is real, in terms of origins."""
        if self.layouts is None:
            return self
        assert self.layouts.shape[0] == 1, "one entry of the batch at a time"
        of_query = self.layouts[0, 0]
        return self._replace(origins=jnp.stack([of_query, jnp.zeros_like(of_query)]), layouts=None)


class Output(NamedTuple):
    """Output and logsumexp."""

    out: Annotated[jax.Array, Role.QUERY, "batch *queries heads head_dim_v"]
    logsumexp: Annotated[jax.Array, Role.PER_QUERY, "batch *queries heads"]


class Cotangents(NamedTuple):
    """Those of output and logsumexp, where ``None`` stands for zeros: a call rarely differentiates its logsumexp."""

    out: Annotated[jax.Array, Role.QUERY, "batch *queries heads head_dim_v"]
    logsumexp: Annotated[jax.Array | None, Role.PER_QUERY, "batch *queries heads"] = None

    def of_both(self) -> Output:
        """The same as arrays."""
        zeros = jnp.zeros(self.out.shape[:-1], jnp.promote_types(self.out.dtype, jnp.float32))
        return Output(self.out, zeros if self.logsumexp is None else self.logsumexp)


class Saved(NamedTuple):
    """What the backward pass reads of the forward pass: its output, and what float32 leaves out of the logsumexp.

    Attributes:
        out: As in :class:`Output`.
        logsumexp: As in :class:`Output`.
        remainder: float32, in base 2 (csrc/include/natten_jax/logsumexp.h). Where
            logits are large the rounding of the logsumexp alone would change weights by any factor. ``None`` where
            another backend computed the output: logits differ from backend to backend, by as much as this corrects.
    """

    out: Annotated[jax.Array, Role.QUERY, "batch *queries heads head_dim_v"]
    logsumexp: Annotated[jax.Array, Role.PER_QUERY, "batch *queries heads"]
    remainder: Annotated[jax.Array | None, Role.PER_QUERY, "batch *queries heads"]


class Differentiable(NamedTuple):
    """What plain JAX computes where it may be differentiated.

    Attributes:
        out: As in :class:`Output`, but in the accumulator's element type: derivatives are the more accurate for it.
        logsumexp: As in :class:`Output`.
        residuals: In the accumulator's element type: what else the derivative wants to know. ``None`` where that is
            nothing.
    """

    out: Annotated[jax.Array, Role.QUERY, "batch *queries heads head_dim_v"]
    logsumexp: Annotated[jax.Array, Role.PER_QUERY, "batch *queries heads"]
    residuals: Annotated[jax.Array | None, Role.QUERY, "batch *queries heads width"] = None
