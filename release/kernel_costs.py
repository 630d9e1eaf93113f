"""Print the compile time and the object size of each kernel template as a Markdown table.

The program reads the log and the object files of a build with Ninja. Times are elapsed times of compiler calls, so
build without a compiler cache, and with at most one parallel call per core. A template that several targets compile is
counted once per target.

Example:
    NATTEN_JAX_CUDA_ARCHS=90a python setup.py build_ext --inplace
    python release/kernel_costs.py build/temp.*/
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: Matches the end of an object's path. The group is the path of the object's source.
_OBJECTS = re.compile(r"\.dir/(.+)\.o$")
#: Matches the element type in the name of a generated source. The type is at the end of the name, or before the name of
#: a feature.
_ELEMENT = re.compile(r"_k[A-Z][A-Za-z]*(?:8E4M3|16|32)(?=k|$)")


class Costs(NamedTuple):
    """Costs of the object files of one template.

    Attributes:
        objects: Number of object files.
        mebibytes: Total size of the object files in MiB.
        seconds: Sum of the compile times in seconds.
        longest: The longest compile time in seconds.
    """

    objects: int
    mebibytes: float
    seconds: float
    longest: float


def objects_of(folder: Path) -> Iterator[tuple[str, float, int]]:
    """Yield the source, the compile time in seconds and the size in bytes of each object."""
    for log in folder.rglob(".ninja_log"):
        latest: dict[str, float] = {}
        for line in log.read_text().splitlines():
            fields = line.split("\t")
            if len(fields) == 5:
                latest[fields[3]] = (int(fields[1]) - int(fields[0])) / 1000
        for output, seconds in latest.items():
            match, file = _OBJECTS.search(output), log.parent / output
            if match and file.is_file():
                yield match[1], seconds, file.stat().st_size


def costs_by_template(folder: Path) -> dict[str, Costs]:
    """Sum the costs of each template over its element types, and the costs of the host code in each folder."""
    found: dict[str, list[tuple[float, int]]] = collections.defaultdict(list)
    for source, seconds, size in objects_of(folder):
        path = Path(source)
        is_kernel = path.suffix == ".cu"
        name = _ELEMENT.sub(" ", path.stem).strip() if is_kernel else "host code"
        found[f"{path.parent}/{name}"].append((seconds, size))
    return {
        name: Costs(len(each), sum(s for _, s in each) / 2**20, sum(t for t, _ in each), max(t for t, _ in each))
        for name, each in found.items()
    }


def table(costs: dict[str, Costs]) -> str:
    """Format the costs as a Markdown table, sorted by the sum of the compile times, the largest first."""
    total = Costs(*(sum(column) for column in zip(*costs.values(), strict=True)))
    total = total._replace(longest=max(each.longest for each in costs.values()))
    rows = [*sorted(costs.items(), key=lambda item: -item[1].seconds), ("all", total)]
    lines = ["| template | objects | MiB | seconds | longest |", "|---|---:|---:|---:|---:|"]
    lines += [f"| {name} | {c.objects} | {c.mebibytes:.1f} | {c.seconds:.0f} | {c.longest:.0f} |" for name, c in rows]
    return "\n".join(lines)


def main() -> int:
    """Print the table for a build folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the build; its subfolders are searched as well")
    costs = costs_by_template(parser.parse_args().folder)
    if not costs:
        print("release/kernel_costs.py: there is no .ninja_log with object files below the folder", file=sys.stderr)
        return 1
    print(table(costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
