"""What cannot be differentiated, refused in this library's words: by kernels, and where arrays have 8 bits.

Kernels have the first derivative in reverse mode: JAX would blame ``custom_vjp`` or a primitive for everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from natten_jax.execution import taylor

REASON = (
    "native kernels have first derivatives in reverse mode only (jax.grad, jax.vjp): forward mode and higher "
    'derivatives take backend="flex-fna", or for attention "flex-fmha"'
)


def refuse(*_: Any, **__: Any) -> Any:
    """A rule of a primitive that has none.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(REASON)


def in_reverse_only(array: jax.Array) -> jax.Array:
    """``array``, whose tangents may be transposed but not computed."""
    result: jax.Array = _in_reverse_only_p.bind(array)
    return result


def _in_reverse_only_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    (primal,), (tangent,) = primals, tangents
    return in_reverse_only(primal), tangent if isinstance(tangent, ad.Zero) else _tangent_p.bind(tangent)


def _identity(name: str, jvp: Callable[..., Any]) -> Primitive:
    """The identity with a derivative of its own.

    A primitive, not a custom_jvp, whose rule JAX would trace first and batch afterwards: so a gradient through jax.vmap
    has tangents of whole batches, and only forward mode batches tangents.
    """
    primitive = Primitive(name)
    primitive.def_impl(lambda array: array)
    primitive.def_abstract_eval(lambda array: array)
    ad.primitive_jvps[primitive] = jvp
    batching.defvectorized(primitive)
    mlir.register_lowering(primitive, lambda _, array: [array])
    return primitive


_in_reverse_only_p = _identity("natten_jax_in_reverse_only", _in_reverse_only_jvp)
taylor.use_refusal(_in_reverse_only_p, refuse)

# A linear function that has a transpose (the identity) and no value. Whatever comes of its value is refused here, in
# front of the custom_vjp that takes it: what runs it, what compiles it, what maps it.
_tangent_p = Primitive("natten_jax_tangent")
_tangent_p.def_impl(refuse)
_tangent_p.def_abstract_eval(lambda tangent: tangent)
ad.deflinear2(_tangent_p, lambda cotangent, _: [cotangent])
batching.primitive_batchers[_tangent_p] = refuse
mlir.register_lowering(_tangent_p, refuse)


REASON_OF_FLOAT8 = (
    "8-bit arrays have no gradients: give the operators wider arrays and fp8, which quantises them and has the "
    "gradients of the call without it"
)


def forward_only(array: jax.Array) -> jax.Array:
    """``array``, which is not differentiated."""
    result: jax.Array = _forward_only_p.bind(array)
    return result


def _forward_only_jvp(primals: Sequence[Any], tangents: Sequence[Any], **_: Any) -> Any:
    raise NotImplementedError(REASON_OF_FLOAT8)


_forward_only_p = _identity("natten_jax_forward_only", _forward_only_jvp)
taylor.use_refusal(_forward_only_p, _forward_only_jvp)
