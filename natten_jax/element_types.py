"""The element types of queries, keys and values that the operators take, and what is to be known of each."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ElementType:
    """An element type.

    Attributes:
        name: What NumPy and JAX call it.
        short_name: What the profiler calls it.
        bytes: Bytes of an element.
        accumulator: Name of the type in which such numbers are added up, and which logsumexp and scales have.
        output: Name of the type of the output where the caller names none; "" is the type itself.
        is_float8: Whether it has 8 bits: such arrays have scales, an output of another type, and no gradients.
    """

    name: str
    short_name: str
    bytes: int
    accumulator: str = "float32"
    output: str = ""
    is_float8: bool = False


#: By name.
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
#: Names of the element types that queries, keys and values may have.
SUPPORTED_DTYPES = tuple(ELEMENT_TYPES)
#: Those that have gradients, and that outputs may be of.
WIDE_DTYPES = tuple(name for name, each in ELEMENT_TYPES.items() if not each.is_float8)
