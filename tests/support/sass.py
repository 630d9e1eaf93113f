"""Checks of the CUDA kernels' machine code: early arrivals at barriers, and collectives of diverged lanes.

Instructions with variable latency set one of six scoreboards. Every instruction can wait for scoreboards. The encoding
since compute capability 7.0 is as follows. In the upper 64 bits of an instruction, bits 46 to 48 are the number of the
scoreboard that the instruction sets. Bits 52 to 57 are a bit mask of the scoreboards that it waits for.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_FUNCTION = re.compile(r"\s*Function : (\S+)")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/")
_UPPER_HALF = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
_BRANCH = re.compile(r"\bBRA\b.*?0x([0-9a-f]+)")
_QUEUED = re.compile(r"\b(LDS|SHFL)\b")
_NO_SCOREBOARD = 7
_UNMARKED = 1 << 6


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        address: Offset within the function, in bytes.
        text: The disassembly.
        sets: Scoreboard that the hardware releases when it has written the instruction's result, or ``None``.
        waits: Bit mask of the scoreboards that the instruction waits for.
    """

    address: int
    text: str
    sets: int | None
    waits: int


def functions(lines: Iterable[str]) -> Iterator[tuple[str, list[Instruction]]]:
    """Yield the names and instructions of the kernels that ``cuobjdump -sass`` lists."""
    name = ""
    found: list[Instruction] = []
    pending: tuple[int, str] | None = None
    for line in lines:
        if match := _FUNCTION.match(line):
            if found:
                yield name, found
            name, found, pending = match[1], [], None
        elif match := _INSTRUCTION.match(line):
            pending = int(match[1], 16), match[2].strip()
        elif pending and (match := _UPPER_HALF.match(line)):
            upper = int(match[1], 16)
            scoreboard = upper >> 46 & 7
            sets = None if scoreboard == _NO_SCOREBOARD else scoreboard
            found.append(Instruction(*pending, sets, upper >> 52 & 63))
            pending = None
    if found:
        yield name, found


def early_arrivals(instructions: Iterable[Instruction]) -> list[Instruction]:
    """Return arrivals at shared-memory barriers that can be issued before earlier matrix loads have read their data.

    Loads and shuffles share a queue and complete in issue order. A load without a scoreboard has therefore completed
    when a later load or shuffle with a scoreboard has completed. ptxas relies on this order for matrix instructions
    that read loaded data. The scan goes through the code in address order. It follows only one kind of branch: from the
    end of a loop to its beginning.
    """
    code = list(instructions)
    found: list[Instruction] = []
    # Bit masks of the scoreboards of loads that are pending at the end of a loop. The key is the address of the loop's
    # beginning. _UNMARKED is set if a load without a scoreboard is pending.
    pending_at: dict[int, int] = {}
    for _ in range(2):
        found, pending = [], 0
        for each in code:
            pending = (pending | pending_at.get(each.address, 0)) & ~each.waits
            if " LDSM" in f" {each.text}":
                pending = pending | _UNMARKED if each.sets is None else pending & ~_UNMARKED | 1 << each.sets
            elif pending & _UNMARKED and each.sets is not None and _QUEUED.search(each.text):
                pending = pending & ~_UNMARKED | 1 << each.sets
            elif "SYNCS.ARRIVE" in each.text and pending:
                found.append(each)
            elif (match := _BRANCH.search(each.text)) and (target := int(match[1], 16)) <= each.address:
                pending_at[target] = pending_at.get(target, 0) | pending
    return found


def divergent_collectives(instructions: Iterable[Instruction]) -> list[Instruction]:
    """Return branches to code that reconverges a warp. ptxas inserts them if a collective's lanes may have diverged.

    The usual cause is a shuffle in a branch that only some lanes take. A warp that runs this shuffle waits forever.
    """
    return [each for each in instructions if "BRA.DIV" in each.text]


def found_in_kernels(
    find: Callable[[Iterable[Instruction]], list[Instruction]], library: Path, names: str
) -> dict[str, list[Instruction]]:
    """Apply ``find`` to each kernel whose name matches the regular expression ``names``. Return the results by name."""
    listing = subprocess.run(["cuobjdump", "-symbols", library], capture_output=True, text=True, check=True).stdout
    symbols = re.findall(r"^(?:STT_)?FUNC\s.*?(\S+)$", listing, re.MULTILINE)
    wanted = sorted({symbol for symbol in symbols if re.search(names, symbol)})
    assert wanted, f"no kernel's name matches {names}"
    command = ["cuobjdump", "-sass", "-fun", ",".join(wanted), str(library)]
    # The library has several cubins. For each cubin, cuobjdump prints warnings about the kernels that are not in it.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        found = {name: find(instructions) for name, instructions in functions(process.stdout)}
    assert process.returncode == 0
    return found


def missing() -> str | None:
    """Return the reason why machine code cannot be listed on this machine, or ``None``."""
    return None if shutil.which("cuobjdump") else "there is no cuobjdump"
