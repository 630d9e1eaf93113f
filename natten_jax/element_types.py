"""Element types that the operators support for queries, keys and values, and the properties of these types."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ElementType:
    """An element type.

    Attributes:
        name: Name in NumPy and JAX.
        short_name: Name in the profiler.
        bytes: Number of bytes of an element.
        accumulator: Name of the type for accumulation, for the logsumexp and for scales.
        output: Name of the default type of outputs. If it is empty, outputs have the type of the inputs by default.
        is_float8: True for 8-bit types. For arrays of these types, operators accept scales and return an output of
            another type. Arrays of these types are not differentiable.
    """

    name: str
    short_name: str
    bytes: int
    accumulator: str = "float32"
    output: str = ""
    is_float8: bool = False


#: Element types by name.
ELEMENT_TYPES = {
    each.name: each
    for each in (
        ElementType("float16", "fp16", 2),
        ElementType("bfloat16", "bf16", 2),
        ElementType("float32", "fp32", 4),
        ElementType("float64", "fp64", 8, "float64"),
        ElementType("float8_e4m3fn", "e4m3", 1, output="bfloat16", is_float8=True),
        ElementType("float8_e5m2", "e5m2", 1, output="bfloat16", is_float8=True),
    )
}
#: Names of all element types that queries, keys and values can have.
SUPPORTED_DTYPES = tuple(ELEMENT_TYPES)
#: Names of the element types that have gradients. Outputs always have one of these types.
WIDE_DTYPES = tuple(name for name, each in ELEMENT_TYPES.items() if not each.is_float8)
