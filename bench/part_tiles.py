"""Time one device's part of a split problem with two choices of tiles: for the whole layout, and for the part.

In the problem, a layout is split over several devices. This program runs on one device. The device computes a part in
the middle of the layout, and has the halos of this part from the start: nothing is exchanged. Passes with the two
choices of tiles alternate in one process.

Example:
    python bench/run.py part_tiles --json bench/results/h200/part_tiles.json
    python bench/run.py part_tiles --devices 8 --splits width-s6x8x8
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from devices.problems import Curve, curves
from lib import command
from lib.record import save
from lib.timing import ratio
from several_devices import add_turns, difference, take_turns

from natten_jax.arrays.operands import Inputs, Operands, Output
from natten_jax.backends.select import resolve
from natten_jax.execution import custom_vjp
from natten_jax.halo import Halo, halos_of
from natten_jax.performance import PASSES, Pass
from natten_jax.plan.devices import default_device
from natten_jax.plan.plan import BackendId, Request

WHOLE, PART = "tiles for the whole layout", "tiles for the part"


def measure(curve: Curve, devices: int, pass_: Pass, options: argparse.Namespace) -> dict[str, Any]:
    """Time a pass with both choices of tiles. If the choices are equal, return the tiles without times."""
    problem, parts = curve.share(devices), curve.parts(devices)
    whole = Request(problem, backend=str(BackendId(options.family, problem.operator)))
    requests = {WHOLE: whole, PART: dataclasses.replace(whole, parts=parts)}
    tiles = {name: resolve(request, default_device(), pass_).tiles for name, request in requests.items()}
    row: dict[str, Any] = {"problem": problem.describe(), "parts": parts, "tiles": tiles}
    if tiles[WHOLE] == tiles[PART]:
        return row
    operands, cotangent = draw(curve, [halo.evened() for halo in halos_of(problem, parts)])
    saved = jax.jit(lambda operands: custom_vjp.run(custom_vjp.SAVING, whole, operands))(operands)
    cotangents = Output(cotangent, jnp.zeros_like(saved.logsumexp))

    def compiled(request: Request) -> tuple[jax.stages.Compiled, Sequence[Any]]:
        if pass_ == "forward":
            return jax.jit(lambda operands: custom_vjp.run(custom_vjp.FORWARD, request, operands)).lower(
                operands
            ).compile(), [operands]
        arguments = operands, saved, cotangents
        return jax.jit(lambda *each: custom_vjp.run(custom_vjp.BACKWARD, request, *each)).lower(
            *arguments
        ).compile(), arguments

    programs = {name: compiled(request) for name, request in requests.items()}
    results = [program(*arguments) for program, arguments in programs.values()]
    times = take_turns(programs, options)
    return row | {
        "milliseconds": {name: 1e3 * statistics.median(found) for name, found in times.items()},
        "speedup": ratio(times[WHOLE], times[PART]),
        "difference": difference(results[1], results[0]),
    }


def draw(curve: Curve, halos: Sequence[Halo]) -> tuple[Operands, jax.Array]:
    """Draw random operands of the middle device, including its halos, and the cotangent of the device's output."""
    benchmark = curve.on_one.benchmark
    starts = [halo.parts // 2 * halo.part for halo in halos]
    held = [halo.held(start) for halo, start in zip(halos, starts, strict=True)]

    def cut_part(array: jax.Array) -> jax.Array:
        return cut(array, starts, [halo.part for halo in halos])

    def with_halos(array: jax.Array) -> jax.Array:
        room = [(max(-begin, 0), max(end - halo.extent, 0)) for halo, (begin, end) in zip(halos, held, strict=True)]
        padded = jnp.pad(array, [(0, 0), *room, (0, 0), (0, 0)])
        return cut(padded, [max(begin, 0) for begin, _ in held], [end - begin for begin, end in held])

    keys = jax.random.split(jax.random.key(0), 4)
    cotangent, query, key, value = (jax.random.normal(each, benchmark.shape, benchmark.dtype) for each in keys)
    pad = [0] * (3 - len(halos))
    origins = jnp.array([[*pad, *starts], [*pad, *(begin for begin, _ in held)]], jnp.int32)
    return Operands(Inputs(cut_part(query), with_halos(key), with_halos(value)), origins), cut_part(cotangent)


def cut(array: jax.Array, starts: Sequence[int], lengths: Sequence[int]) -> jax.Array:
    """Cut a box of tokens out of ``[batch, *layout, heads, head_dim]``."""
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    return array[(slice(None), *map(slice, starts, ends))]


def main() -> int:
    """Measure the selected rows, print a line per row and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [curve.name for curve in curves("strong", is_small=False) if not curve.is_over_heads]
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8], help="numbers of devices to split over")
    parser.add_argument("--splits", nargs="+", choices=names, default=names)
    parser.add_argument("--family", default="hopper", help="backend family")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    add_turns(parser)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    chosen = [curve for curve in curves("strong", is_small=False) if curve.name in options.splits]
    results: dict[str, dict[str, Any]] = {}
    for curve, devices, pass_ in itertools.product(chosen, options.devices, options.passes):
        if curve.obstacle(devices) is not None:
            continue
        name = f"{options.family} {pass_}, {curve.name} over {devices}"
        row = results[name] = measure(curve, devices, pass_, options)
        line = f"{name:46}{row['tiles'][WHOLE]!s:24} {row['tiles'][PART]!s:24}"
        if "speedup" in row:
            line += "".join(f"{time:10.3f}" for time in row["milliseconds"].values())
            line += f"{row['speedup']:8.3f}{row['difference']:10.1e}"
        print(line, flush=True)
        save(results, options.json)
    return 0


if __name__ == "__main__":
    command.run(main)
