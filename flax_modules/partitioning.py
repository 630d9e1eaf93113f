"""How parameters are annotated with names of mesh axes: what both flavours of Flax need help with.

An annotation of a projection's kernel names a mesh axis, or none, for each of its dimensions, as in Flax's own
``MultiHeadAttention``. Projections are apart, and each has a dimension for heads, so that query, key and value come out
of them split over heads, and nothing is communicated before the output's projection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax.core import meta
from flax.typing import Initializer
from jax.sharding import PartitionSpec

from natten_jax.arguments.static import shown


def check_metadata(name: str, metadata: Mapping[str, Any], rank: int) -> None:
    """Check what ``flax.nnx`` shall keep beside a parameter's value.

    Args:
        name: The argument.
        metadata: What it is, or what stands in for it.
        rank: Dimensions of the parameter.

    Raises:
        ValueError: ``out_sharding`` names mesh axes of more dimensions than the parameter has.
        TypeError: It is not a mapping.
    """
    if not isinstance(metadata, Mapping):
        raise TypeError(f"{name} must be a mapping, got {shown(metadata)}")
    names = metadata.get("out_sharding")
    if isinstance(names, (tuple, PartitionSpec)) and len(names) > rank:
        raise ValueError(
            f"{name} has out_sharding {tuple(names)} (given, or that of the queries' projection) with {len(names)} "
            f"entries, but the parameter has {rank} dimension(s): each has one entry at most"
        )


def annotating(initializer: Initializer) -> Initializer:
    """An initializer for ``flax.linen``'s ``DenseGeneral`` that may annotate also while a mesh is set.

    ``DenseGeneral`` initializes a matrix, or a vector for the bias, and gives it its own shape afterwards. Annotations
    are meant for that shape, but where there is a mesh they are applied before.
    """

    def initialize(*args: Any, **kwargs: Any) -> Any:
        value = initializer(*args, **kwargs)
        return _NotYetShaped(value) if isinstance(value, meta.Partitioned) else value

    return initialize


@dataclasses.dataclass(frozen=True)
class _NotYetShaped(meta.AxisMetadata[jax.Array]):
    """An annotated value until it has the shape that the annotation is for."""

    annotated: meta.Partitioned[jax.Array]

    def unbox(self) -> jax.Array:
        return self.annotated.unbox(apply_constraint=False)

    def replace_boxed(self, val: Any) -> Any:
        return self.annotated.replace_boxed(val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> Any:
        raise NotImplementedError("lives within the initialization of one parameter")

    remove_axis = add_axis
