"""What stands for an array: objects with ``__jax_array__``, such as the parameters of ``flax.nnx``."""

from __future__ import annotations

from typing import Any


def array_of(value: Any) -> Any:
    """The array that an object stands for; anything else as it is."""
    # JAX's own arrays have the name, and nothing behind it.
    convert = getattr(value, "__jax_array__", None)
    return value if convert is None else convert()
