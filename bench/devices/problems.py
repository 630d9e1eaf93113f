"""Problems that bench/scaling.py measures on one and on several devices, each with the array axis that is split."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from benchmarks import BENCHMARKS, Benchmark
from several_devices import Split, splits

from natten_jax.halo import halos_of
from natten_jax.problem import Problem

Scaling = Literal["strong", "weak"]

#: Strong scaling: the problem has the same size for any number of devices. Weak scaling: each device's part of the
#: problem has the same size for any number of devices.
SCALINGS: tuple[Scaling, ...] = ("strong", "weak")

_HEADS = -2

#: Sizes for quick trials, by rank; not representative of performance.
_SMALL: dict[int, dict[str, Any]] = {
    1: {"layout": (256,), "kernel_size": (16,), "heads": 8},
    3: {"layout": (2, 8, 16), "kernel_size": (2, 4, 4), "heads": 8},
}

#: Splits that are also measured with weak scaling.
_WEAK = "width-s6x8x8", "height-s6x8x8", "time-s6x8x8", "heads", "sequence"


@dataclasses.dataclass(frozen=True)
class Curve:
    """A problem that is split over an increasing number of devices.

    Attributes:
        scaling: ``"strong"``, or ``"weak"`` if the problem grows with the number of devices.
        name: Name of the split.
        on_one: Problem on one device, and the axis to split.
    """

    scaling: Scaling
    name: str
    on_one: Split

    @property
    def is_over_heads(self) -> bool:
        """Return True if heads are split, False if tokens are."""
        return self.on_one.axis == _HEADS

    def work(self, devices: int) -> int:
        """Return the work of the problem for ``devices`` devices, relative to the problem for one device."""
        return devices if self.scaling == "weak" else 1

    def benchmark(self, devices: int) -> Benchmark:
        """Return the problem that ``devices`` devices share."""
        benchmark, work = self.on_one.benchmark, self.work(devices)
        if self.is_over_heads:
            return dataclasses.replace(benchmark, heads=benchmark.heads * work)
        layout = tuple(extent * (work if i == self._dimension else 1) for i, extent in enumerate(benchmark.layout))
        return dataclasses.replace(benchmark, layout=layout)

    def share(self, devices: int) -> Problem:
        """Return the problem with one device's share of the heads; the layout is whole even if tokens are split."""
        problem = self.benchmark(devices).problem
        if not self.is_over_heads:
            return problem
        heads = problem.heads // devices
        return dataclasses.replace(problem, heads=heads, heads_kv=heads)

    def parts(self, devices: int) -> tuple[int, ...]:
        """Return the number of shards of each token dimension."""
        return tuple(devices if i == self._dimension else 1 for i in range(len(self.on_one.benchmark.layout)))

    def obstacle(self, devices: int) -> str | None:
        """Return the reason why ``devices`` devices cannot share the problem; ``None`` if they can."""
        problem = self.benchmark(devices).problem
        if self.is_over_heads:
            is_shared = problem.heads % devices == 0
            return None if is_shared else f"{devices} devices cannot share {problem.heads} heads equally"
        try:
            halos_of(problem, self.parts(devices))
        except ValueError as error:
            return str(error)
        return None

    @property
    def _dimension(self) -> int | None:
        """Layout dimension that is split."""
        return None if self.is_over_heads else self.on_one.axis - 1


def curves(scaling: Scaling, is_small: bool) -> Iterator[Curve]:
    """Generate a curve for each problem of one kind of scaling.

    Args:
        scaling: Kind of scaling.
        is_small: Use problems with few tokens, in float32.
    """
    # The splits of tokens are the same as in several_devices.py. The split of heads is different: here, the problem on
    # one device has all heads of the video. In several_devices.py, it has half of them.
    found = {name: split for name, split in splits(1).items() if name != "batch"}
    found["heads"] = Split(BENCHMARKS["3d-s16x8x8"], _HEADS)
    for name in found if scaling == "strong" else _WEAK:
        benchmark, axis = found[name]
        yield Curve(scaling, name, Split(_small(benchmark) if is_small else benchmark, axis))


def _small(benchmark: Benchmark) -> Benchmark:
    sizes = _SMALL[len(benchmark.layout)]
    # Strides are at most half a window, so that windows extend to the tokens of other devices.
    halves = (extent // 2 for extent in sizes["kernel_size"])
    stride = benchmark.stride and tuple(map(min, benchmark.stride, halves))
    return dataclasses.replace(benchmark, **sizes, stride=stride, head_dim=8, dtype="float32")
