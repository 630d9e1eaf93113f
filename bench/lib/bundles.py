"""Count the executed bundles of TPU programs from the compiler's dumps.

A TPU core issues one bundle of instructions per cycle, in order. A dump contains the bundles of a program, its loops
with their trip counts if these are constant, and the branches that skip bundles. The execution count of a bundle is the
product of the trip counts of the surrounding loops, multiplied by the fraction of executions in which no branch skips
the bundle. The number of executed bundles is the sum of the execution counts of all bundles.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence

#: Number of bundles of a branch and its delay slots. They are executed even if the branch is taken.
BRANCH = 5
#: Minimum number of bundles for a separate execution count. Shorter spans without matrix multiplications get the
#: execution count of the surrounding code.
SMALL = 24
_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*([> ]*)\{(\})?")
_JUMP = re.compile(r"sbr\.rel \((!?%\w+)\) target = \$region(\d+)")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_EXIT = re.compile(r"scmp\.ge\.s32\.totalorder (%\w+), (%?\w+) /\* loop exit test")
_CALL = re.compile(r"inlined_call [^/]*/\* %(\S+) = ")


@dataclasses.dataclass(frozen=True)
class Span:
    """A range of consecutive bundles: a loop, or bundles that a branch can skip (a skippable range).

    Attributes:
        first: Index of the first bundle.
        end: Index after the last bundle.
        trips: Trip count of a loop, ``None`` if not constant; 0 for a skippable range.
    """

    first: int
    end: int
    trips: int | None = 0

    @property
    def is_loop(self) -> bool:
        return self.trips != 0

    def holds(self, other: Span) -> bool:
        """Return True if the other span lies strictly inside this span."""
        return self != other and self.first <= other.first and other.end <= self.end


@dataclasses.dataclass(frozen=True)
class Program:
    """The bundles of a program.

    Attributes:
        count: Number of bundles.
        spans: Loops and skippable ranges, ordered by their first bundles.
        products: Indices of the bundles that issue matrix multiplications, in order.
        calls: Names of called programs, each with the index of the calling bundle.
    """

    count: int
    spans: tuple[Span, ...]
    products: tuple[int, ...]
    calls: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str) -> Program:
        """Parse the dump of a program's final bundles."""
        depths: list[int] = []
        products: list[int] = []
        regions: dict[int, int] = {}
        jumps: list[tuple[int, int]] = []
        bodies: list[tuple[int, int]] = []
        exits: list[tuple[int, str, str]] = []
        calls: list[tuple[str, int]] = []
        for line in text.splitlines():
            if match := _BUNDLE.match(line):
                # The dump omits the loop depth of empty bundles.
                depths.append(depths[-1] if match[4] and depths else match[3].count(">"))
                if match[2] == "LB":
                    bodies.append((len(depths) - 1, depths[-1]))
            at = len(depths) - 1
            if at < 0:
                continue
            # If a comment after the last instruction of a bundle starts a region, the region starts at this bundle.
            for number in _REGION.findall(line):
                regions.setdefault(int(number), at)
            jumps += [(at, int(target)) for _, target in _JUMP.findall(line)]
            exits += [(at, counter, bound) for counter, bound in _EXIT.findall(line)]
            calls += [(name, at) for name in _CALL.findall(line)]
            if "matmul" in line:
                products.append(at)
        spans = [
            Span(at + BRANCH, regions[target])
            for at, target in jumps
            if target in regions and regions[target] > at + BRANCH
        ]
        for first, depth in bodies:
            end = next((at for at in range(first, len(depths)) if depths[at] < depth), len(depths))
            bounds = [each for each in exits if first <= each[0] < end and depths[each[0]] == depth]
            spans.append(Span(first, end, _trips(text, *bounds[-1][1:]) if bounds else None))
        spans.sort(key=lambda span: (span.first, -span.end))
        return cls(len(depths), tuple(spans), tuple(products), tuple(calls))

    def multiplies(self, span: Span) -> bool:
        """Return True if a span contains matrix multiplications."""
        return bisect.bisect_left(self.products, span.first) < bisect.bisect_left(self.products, span.end)

    def inside(self, span: Span) -> Iterator[Span]:
        """Return the spans strictly inside another span."""
        return (other for other in self.spans if span.holds(other))

    def weights(self, factor: Callable[[Span], float]) -> list[float]:
        """Return the execution count of each bundle.

        Args:
            factor: Function that returns the executions of a span per execution of the surrounding code.
        """
        weights = [1.0] * self.count
        for span in self.spans:
            by = factor(span)
            if by != 1:
                for at in range(span.first, span.end):
                    weights[at] *= by
        return weights


def _trips(text: str, counter: str, bound: str) -> int | None:
    """Return the trip count of a loop whose counter starts at 0; ``None`` if the trip count is not constant.

    Args:
        text: Dump of the program.
        counter: Register of the loop's counter.
        bound: Bound of the loop's exit test: a number or a register.
    """
    if not bound.isdigit():
        found = re.search(rf"{re.escape(bound)} = smov\.u32 (\d+)", text)
        if found is None:
            return None
        bound = found[1]
    step = re.search(rf"{re.escape(counter)} = sadd\.s32 (\d+), ", text)
    return int(bound) // (int(step[1]) if step else 1)


def utilization(text: str) -> tuple[list[str], list[int], list[list[int]]]:
    """Parse a dump of the slots that bundles use.

    Returns:
        Names of the core's units, the number of slots per bundle for each unit, and a row for each bundle with the
        number of slots of each unit that the bundle uses.
    """
    head, _, body = text.partition("== UTILIZATION:")
    names, capacities = head.strip().splitlines()[1:3]
    used = [[int(number) for number in line.split()] for line in body.splitlines() if line.strip()]
    return [name.strip() for name in names.split(",")], [int(number) for number in capacities.split()], used


def totals(weights: Sequence[float], used: Sequence[Sequence[int]]) -> list[float]:
    """Return, for each unit, the number of slots that all executed bundles use."""
    return [sum(weight * row[unit] for weight, row in zip(weights, used, strict=False)) for unit in range(len(used[0]))]


@dataclasses.dataclass(frozen=True)
class Executions:
    """Execution counts of the parts of a Pallas kernel.

    Attributes:
        steps: Number of grid steps.
        active: Number of grid steps with matrix multiplications.
        tiles: Number of outer tiles. The first grid step of a tile also runs initialization code. Its last grid step
            also writes results.
        bodies: Execution count of each innermost span with matrix multiplications, in the order of ``Program.spans``.
    """

    steps: int
    active: int
    tiles: int
    bodies: tuple[int, ...]


def kernel_weights(program: Program, executions: Executions) -> list[float]:
    """Return the execution count of each bundle of a Pallas kernel.

    Raises:
        ValueError: The kernel has no loop over its grid, or it has several innermost spans with matrix multiplications
            and their number is not the length of ``executions.bodies``.
    """
    multiplying = [span for span in program.spans if program.multiplies(span)]
    innermost = [span for span in multiplying if not any(span.holds(other) for other in multiplying)]
    loops = [span for span in program.spans if span.is_loop and program.multiplies(span)]
    if not loops:
        raise ValueError("the kernel has no loop over its grid")
    grid = loops[0]
    bodies = dict(zip(innermost, executions.bodies, strict=False)) if len(innermost) == len(executions.bodies) else {}
    if not bodies and len(innermost) != 1:
        raise ValueError(f"the kernel has {len(innermost)} parts that multiply, not {len(executions.bodies)}")
    weights = program.weights(lambda span: 1.0)
    inside = [span for span in multiplying if grid.holds(span) and span not in bodies]
    step_span = inside[0] if inside else grid

    def put(span: Span, count: float) -> None:
        weights[span.first : span.end] = [count] * (span.end - span.first)

    put(grid, grid.trips or executions.steps)
    for span in program.spans:
        if not grid.holds(span):
            continue
        if span in bodies:
            put(span, bodies[span])
        elif span == step_span:
            put(span, executions.steps)
        elif program.multiplies(span):
            put(span, sum(executions.bodies) if span.trips is None else executions.active)
        elif step_span.holds(span) and span.end - span.first >= SMALL and not any(s.holds(span) for s in bodies):
            put(span, executions.tiles)
    return weights


def fusion_weights(program: Program) -> list[float]:
    """Return the execution count of each bundle of an XLA fusion.

    A loop without a constant trip count, as in some copies, counts as a single trip. The execution counts of its
    bundles are then too low.
    """

    def factor(span: Span) -> float:
        if span.is_loop:
            return 1 if span.trips is None else span.trips
        around = [loop for loop in program.spans if loop.is_loop and loop.holds(span)]
        if around:
            loop = around[-1]
            # A range with more than half of the loop's bundles is assumed to be the loop's computation. The first trip
            # of the loop only starts copies and the final trip only waits for copies, so these trips skip the range.
            if (loop.trips or 0) > 2 and 2 * (span.end - span.first) > loop.end - loop.first:
                return 1 - 2 / (loop.trips or 1)
        return 1

    return program.weights(factor)
