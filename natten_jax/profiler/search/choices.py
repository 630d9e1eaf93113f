"""Options with choices filled in: a backend, the tiles of a pass, or what a compiled program chose for itself."""

from __future__ import annotations

import dataclasses

from natten_jax import backends
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.plan import BackendId
from natten_jax.profiler.options import Options
from natten_jax.profiler.run.workload import Workload


def spelled_out(options: Options, workload: Workload) -> Options:
    """The options with every choice named that their compiled program made for itself."""
    for pass_, plan in workload.plans.items():
        if pass_ == "forward":
            options = with_backend(options, plan.backend)
            options = with_schedule(options, plan.performance.kernel_schedule)
        options = with_tiles(options, plan.tiles, pass_)
    return options


def with_backend(options: Options, id_: BackendId) -> Options:
    """The options with the backend named that runs the tokens themselves."""
    name = str(id_)
    if id_.operator == "fmha":
        return dataclasses.replace(options, backend=None, fmha_backend=name)
    # Naming a backend for additional tokens would keep them out of the kernel that takes them, too.
    counterpart = None if options.add_kv else backends.counterpart(name)
    return dataclasses.replace(options, backend=name, fmha_backend=options.fmha_backend or counterpart)


def with_tiles(options: Options, pair: TilePair, pass_: Pass) -> Options:
    """The options with the tiles of a pass named."""
    # Attention over flattened tokens has tiles of one extent; the operators multiply theirs.
    q_tile, kv_tile = ((1,) * (options.rank - len(tile)) + tile for tile in pair)
    return dataclasses.replace(options, performance=options.performance.with_tiles(pass_, (q_tile, kv_tile)))


def with_schedule(options: Options, schedule: str | None) -> Options:
    """The options with the kernel schedule named."""
    return dataclasses.replace(options, performance=dataclasses.replace(options.performance, kernel_schedule=schedule))
