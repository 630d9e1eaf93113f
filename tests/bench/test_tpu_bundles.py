"""Counts of bundles: what is read of the compiler's text, and a kernel that is compiled where the compiler is there."""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import tpu_bundles
from lib import bundles, hlo_counts, tpu_visits
from lib.bundles import Executions, Program, Span

from natten_jax.problem import problem_of

#: The form of what the compiler writes: a loop over a grid of 8 steps and two for copies, a part for the first step of
#: a tile, and two that multiply, of which a step takes one.
KERNEL = "\n".join(
    [
        "= control target key start",
        "LB: loop body",
        "= control target key end",
        "     0   :  { %s1 = smov.u32 0 } /* Start region 1 */",
        "   0x1 LB: > { %s2 = sadd.s32 1, %s3_s4  ;;  %s3_s4 = sphi %s1, %s2 }",
        "   0x2   : > { %5 = sbr.rel (%p1) target = $region9 }",
        *(f"   {at:#x}   :  {{}}" for at in range(0x3, 0x7)),
        "   0x7   : > { %6 = sbr.rel (%p2) target = $region5 }",
        *(f"   {at:#x}   :  {{}}" for at in range(0x8, 0xC)),
        *(f"   {at:#x}   : > {{ %7 = vst [vmem:[%s9] sm:$0xff] %v1 }}" for at in range(0xC, 0xC + 24)),
        "  0x24 PF: > { %8 = smov.u32 3 } /* Start/End empty region 5 :: Start region 6 */",
        "  0x25   : > { %9 = sbr.rel (%p3) target = $region7 }",
        *(f"  {at:#x}   :  {{}}" for at in range(0x26, 0x2A)),
        *(f"  {at:#x}   : > {{ %10 = vmatmul.bf16 %v1 }}" for at in range(0x2A, 0x30)),
        "  0x30 PF: > { %11 = sbr.rel (%p4) target = $region8 } /* Start/End empty region 7 */",
        *(f"  {at:#x}   :  {{}}" for at in range(0x31, 0x35)),
        *(f"  {at:#x}   : > {{ %12 = vmatmul.bf16 %v1 }}" for at in range(0x35, 0x3F)),
        "  0x3f PF: > { %13 = smov.u32 3 } /* Start/End empty region 8 */",
        "  0x40 PF: > { %p7 = scmp.ge.s32.totalorder %s2, 10 /* loop exit test */ } /* Start/End empty region 9 */",
        "  0x41   :  { %14 = sbr.rel (!%p7) target = $region100 }",
    ]
)

UTILIZATION = """== CAPACTIY:
MATMUL, VALU
    4     4
== UTILIZATION:
1 2
0 4
"""

LOOP = """HloModule jit_f

%condition (arg: (s32[])) -> pred[] {
  %arg = (s32[]) parameter(0)
  %constant.1 = s32[] constant(12)
  %i = s32[] get-tuple-element(%arg), index=0
  ROOT %lt = pred[] compare(%i, %constant.1), direction=LT, metadata={op_name="while"}
}

%fused.1 (p: f32[8]) -> f32[8] {
  ROOT %n.1 = f32[8] negate(%p)
}

%fused.2 (p: f32[8]) -> f32[8] {
  ROOT %n.2 = f32[8] negate(%p)
}

%body (arg: (s32[])) -> (s32[]) {
  %a = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused.1
  ROOT %b = f32[8]{0} fusion(%y), kind=kLoop, calls=%fused.2
}

ENTRY %main (q: f32[8]) -> f32[8] {
  %w = (s32[]) while(%t), condition=%condition, body=%body
  ROOT %c = f32[8]{0} copy(%q)
}
"""


def test_loops_and_branches_are_found() -> None:
    program = Program.parse(KERNEL)
    assert program.count == 0x42
    grid, steps, prepared, first, second = program.spans
    assert grid == Span(1, 0x41, 10)
    assert steps == Span(7, 0x40) and prepared == Span(0xC, 0x24)
    assert first == Span(0x2A, 0x30) and second == Span(0x35, 0x3F)
    assert [program.multiplies(span) for span in program.spans] == [True, True, False, True, True]


def test_a_kernels_bundles_are_counted() -> None:
    program = Program.parse(KERNEL)
    weights = bundles.of_kernel(program, Executions(steps=8, active=7, tiles=4, bodies=(5, 2)))
    outside = 2 + 6 * 10 + 10
    of_steps = 0x40 - 7 - 24 - 6 - 10
    assert sum(weights) == outside + of_steps * 8 + 24 * 4 + 6 * 5 + 10 * 2


def test_a_kernel_with_other_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="the kernel has 2 parts that multiply, not 3"):
        bundles.of_kernel(Program.parse(KERNEL), Executions(8, 8, 8, (1, 2, 3)))


def test_units_are_read() -> None:
    names, capacities, used = bundles.utilization(UTILIZATION)
    assert names == ["MATMUL", "VALU"] and capacities == [4, 4]
    assert bundles.totals([10, 1], used) == [10, 24]


def test_loops_of_a_program_are_counted() -> None:
    hlo = hlo_counts.Hlo.parse(LOOP)
    assert [(name, times) for name, _, times in hlo.executed()] == [("a", 12), ("b", 12), ("c", 1)]
    texts = hlo.computations["body"]
    assert hlo.signature(texts["a"]) == hlo.signature(texts["b"]) != hlo.signature(hlo.computations["main"]["c"])


def test_blocks_of_flat_tokens_are_those_of_the_mask() -> None:
    problem = problem_of((6, 8), (3, 5), (2, 1), is_causal=(True, False))
    sees = np.zeros((6, 8, 6, 8), bool)
    for x, y in np.ndindex(6, 8):
        ends = [axis.bounds(np.asarray(at), (n, n)) for axis, at, n in zip(problem.axes, (x, y), (6, 8), strict=True)]
        sees[x, y, int(ends[0][0]) : int(ends[0][1]), int(ends[1][0]) : int(ends[1][1])] = True
    pairs = sees.reshape(6, 8, 12, 4).any(axis=(1, 3))
    assert tpu_visits.blocks_of_flat_tokens(problem, 8, 4) == (6, int(pairs.sum(axis=1).max()), int(pairs.sum()))


@pytest.mark.skipif(util.find_spec("libtpu") is None, reason="the compiler for TPUs, libtpu, is not installed")
def test_a_kernel_is_compiled_and_counted() -> None:
    (row,) = (row for row in tpu_bundles.ROWS if row.name == "64x64 k7")
    found = tpu_bundles.count("v5e", row, "forward", "natten_jax")
    kernel = found["kernels"]["natten_jax_tpu_forward"]
    assert 0 < kernel["units"]["MATMUL"] < kernel["bundles"] <= found["program"]
