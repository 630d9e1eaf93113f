"""Calls of the public functions with random arrays. This module uses only public names of the package."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import natten_jax

#: Operands that are float32, even if query, key and value have another element type.
_FLOAT32 = "relative_bias", "key_bias", "sinks", "scale"


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a public function.

    Attributes:
        function: Name of the function.
        shapes: Shapes of the floating-point arrays, by argument name.
        options: Other arguments, by name. A list is passed as an int32 array.
        dtype: Element type of query, key and value.
    """

    function: str
    shapes: Mapping[str, tuple[int, ...]]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"

    def dtype_of(self, name: str) -> Any:
        """Return the element type of an array."""
        return jnp.dtype("float32" if name in _FLOAT32 else self.dtype)

    def abstract_arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and element types of the arrays."""
        return {name: jax.ShapeDtypeStruct(shape, self.dtype_of(name)) for name, shape in self.shapes.items()}

    def arrays(self, seed: int) -> dict[str, np.ndarray]:
        """Return random arrays."""
        rng = np.random.default_rng(seed)
        return {name: rng.standard_normal(shape).astype(self.dtype_of(name)) for name, shape in self.shapes.items()}

    def run(self, arrays: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
        """Return output and logsumexp."""
        options = {
            name: jnp.asarray(value, jnp.int32) if isinstance(value, list) else value
            for name, value in self.options.items()
        }
        out, lse = getattr(natten_jax, self.function)(**arrays, **options, return_lse=True)
        return out, lse

    def with_gradients(self, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Return output, logsumexp and the gradient of each array. The cotangent of a result is its cosine."""
        (out, lse), pullback = jax.vjp(self.run, dict(arrays))
        (gradients,) = pullback((cosines(out), cosines(lse)))
        return {"out": out, "lse": lse, **{f"d_{name}": each for name, each in gradients.items()}}

    def gradients(self, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Return the gradient of each array."""
        results = self.with_gradients(arrays)
        return {name: results[f"d_{name}"] for name in arrays}


def cosines(array: Any) -> jax.Array:
    """Return an array with the cosine of each finite element, and 1 in place of each non-finite element."""
    return jnp.cos(jnp.where(jnp.isfinite(array), array, 0))


def windows(
    layout: tuple[int, ...],
    heads: int = 2,
    heads_kv: int = 2,
    head_dim: int = 8,
    *,
    queries: tuple[int, ...] | None = None,
    additional: int = 0,
    **more: tuple[int, ...],
) -> dict[str, tuple[int, ...]]:
    """Return the array shapes of a call with two batch entries, by argument name."""
    shapes = {"query": (2, *(queries or layout), heads, head_dim)}
    shapes |= dict.fromkeys(("key", "value"), (2, *layout, heads_kv, head_dim))
    if additional:
        shapes |= dict.fromkeys(("additional_keys", "additional_values"), (2, additional, heads_kv, head_dim))
    return {**shapes, **more}
