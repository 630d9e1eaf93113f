"""The ``blackwell`` backend: tensor memory and ``tcgen05`` products for compute capability 10.0 and 10.3.

Calls run it by name alone: the kernels have been interpreted and compiled, and never run on a GPU.
"""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp

from natten_jax.arrays.operands import Cotangents, Gradients, Operands, Output, Saved
from natten_jax.backends.base import Backend, Platform
from natten_jax.backends.pallas._blackwell_call import PIECE
from natten_jax.backends.pallas._common import finite_scale, logsumexp_and_remainder
from natten_jax.cost_model.calibration import calibration_for
from natten_jax.cost_model.simulation import rank
from natten_jax.cost_model.tiles import shortened, tile_pairs_of_sizes
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem, Shape


def sizes_of(pass_: Pass) -> tuple[tuple[int, int], ...]:
    """Tokens of tiles of queries and of boxes of keys."""
    return ((256, 128), (128, 128)) if pass_ == "forward" else ((128, 128),)


def is_taken(pair: TilePair, pass_: Pass) -> bool:
    """Whether the kernels of a pass take a pair."""
    return tuple(map(math.prod, pair)) in sizes_of(pass_) and all(map(_is_copied, pair))


@functools.lru_cache(maxsize=256)
def ranked(family: str, problem: Problem, pass_: Pass) -> tuple[tuple[TilePair, float], ...]:
    """Pairs of tiles with seconds by the model, the fastest first."""
    found = itertools.chain.from_iterable(tile_pairs_of_sizes(*sizes, problem.rank) for sizes in sizes_of(pass_))
    pairs = [pair for pair in found if is_taken(pair, pass_)]
    return tuple(rank(shortened(problem), pairs, pass_, calibration_for(family)))


def _is_copied(tile: Shape) -> bool:
    return tile[-1] % PIECE == 0


#: The first release whose Pallas has what the kernels are written in.
OLDEST_JAX = 0, 12


class BlackwellBackend(Backend):
    """Neighborhood attention on data-center Blackwell GPUs; see :class:`natten_jax.backends.base.Backend`."""

    family = "blackwell"
    query_family = "cutlass_blackwell"
    is_by_name_only = True  # until somebody has measured it
    platform = Platform("cuda", (10, 0), is_exact=True, others=((10, 3),))
    dtypes = ("float16", "bfloat16")
    head_widths = (32, 64, 128)
    largest_head_dim = 128
    carries_plan = False
    edges = ("shift", "cut")
    fuses_additional_kv = False
    heeds = ("run_persistent_kernel", "backward_deterministic")  # the latter in every run

    def rejection(self, problem: Problem, device: Device, pass_: Pass) -> str | None:
        """Why the kernels cannot run a pass; JAX may be too old to compile them."""
        reason = super().rejection(problem, device, pass_)
        return reason or (missing_in_jax() if device.is_present else None)

    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        """Query and key/value tile shapes of a pass, the recommended pair first."""
        return [pair for pair, _ in ranked(self.family, problem, pass_)]

    def largest_tiles(self, problem: Problem, device: Device, pass_: Pass) -> tuple[int, int]:
        """Most tokens of a tile."""
        return max(sizes_of(pass_))

    def offers(self, problem: Problem, device: Device, pass_: Pass, pair: TilePair) -> bool:
        """Whether the kernels take a pair, listed or not."""
        return super().offers(problem, device, pass_, pair) and is_taken(pair, pass_)

    def forward(self, plan: Plan, operands: Operands) -> Output:
        """Compute output and logsumexp."""
        return Output(*self.forward_saving(plan, operands)[:2])

    def forward_saving(self, plan: Plan, operands: Operands) -> Saved:
        """Compute them for a backward pass."""
        _check_jax(self.family)
        from natten_jax.backends.pallas._blackwell_call import call_of
        from natten_jax.backends.pallas._blackwell_forward import forward

        call, inputs, problem = call_of(plan, operands), operands.inputs, plan.problem
        query, key, value = inputs.query, inputs.key, inputs.value
        heads = query.shape[0], query.shape[-2]
        scale = finite_scale(problem.scale, inputs.scale)
        out, statistics = forward(
            call,
            call.queries.laid_out(query),
            call.keys.laid_out(key),
            call.keys.laid_out(value),
            jnp.broadcast_to(scale, heads).reshape(-1),
        )
        rows = logsumexp_and_remainder(*call.of_queries(statistics))
        return Saved(call.queries.restored(out, problem.rank), *rows)

    def backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
        """Compute the gradients of the differentiable operands."""
        _check_jax(self.family)
        from natten_jax.backends.pallas._blackwell_backward import gradients

        return gradients(plan, operands, saved, cotangents)


def missing_in_jax() -> str | None:
    """What this JAX lacks that the kernels are written in."""
    if jax.__version_info__ < OLDEST_JAX:
        return f"its kernels are written in Pallas as JAX has it from {'.'.join(map(str, OLDEST_JAX))} on"
    return None


def _check_jax(family: str) -> None:
    if reason := missing_in_jax():
        raise NotImplementedError(f"{family} cannot run: {reason}")
