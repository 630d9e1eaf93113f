"""The backend families under test: all registered families that run on CPUs or NVIDIA GPUs."""

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

#: Upper bounds of ``||result - reference|| / ||reference||`` for outputs, logsumexp and gradients, by element type.
BOUNDS: Mapping[str, float] = MappingProxyType({"float32": 2e-6, "float16": 1e-3, "bfloat16": 6e-3, "float64": 1e-13})

#: The 8-bit element types.
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def tile_pair(config: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the query tile and the key/value tile of a configuration, which may also contain a kernel schedule."""
    return config[0] if isinstance(config[1], KernelSchedule) else config


@dataclasses.dataclass(frozen=True)
class Family:
    """A registered family of backends, ``<name>-fna`` and ``<name>-fmha``.

    Attributes:
        backend: The registered backend.
        dtypes: Element types that it supports. Most tests use the first.
        problems: Default number of random problems per test, limited by compile time.
        at_once: Number of problems per compiled program. For plain JAX, small programs are faster, because compile time
            grows more than linearly: 15 padded problems take 8.5 s of CPU time in 15 programs, and 10.6 s in two
            programs. For kernel calls, large programs are faster: 125 problems take 11.5 s in programs of 5 problems,
            and 9.1 s in programs of 20.
    """

    backend: Backend
    dtypes: tuple[str, ...]
    problems: int
    at_once: int

    @classmethod
    def for_backend(cls, backend: Backend) -> Family:
        """Return the family of a backend with the test settings that suit it."""
        # Most tests use only the first type: float32, if the backend supports it.
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
        """True if the family's tests are marked ``gpu``."""
        return self.capabilities.platform is not None and self.capabilities.platform.name != "cpu"

    def runs_on(self, device: Device) -> bool:
        """Return True if the family has kernels for a device. Plain JAX runs on all devices."""
        return self.capabilities.platform is None or self.capabilities.platform.has(device)

    @property
    def target(self) -> str | None:
        """Prefix of the names of the family's custom call targets, or ``None`` if the family uses no custom calls."""
        targets = self.capabilities.targets.get("forward", ())
        return targets[0].removesuffix("_forward") if targets else None

    @property
    def head_dim_step(self) -> int:
        """The family supports head dimensions that are multiples of this number."""
        return self.capabilities.head_dim_step

    @property
    def float8_dtypes(self) -> tuple[str, ...]:
        """The 8-bit element types that the family accepts, natively or by conversion."""
        return FLOAT8 if self.capabilities.converts_float8_to is not None else tuple(self.capabilities.float8_dtypes)

    @property
    def rounds_weights(self) -> bool:
        """True if kernels for 8-bit arrays round attention weights to 8 bits, for products with 8-bit values."""
        return self.capabilities.converts_float8_to is None

    @property
    def dtype(self) -> str:
        """The element type that most tests use."""
        return self.dtypes[0]

    def query(self, operator: str, pass_: str) -> Callable[..., Any]:
        """Return the public function that lists the tiles of a pass. The operator is ``"fna"`` or ``"fmha"``."""
        infix = "bwd_" if pass_ == "backward" else ""
        return getattr(natten_jax, f"get_{infix}configs_for_{self.capabilities.query_family or self.name}_{operator}")

    @property
    def fna(self) -> str:
        """Name of the neighborhood attention backend."""
        return f"{self.name}-fna"

    @property
    def fmha(self) -> str:
        """Name of the plain attention backend."""
        return f"{self.name}-fmha"


#: Families that are not tested on a device. Tests in tests/backends interpret their kernels. The pytest plugin
#: tests/support/interpreted_tpu_family.py adds interpreted TPU kernels as a family.
INTERPRETED = ("tpu",)
FAMILIES = tuple(Family.for_backend(backend) for backend in backends.registered() if backend.family not in INTERPRETED)


def family_named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)
