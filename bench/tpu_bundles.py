"""Count the instruction bundles that TPU kernels execute, from the TPU compiler's dumps, without a TPU.

A program's count is the sum of the execution counts of all scheduled bundles. A core issues one bundle per cycle, so
the counts can rank programs. They do not predict times, because they do not include stalls. Most stalls wait for
copies. Bundles of these implementations are counted:

- natten_jax and flex (natten_jax's backend in plain JAX): all instructions of the compiled program. For natten_jax, the
  kernels are also counted separately. XLA implements some copies as loops without a constant trip count. Such a loop
  counts as a single trip. The program's count is then too low, mainly for flex.
- splash: JAX's splash attention with the same mask and the best of several block shapes. For two and three dimensions,
  a mask of the whole layout would be large, so the kernel is compiled with a small mask. Like the large mask, the small
  mask has completely visible, partially visible and masked blocks. The bundles of a kernel step are multiplied by the
  number of pairs of blocks, in the whole layout, that have a visible pair of tokens.
- dense: JAX's flash attention over all tokens.

Example:
    pip install libtpu
    python bench/run.py tpu_bundles --chip v5e --json bench/results/tpu/v5e.json
    python bench/run.py tpu_bundles --chip v6e --only 1-D --sides natten_jax splash
    python bench/plot.py tpu-bundles bench/results/tpu docs/images/tpu_bundles.svg
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from lib import bundles, hlo_counts, tpu_compiler, tpu_visits
from lib.bundles import Executions, Program
from lib.environment import environment
from lib.tpu_compiler import CHIPS, Compiled

import natten_jax
from natten_jax.performance import PASSES, Pass, Performance
from natten_jax.plan.devices import Device
from natten_jax.problem import Problem, problem_of

SIDES = ("natten_jax", "flex", "splash", "dense")
#: Block shapes of splash attention: the number of query tokens and the number of key tokens.
SPLASH_BLOCKS = ((512, 512), (512, 1024))
DENSE_BLOCKS = 512, 256, 128


@dataclasses.dataclass(frozen=True)
class Row:
    """A problem: a name, the array shapes and the window."""

    name: str
    batch: int
    layout: tuple[int, ...]
    heads: int
    head_dim: int
    kernel_size: int | tuple[int, ...]
    stride: int | tuple[int, ...] = 1
    is_causal: bool = False

    @property
    def problem(self) -> Problem:
        """The problem of the row."""
        rank = len(self.layout)
        window, stride = ((each,) * rank if isinstance(each, int) else each for each in (self.kernel_size, self.stride))
        return problem_of(
            self.layout,
            window,
            stride,
            is_causal=(self.is_causal,) * rank,
            batch=self.batch,
            heads=self.heads,
            head_dim=self.head_dim,
        )

    @property
    def array(self) -> jax.ShapeDtypeStruct:
        """Shape and type of each array."""
        return jax.ShapeDtypeStruct((self.batch, *self.layout, self.heads, self.head_dim), jnp.bfloat16)


ROWS = (
    Row("1-D causal w2048", 1, (32768,), 8, 128, 2048, is_causal=True),
    Row("2-D 256x256 w80", 1, (256, 256), 8, 128, 80),
    Row("HunyuanVideo", 1, (30, 48, 80), 24, 128, (18, 24, 24), (16, 8, 8)),
    Row("NAT s1", 64, (56, 56), 2, 32, 7),
    Row("64x64 k7", 32, (64, 64), 2, 64, 7),
)


# In the compiling process -------------------------------------------------------------------------------------------


def compile_request(request: dict[str, Any]) -> None:
    """Compile the implementation ``request["side"]`` for the row ``request["row"]``."""
    row, side = next(row for row in ROWS if row.name == request["row"]), request["side"]
    facts: dict[str, Any] = {}
    if side in ("natten_jax", "flex"):
        function, arrays = _ours(row, "tpu-fna" if side == "natten_jax" else "flex-fna"), [row.array] * 3
        if side == "natten_jax":
            facts["kernels"] = _executions(row, request["pass"])
    else:
        make = _splash if side == "splash" else _dense
        function, arrays = make(row, request.get("blocks"))
    if request["pass"] == "backward":
        function = functools.partial(_backward, function)
        arrays = [*arrays, arrays[0]]
    tpu_compiler.serve(request, function, arrays, facts)


def _backward(function: Any, *arguments: Any) -> Any:
    *inputs, cotangent = arguments
    return jax.vjp(function, *inputs)[1](cotangent)


def _ours(row: Row, backend: str) -> Any:
    operator = getattr(natten_jax, f"na{len(row.layout)}d")
    window = {"kernel_size": row.kernel_size, "stride": row.stride, "is_causal": row.is_causal}
    return functools.partial(operator, **window, backend=backend)


def _executions(row: Row, pass_: Pass) -> dict[str, Any]:
    """Return the execution counts of the parts of each natten_jax kernel, and the tiles of each pass."""
    from natten_jax.arrays.operands import Inputs, Operands
    from natten_jax.backends.pallas._tpu_call import call_of
    from natten_jax.backends.pallas.tpu import TpuBackend, alignment
    from natten_jax.backends.select import plan_with
    from natten_jax.plan.plan import Request

    found: dict[str, Any] = {}
    for each in PASSES[: 1 + PASSES.index(pass_)]:
        device = Device("tpu", is_present=False)
        plan = plan_with(TpuBackend(), Request(row.problem, Performance()), device, each)
        arrays: Any = (row.array,) * 3
        call = call_of(plan, Operands(Inputs(*arrays)), alignment(row.problem))
        if each == "forward":
            found["natten_jax_tpu_forward"] = tpu_visits.query_programs(call)
        else:
            found["natten_jax_tpu_query_gradient"] = tpu_visits.query_programs(call)
            found["natten_jax_tpu_key_gradients"] = tpu_visits.key_programs(call)
        found[f"{each} tiles"] = plan.tiles
    return found


def _splash(row: Row, blocks: Any) -> tuple[Any, list[Any]]:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    tokens = math.prod(row.layout) if len(row.layout) == 1 else _PROXY
    if len(row.layout) == 1:
        mask: Any = splash_attention_mask.LocalMask((tokens, tokens), (row.problem.axes[0].kernel_size - 1, 0), 0)
    else:
        mask = splash_attention_mask.NumpyMask(_proxy_mask())
    queries, keys = blocks
    sizes = {f"block_{name}": queries if name.startswith("q") else keys for name in _SPLASH_SIZES}
    heads = row.heads if len(row.layout) == 1 else _PROXY_HEADS
    kernel = splash_attention_kernel.make_splash_mha_single_device(
        splash_attention_mask.MultiHeadMask([mask] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(**sizes),
    )
    return kernel, [jax.ShapeDtypeStruct((heads, tokens, row.head_dim), jnp.bfloat16)] * 3


_SPLASH_SIZES = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
#: Number of tokens and number of heads of the splash attention that is compiled with the small mask. They are large
#: enough that the arrays do not fit into VMEM.
_PROXY, _PROXY_HEADS = 4096, 64


def _proxy_mask() -> Any:
    """Return a mask over ``_PROXY`` tokens with completely visible, partially visible and masked blocks."""
    import numpy as np

    index = np.arange(_PROXY)
    return (abs(index[:, None] - index) < 1500) & ((index[:, None] ^ index) & 64 == 0) | (
        index[:, None] // 512 == index // 512
    )


def dense_block(row: Row) -> int:
    """Return the number of tokens per block: the largest block size that divides the number of tokens of the layout.

    Raises:
        ValueError: No block size divides the number of tokens.
    """
    tokens = math.prod(row.layout)
    for size in DENSE_BLOCKS:
        if tokens % size == 0:
            return size
    raise ValueError(f"JAX's flash attention does not support {tokens} tokens: its blocks have a multiple of 128")


def _dense(row: Row, blocks: Any) -> tuple[Any, list[Any]]:
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

    tokens, size = math.prod(row.layout), dense_block(row)
    names = [field.name for field in dataclasses.fields(BlockSizes)]
    sizes = BlockSizes(**{name: 1 if name == "block_b" else size for name in names})
    array = jax.ShapeDtypeStruct((row.batch, row.heads, tokens, row.head_dim), jnp.bfloat16)
    return functools.partial(flash_attention, causal=row.is_causal, block_sizes=sizes), [array] * 3


# In the counting process --------------------------------------------------------------------------------------------


def count_ours(row: Row, compiled: Compiled) -> dict[str, Any]:
    """Count the bundles of natten_jax's kernels, and of the whole program."""
    facts = compiled.facts["kernels"]
    found: dict[str, Any] = {"kernels": {}, "tiles": {name: each for name, each in facts.items() if "tiles" in name}}
    counted: dict[str, float] = {}
    for instruction in compiled.bundles:
        name = instruction.partition(".")[0]
        if name not in facts:
            continue
        executed = facts[name]
        executions = Executions(executed["steps"], executed["active"], executed["tiles"], tuple(executed["bodies"]))
        weights = bundles.kernel_weights(Program.parse(compiled.bundles[instruction]), executions)
        counted[instruction] = sum(weights)
        found["kernels"][name] = {
            "bundles": sum(weights),
            "copied": executed["copied"],
            **_units(compiled, instruction, weights),
        }
    found["bundles"] = sum(counted.values())
    found |= count_program(compiled, counted)
    return found


def _units(compiled: Compiled, instruction: str, weights: list[float]) -> dict[str, Any]:
    """Return a lower bound of the kernel's cycles for each unit: the unit's used slots, divided by slots per cycle."""
    names, capacities, used = bundles.utilization(compiled.utilization[instruction])
    totals = bundles.totals(weights, used)
    return {"units": {n: round(total / c) for n, c, total in zip(names, capacities, totals, strict=True)}}


def count_program(compiled: Compiled, counted: Mapping[str, float]) -> dict[str, Any]:
    """Count the bundles of all instructions of a program.

    Args:
        compiled: The compiled program.
        counted: Bundles of the instructions that were counted before, by name of the instruction.
    """
    hlo = hlo_counts.Hlo.parse(compiled.hlo)
    texts = {name: text for each in hlo.computations.values() for name, text in each.items()}
    alike = {hlo.signature(texts[name]): name for name in compiled.bundles if name in texts}
    costs: dict[str, float] = dict(counted)
    total, parts = 0.0, {}
    for name, text, times in hlo.executed():
        written = name if name in compiled.bundles else alike.get(hlo.signature(text))
        if written is None:
            continue
        if written not in costs:
            costs[written] = sum(bundles.fusion_weights(Program.parse(compiled.bundles[written])))
        total += times * costs[written]
        parts[name] = round(times * costs[written])
    largest = dict(sorted(parts.items(), key=lambda part: -part[1])[:8])
    return {"program": total, "parts": largest, "bytes_accessed": compiled.facts["bytes_accessed"]}


def count_splash(row: Row, compiled: Compiled, blocks: tuple[int, int]) -> dict[str, Any]:
    """Count the bundles of splash attention with the mask of a row."""
    tiles, most, pairs = splash_blocks(row, blocks)
    heads = row.batch * row.heads
    found: dict[str, Any] = {"kernels": {}, "blocks": blocks, "pairs": pairs, "most_pairs": tiles * most}
    for instruction, text in compiled.bundles.items():
        if not instruction.startswith("splash"):
            continue
        program = Program.parse(text)
        executions = Executions(heads * tiles * most, heads * pairs, heads * tiles, (heads * pairs,))
        weights = bundles.kernel_weights(_with_steps(program, executions.steps), executions)
        found["kernels"][instruction] = {"bundles": sum(weights), **_units(compiled, instruction, weights)}
        found["kernels"][instruction]["copied"] = heads * pairs * blocks[1] * 4 * tpu_visits.LANES
    found["bundles"] = sum(each["bundles"] for each in found["kernels"].values())
    return found


def _with_steps(program: Program, steps: int) -> Program:
    """Return a copy of the program with ``steps`` grid steps."""
    outer = next(span for span in program.spans if span.is_loop and program.multiplies(span))
    spans = (dataclasses.replace(span, trips=steps + 2) if span == outer else span for span in program.spans)
    return dataclasses.replace(program, spans=tuple(spans))


@functools.lru_cache(maxsize=64)
def splash_blocks(row: Row, blocks: tuple[int, int]) -> tuple[int, int, int]:
    """Count the blocks of splash attention.

    Returns:
        Three counts. The first is the number of query blocks. The second is the largest number of key blocks that one
        query block sees. The third is the number of pairs of blocks that the kernel visits.
    """
    return tpu_visits.blocks_of_flat_tokens(row.problem, *blocks)


def count_dense(row: Row, compiled: Compiled) -> dict[str, Any]:
    """Count the bundles of JAX's flash attention over all tokens."""
    found: dict[str, Any] = {"kernels": {}}
    for instruction, text in compiled.bundles.items():
        if "flash" not in instruction:
            continue
        program = Program.parse(text)
        steps = next(s.trips for s in program.spans if s.is_loop and program.multiplies(s)) or 0
        tiles = row.batch * row.heads * (math.prod(row.layout) // dense_block(row))
        active = (steps - 2 + tiles) // 2 if row.is_causal else steps - 2
        executions = Executions(steps - 2, active, tiles, (active,))
        weights = bundles.kernel_weights(program, executions)
        found["kernels"][instruction] = {"bundles": sum(weights), **_units(compiled, instruction, weights)}
    found["bundles"] = sum(each["bundles"] for each in found["kernels"].values())
    return found


def count(chip: str, row: Row, pass_: Pass, side: str) -> dict[str, Any]:
    """Count the bundles of an implementation for a row. The count of a backward pass includes the forward pass."""
    request = {"row": row.name, "side": side, "pass": pass_}
    compile_ = functools.partial(tpu_compiler.compiled, chip, Path(__file__))
    if side == "splash":
        counts = [count_splash(row, compile_({**request, "blocks": blocks}), blocks) for blocks in SPLASH_BLOCKS]
        return min(counts, key=lambda each: each["bundles"])
    compiled = compile_(request)
    if side == "dense":
        return count_dense(row, compiled)
    return count_ours(row, compiled) if side == "natten_jax" else count_program(compiled, {})


def main() -> int | None:
    """Count the bundles for the selected rows, print a line per row, pass and implementation, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=CHIPS, default="v5e")
    parser.add_argument("--only", default="", metavar="REGEX", help="select rows whose names match")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--json", type=Path, help="file of the figures; its other rows and sides are kept")
    parser.add_argument("--compile", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile is not None:
        compile_request(options.compile)
        return None
    results: dict[str, Any] = {}
    run_facts = _run_facts()
    if options.json is not None and options.json.exists():
        results = json.loads(options.json.read_text(encoding="utf-8"))["results"]
    for row in ROWS:
        if not re.search(options.only, row.name):
            continue
        for pass_ in options.passes:
            for side in options.sides:
                began = time.monotonic()
                try:
                    found = count(options.chip, row, pass_, side)
                except ValueError as error:
                    found = {"failed": str(error)}
                found["of"] = run_facts
                results.setdefault(row.name, {}).setdefault(pass_, {})[side] = found
                shown = found.get("failed") or " ".join(
                    f"{key} {found[key] / 1e6:.2f}M" for key in ("bundles", "program") if key in found
                )
                print(f"{row.name:18} {pass_:9} {side:11} {shown} ({time.monotonic() - began:.0f} s)", flush=True)
                if options.json is not None:
                    record = {
                        "chip": options.chip,
                        "device": f"TPU {options.chip}, by its compiler",
                        "date": run_facts["date"],
                        "results": results,
                    }
                    options.json.parent.mkdir(parents=True, exist_ok=True)
                    options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return None


def _run_facts() -> dict[str, Any]:
    """Return the date, the package versions, the commit and the command of this run."""
    found = environment()
    return {
        "date": found["date"],
        "versions": {**found["versions"], **tpu_compiler.versions()},
        "commit": found["commit"],
        "command": found["command"],
    }


if __name__ == "__main__":
    sys.exit(main())
