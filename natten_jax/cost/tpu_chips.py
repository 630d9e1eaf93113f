"""What a pass takes on a TPU at its maker's published rates: a static model. Nothing of it was measured.

The products of executed pairs at the rate of the matrix units, the softmax's instructions at the clock, and tiles at
the rate of the memory: the largest of the three, as if each hid behind it whatever else there is. What a program waits
for, and what it takes beside the work on its pairs, is not in it. Good for comparing problems and tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from natten_jax.cost.simulation import Simulation
from natten_jax.performance import Pass
from natten_jax.plan.devices import Device

_LANES = 128
#: Instruction bundles of the softmax of 1024 logits. The kernels of the backward pass find weights twice.
_SOFTMAX: Mapping[Pass, float] = {"forward": 2.5, "backward": 2 * 2.5}
#: Products of queries' width, and of values' width, of the kernels of a pass: those of the backward pass each find
#: weights and their gradients.
_PRODUCTS: Mapping[Pass, tuple[int, int]] = {"forward": (1, 1), "backward": (4, 3)}
#: Passes of the matrix units over numbers of 16 bits for a product of float32 at full precision.
_OF_FLOAT32 = 6


@dataclasses.dataclass(frozen=True)
class TpuChip:
    """A kind of TPU: published figures of a chip.

    Attributes:
        name: What people call it.
        product: What JAX calls it.
        flops: Operations on bfloat16 per second.
        bandwidth: Bytes per second of its memory.
        cycles: Clock cycles of all of its cores per second.
    """

    name: str
    product: str
    flops: float
    bandwidth: float
    cycles: float

    @property
    def device(self) -> Device:
        """One that is only asked about."""
        return Device("tpu", is_present=False, product=self.product)

    def seconds(self, simulation: Simulation) -> float:
        """What a simulated pass takes, by the model."""
        problem, pass_ = simulation.problem, simulation.pass_
        heads = problem.batch * problem.heads
        pairs = heads * simulation.counts.executed_pairs
        widths = [-(-width // _LANES) * _LANES for width in (problem.head_dim, problem.head_dim_v)]
        of_widths = sum(count * width for count, width in zip(_PRODUCTS[pass_], widths, strict=True))
        products = 2.0 * pairs * of_widths * (_OF_FLOAT32 if problem.dtype == "float32" else 1) / self.flops
        softmax = pairs / 1024 * _SOFTMAX[pass_] / self.cycles
        padded = sum(widths) / (problem.head_dim + problem.head_dim_v)
        return max(products, softmax, simulation.tile_bytes * padded / self.bandwidth)


#: By name.
TPU_CHIPS: Mapping[str, TpuChip] = {
    chip.name: chip
    for chip in (
        TpuChip("v4", "TPU v4", 275e12, 1.23e12, 2 * 1.05e9),
        TpuChip("v5e", "TPU v5 lite", 197e12, 0.82e12, 1.5e9),
        TpuChip("v5p", "TPU v5", 459e12, 2.46e12, 2 * 1.75e9),
        TpuChip("v6e", "TPU v6 lite", 918e12, 1.64e12, 1.75e9),
    )
}


def chip_of(device: Device) -> TpuChip | None:
    """Which of them a device is; ``None`` for any other."""
    return next(
        (chip for chip in TPU_CHIPS.values() if device.platform == "tpu" and device.product == chip.product), None
    )
