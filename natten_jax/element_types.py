"""The element types of queries, keys and values that the operators take, and what is to be known of each."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ElementType:
    """An element type.

    Attributes:
        name: What NumPy and JAX call it.
        short_name: What the profiler calls it.
        bytes: Of an element.
        accumulator: Name of the type in which such numbers are added up, and which logsumexp and scales have.
    """

    name: str
    short_name: str
    bytes: int
    accumulator: str = "float32"


#: By name.
ELEMENT_TYPES = {
    each.name: each
    for each in (
        ElementType("float16", "fp16", 2),
        ElementType("bfloat16", "bf16", 2),
        ElementType("float32", "fp32", 4),
        ElementType("float64", "fp64", 8, "float64"),
    )
}
SUPPORTED_DTYPES = tuple(ELEMENT_TYPES)
