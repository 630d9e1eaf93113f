"""GPU generations that attention kernels target, and the tiles of the benchmark kernels for each generation."""

from __future__ import annotations

import dataclasses

from natten_jax.plan.devices import ComputeCapability

#: Queries and keys per tile of the benchmark kernels, in the order of ``TileSizes`` in csrc/bench.
LADDER_TILES = ((64, 64), (128, 64), (128, 128))


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """Configuration of the production kernel on a GPU generation.

    Attributes:
        name: Name in tables.
        capability: Major compute capability.
        tile_m: Queries per tile.
        tile_n: Keys per tile.
        ctas: Thread blocks that cooperate on a tile.
        occupancy: Thread blocks per SM.
    """

    name: str
    capability: int
    tile_m: int
    tile_n: int
    ctas: int
    occupancy: int

    @property
    def tiles(self) -> tuple[int, int]:
        """Queries and keys per tile."""
        return self.tile_m, self.tile_n


TARGETS = (
    TargetConfig("Ampere, Ada (sm80, sm86, sm89)", 8, 128, 64, 1, 2),
    TargetConfig("Hopper (sm90)", 9, 128, 128, 1, 1),
    TargetConfig("Blackwell (sm100), first choice", 10, 256, 128, 1, 1),
    TargetConfig("Blackwell (sm100), second choice", 10, 128, 128, 1, 2),
    TargetConfig("Blackwell (sm120, sm121)", 12, 64, 64, 1, 2),
)


def target_of(compute_capability: ComputeCapability) -> TargetConfig:
    """Return the target whose tiles the benchmark kernels use on a GPU of this compute capability.

    If no target has the GPU's generation, this is the target of the latest earlier generation. Targets with tiles of
    256 queries are excluded, because the accumulators of these tiles exceed the registers of the benchmark kernels'
    warps.

    Raises:
        ValueError: The GPU is older than all targets.
    """
    fitting = [
        target for target in TARGETS if target.capability <= compute_capability[0] and target.tiles in LADDER_TILES
    ]
    if not fitting:
        raise ValueError(
            f"the ladder needs an NVIDIA GPU of compute capability 8.0 or higher, not {compute_capability}"
        )
    return max(fitting, key=lambda target: target.capability)
