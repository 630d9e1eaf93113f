"""The ``blackwell`` backend: tensor memory and ``tcgen05`` products for compute capability 10.0 and 10.3.

A query tile has 128 tokens. In the forward pass, it may also have 256 tokens, which are processed as two halves. A box
of keys has 128 tokens. The extents of tiles and boxes are powers of two, and the last extent is a multiple of ``PIECE``
(8 tokens). The time model ranks the tiles. Its coefficients for this backend were not measured: they are derived from
the throughput of the hardware.
"""

from __future__ import annotations

import functools
import math

import jax

from natten_jax.arrays.operands import Cotangents, Gradients, Operands, Saved
from natten_jax.backends.base import Backend, Capabilities, Earlier, Platform
from natten_jax.backends.pallas._blackwell_call import PIECE, call_of
from natten_jax.backends.pallas._common import logsumexp_and_remainder
from natten_jax.cost_model.calibration import calibration_for
from natten_jax.cost_model.simulation import rank
from natten_jax.cost_model.tiles import shortened, tile_pairs_of_sizes
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem

#: The first JAX release with a version of Pallas that can compile the kernels.
OLDEST_JAX = 0, 12


class BlackwellBackend(Backend):
    """Neighborhood attention on data-center Blackwell GPUs; see :class:`natten_jax.backends.base.Backend`."""

    family = "blackwell"
    capabilities = Capabilities(
        query_family="cutlass_blackwell",
        platform=Platform("cuda", (10, 0), is_exact=True, additional=((10, 3),)),
        is_by_name_only=True,  # until the kernels have been measured
        dtypes=("float16", "bfloat16"),
        largest_tiles=lambda problem, device, pass_: max(tile_sizes(pass_)),
        head_widths=(32, 64, 128),
        largest_head_dim=128,
        edges=("shift", "cut"),
        used_arguments=("run_persistent_kernel", "backward_deterministic"),  # every run is deterministic
        carries_plan=False,
        features=(),
    )

    def rejection(self, problem: Problem, device: Device, pass_: Pass) -> str | None:
        """Return the reason why the kernels cannot run a pass, for example that JAX is too old to compile them."""
        reason = super().rejection(problem, device, pass_)
        return reason or (missing_in_jax() if device.is_present else None)

    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        """Return the pairs of query and key/value tile shapes to choose from for a pass, the recommended pair first."""
        return [pair for pair, _ in _ranked(self.family, problem, pass_)]

    def offers(self, problem: Problem, device: Device, pass_: Pass, pair: TilePair) -> bool:
        """Return True if the kernels support a pair of tiles, even if :meth:`tile_pairs` does not list the pair."""
        return super().offers(problem, device, pass_, pair) and are_supported(pair, pass_)

    def forward(self, plan: Plan, operands: Operands, *, saves: bool = False, earlier: Earlier | None = None) -> Saved:
        """Compute the output, the logsumexp, and its remainder."""
        _check_jax(self.family)
        from natten_jax.backends.pallas._blackwell_kernels import forward

        call, inputs = call_of(plan, operands), operands.inputs
        out, statistics = forward(call, *call.laid_out(inputs), call.scales(inputs).reshape(-1))
        return Saved(call.queries.restored(out), *logsumexp_and_remainder(*call.unpacked_items(statistics)))

    def backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
        _check_jax(self.family)
        from natten_jax.backends.pallas._blackwell_kernels import gradients

        return gradients(plan, operands, saved, cotangents)


def missing_in_jax() -> str | None:
    """Return the reason why the installed JAX cannot compile the kernels; ``None`` if it can."""
    if jax.__version_info__ < OLDEST_JAX:
        return f"its kernels need the Pallas of JAX {'.'.join(map(str, OLDEST_JAX))} or later"
    return None


def _check_jax(family: str) -> None:
    if reason := missing_in_jax():
        raise NotImplementedError(f"{family} cannot run: {reason}")


def tile_sizes(pass_: Pass) -> tuple[tuple[int, int], ...]:
    """Return the supported pairs of tile sizes: tokens per query tile, and tokens per key/value tile (box of keys)."""
    return ((256, 128), (128, 128)) if pass_ == "forward" else ((128, 128),)


def are_supported(pair: TilePair, pass_: Pass) -> bool:
    return tuple(map(math.prod, pair)) in tile_sizes(pass_) and all(tile[-1] % PIECE == 0 for tile in pair)


@functools.lru_cache(maxsize=256)
def _ranked(family: str, problem: Problem, pass_: Pass) -> tuple[tuple[TilePair, float], ...]:
    """Return all supported pairs of tiles, each with its predicted seconds, the fastest pair first."""
    pairs = [pair for sizes in tile_sizes(pass_) for pair in tile_pairs_of_sizes(*sizes, problem.rank)]
    supported = [pair for pair in pairs if are_supported(pair, pass_)]
    return tuple(rank(shortened(problem), supported, pass_, calibration_for(family)))
