"""Which launches exchange data between devices, by what XLA calls its instructions and NCCL its kernels."""

from __future__ import annotations

import re

from natten_jax.profiler.traces.program import Instruction

#: Opcodes; longer ones before those that they end in.
KINDS = (
    "all-gather",
    "all-reduce",
    "ragged-all-to-all",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "reduce-scatter",
)

# Instructions may be split into two that begin and end them; numbers tell instructions of one kind apart.
_INSTRUCTION = re.compile(rf"({'|'.join(KINDS)})(-start|-update|-done)?([._]\d+)*")

_NCCL = re.compile(r"\bnccl(?:Dev)?Kernel_(\w+)", re.IGNORECASE)
# By the beginning of what follows; permutations and exchanges of all with all are both sent and received.
_OF_NCCL = {
    "allgather": "all-gather",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "broadcast": "collective-broadcast",
    "reducescatter": "reduce-scatter",
    "sendrecv": "send and receive",
}


def kind_of(symbol: str, instruction: Instruction) -> str | None:
    """What kind of exchange a launch is; ``None`` where it is none.

    Args:
        symbol: A kernel's symbol on a GPU; the instruction's name on a CPU.
        instruction: The instruction that launched it.
    """
    for each in (instruction.opcode, *sorted(instruction.fused)):
        if match := _INSTRUCTION.fullmatch(each):
            return match[1]
    if not instruction.opcode and (named := kind_of_instruction(symbol)):
        return named
    if match := _NCCL.search(symbol):
        kernel = match[1].lower()
        return next((kind for start, kind in _OF_NCCL.items() if kernel.startswith(start)), match[1])
    return None


def kind_of_instruction(name: str) -> str | None:
    """What kind of exchange an instruction of this name is; ``None`` where it is none."""
    match = _INSTRUCTION.fullmatch(name)
    return None if match is None else match[1]


def is_of_nccl(symbol: str) -> bool:
    """Whether a kernel is NCCL's."""
    return _NCCL.search(symbol) is not None
