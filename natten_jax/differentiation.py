"""What kernels cannot differentiate, refused in this library's words.

They have the first derivative in reverse mode: JAX would blame ``custom_vjp`` or a primitive for everything else.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

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


@jax.custom_jvp
def in_reverse_only(array: jax.Array) -> jax.Array:
    """``array``, whose tangents may be transposed but not computed."""
    return array


@in_reverse_only.defjvp
def _in_reverse_only_jvp(primals: Any, tangents: Any) -> Any:
    return primals[0], _tangent_p.bind(tangents[0])


# A linear function that has a transpose (the identity) and no value.
_tangent_p = Primitive("natten_jax_tangent")
_tangent_p.def_impl(refuse)
_tangent_p.def_abstract_eval(lambda tangent: tangent)
ad.deflinear2(_tangent_p, lambda cotangent, _: [cotangent])
batching.defvectorized(_tangent_p)
mlir.register_lowering(_tangent_p, refuse)
