"""The backend families under test: all that are registered and run on hosts or NVIDIA GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import natten_jax
from natten_jax import backends
from natten_jax.backends.base import Backend, Capabilities
from natten_jax.performance import KernelSchedule
from natten_jax.plan.devices import Device

#: Largest ``||result - reference|| / ||reference||`` of outputs, logsumexp and gradients, by element type.
BOUNDS: Mapping[str, float] = MappingProxyType({"float32": 2e-6, "float16": 1e-3, "bfloat16": 6e-3, "float64": 1e-13})

#: The 8-bit element types.
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def tile_pair(config: tuple[Any, Any]) -> tuple[Any, Any]:
    """Query and key/value tile of a configuration, which may name a kernel schedule, too."""
    return config[0] if isinstance(config[1], KernelSchedule) else config


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of backends, ``<name>-fna`` and ``<name>-fmha``, as it is registered.

    Attributes:
        backend: What is registered.
        dtypes: Element types that it computes in, the first of which most tests use.
        problems: How many random problems a test of it draws by default; a matter of how long they compile.
        at_once: How many problems one compiled program computes. Compiling plain JAX takes longer the larger a program
            is: 8.5 s of processor time for 15 padded problems one by one, 10.6 s in two programs. A program of calls
            of kernels takes the less for each the more there are: 125 problems take 11.5 s by 5, and 9.1 s by 20.
    """

    backend: Backend
    dtypes: tuple[str, ...]
    problems: int
    at_once: int

    @classmethod
    def of(cls, backend: Backend) -> Family:
        """What is to be tested of a backend."""
        # Half the bits are faster to test on GPUs that have faster kernels for them.
        first = "bfloat16" if "float32" not in backend.capabilities.dtypes else "float32"
        dtypes = first, *(dtype for dtype in backend.capabilities.dtypes if dtype != first)
        on_host = backend.capabilities.platform is not None and backend.capabilities.platform.name == "cpu"
        return cls(backend, dtypes, *((100, 20 if on_host else 5) if backend.capabilities.targets else (12, 1)))

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the backend."""
        return self.backend.capabilities

    @property
    def name(self) -> str:
        """The family's name."""
        return self.backend.family

    @property
    def needs_gpu(self) -> bool:
        """Whether its tests are marked ``gpu``."""
        return self.capabilities.platform is not None and self.capabilities.platform.name != "cpu"

    def runs_on(self, device: Device) -> bool:
        """Whether it has kernels for a device, or is plain JAX, which runs on all."""
        return self.capabilities.platform is None or self.capabilities.platform.has(device)

    @property
    def target(self) -> str | None:
        """Prefix of the custom calls of this library that it compiles to, or ``None`` where there are none."""
        targets = self.capabilities.targets.get("forward", ())
        return targets[0].removesuffix("_forward") if targets else None

    @property
    def head_dim_step(self) -> int:
        """Head dimensions are multiples of this."""
        return self.capabilities.head_dim_step

    @property
    def float8_dtypes(self) -> tuple[str, ...]:
        """The 8-bit element types that it takes, converted or not."""
        return FLOAT8 if self.capabilities.converts_float8_to is not None else tuple(self.capabilities.float8_dtypes)

    @property
    def rounds_weights(self) -> bool:
        """Whether the weights of 8-bit arrays have 8 bits, too, as those of matrix units have."""
        return self.capabilities.converts_float8_to is None

    @property
    def dtype(self) -> str:
        """The element type that most tests use."""
        return self.dtypes[0]

    def query(self, operator: str, pass_: str) -> Callable[..., Any]:
        """The function that lists the tiles of a pass of ``"fna"`` or ``"fmha"``."""
        infix = "bwd_" if pass_ == "backward" else ""
        return getattr(natten_jax, f"get_{infix}configs_for_{self.capabilities.query_family or self.name}_{operator}")

    @property
    def fna(self) -> str:
        """Name of the neighborhood attention backend."""
        return f"{self.name}-fna"

    @property
    def fmha(self) -> str:
        """Name of the attention backend."""
        return f"{self.name}-fmha"


#: Their kernels are interpreted in tests of their own (tests/backends), and run as a family with a plugin
#: (tests/support/interpreted_tpu_family.py).
INTERPRETED = ("tpu",)
FAMILIES = tuple(Family.of(backend) for backend in backends.registered() if backend.family not in INTERPRETED)


def family_named(name: str) -> Family:
    """The family of a name."""
    return next(family for family in FAMILIES if family.name == name)
