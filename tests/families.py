"""The backend families under test. A new family is one more line in ``FAMILIES``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import natten_jax
from natten_jax import native
from natten_jax.problem import KernelSchedule

#: Largest ``||result - reference|| / ||reference||`` of outputs, logsumexp and gradients, by element type.
BOUNDS: Mapping[str, float] = MappingProxyType({"float32": 2e-6, "float16": 1e-3, "bfloat16": 6e-3, "float64": 1e-13})


def tile_pair(config: tuple[Any, Any]) -> tuple[Any, Any]:
    """Query and key/value tile of a configuration, which may name a kernel schedule, too."""
    return config[0] if isinstance(config[1], KernelSchedule) else config


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of backends, ``<name>-fna`` and ``<name>-fmha``.

    Attributes:
        name: The family's name.
        dtypes: Element types that it computes in, the first of which most tests use.
        problems: How many random problems a test of it draws by default; a matter of how long they compile.
        needs_gpu: Whether its tests are marked ``gpu``.
        target: Prefix of the custom calls that it compiles to, or ``None`` where it is plain JAX.
        query_name: The family in the names of the configuration queries; ``None`` is ``name``.
        head_dim_step: Head dimensions are multiples of this.
        at_once: How many random problems one compiled program computes; compiling plain JAX takes as long either way.
    """

    name: str
    dtypes: tuple[str, ...]
    problems: int
    needs_gpu: bool = False
    target: str | None = None
    query_name: str | None = None
    head_dim_step: int = 1
    at_once: int = 1

    @property
    def dtype(self) -> str:
        """The element type that most tests use."""
        return self.dtypes[0]

    @property
    def has_backward(self) -> bool:
        """Whether its gradients are its own, too."""
        return self.is_pure_jax or f"{self.target}_backward" in native.TARGETS

    def query(self, operator: str, pass_: str) -> Callable[..., Any]:
        """The function that lists the tiles of a pass of ``"fna"`` or ``"fmha"``."""
        infix = "bwd_" if pass_ == "backward" else ""
        return getattr(natten_jax, f"get_{infix}configs_for_{self.query_name or self.name}_{operator}")

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes whose tiles can be listed."""
        return ("forward", "backward") if self.has_backward else ("forward",)

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
    Family("cpu", ("float32", "float16", "bfloat16"), problems=100, target="natten_jax_cpu", at_once=5),
    Family(
        "hopper",
        ("bfloat16", "float16"),
        problems=100,
        needs_gpu=True,
        target="natten_jax_sm90",
        query_name="cutlass_hopper",
        head_dim_step=8,
        at_once=5,
    ),
    Family(
        "cutlass",
        ("float32", "bfloat16", "float16"),
        problems=100,
        needs_gpu=True,
        target="natten_jax_sm80",
        head_dim_step=8,
        at_once=5,
    ),
    Family("flex", ("float32", "float16", "bfloat16", "float64"), problems=24),
)


def family_named(name: str) -> Family:
    """The family of a name."""
    return next(family for family in FAMILIES if family.name == name)
