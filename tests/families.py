"""The backend families under test. A new family is one more line in ``FAMILIES``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

#: Largest ``||result - reference|| / ||reference||`` of outputs, logsumexp and gradients, by element type.
BOUNDS: Mapping[str, float] = MappingProxyType({"float32": 2e-6, "float16": 1e-3, "bfloat16": 6e-3, "float64": 1e-13})


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of backends, ``<name>-fna`` and ``<name>-fmha``.

    Attributes:
        name: The family's name.
        dtypes: Element types that it computes in, the first of which most tests use.
        problems: How many random problems a test of it draws by default; a matter of how long they compile.
        needs_gpu: Whether its tests are marked ``gpu``.
        target: Prefix of the custom calls that it compiles to, or ``None`` where it is plain JAX.
    """

    name: str
    dtypes: tuple[str, ...]
    problems: int
    needs_gpu: bool = False
    target: str | None = None

    @property
    def fna(self) -> str:
        """Name of the neighborhood attention backend."""
        return f"{self.name}-fna"

    @property
    def fmha(self) -> str:
        """Name of the attention backend."""
        return f"{self.name}-fmha"

    @property
    def is_pure_jax(self) -> bool:
        """Whether the family compiles to no custom call of this library."""
        return self.target is None


FAMILIES = (
    Family("cpu", ("float32", "float16", "bfloat16"), problems=100, target="natten_jax_cpu"),
    Family("hopper", ("bfloat16", "float16"), problems=100, needs_gpu=True, target="natten_jax_sm90"),
    Family("flex", ("float32", "float16", "bfloat16", "float64"), problems=24),
)
