"""The Blackwell kernels compile to machine code for ``sm_100a``, without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.interpreted_blackwell import needs_interpreter
from tests.support.machine_code import KERNELS, PROBLEMS, compiled, missing


@needs_interpreter
@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_kernels_are_assembled_and_keep_to_their_registers(number: int, tmp_path: Path) -> None:
    for name, (ptx, said) in compiled(tmp_path, number).items():
        for instruction in ("tcgen05.mma", "tcgen05.ld", "tcgen05.st", "cp.async.bulk.tensor", "setmaxnreg"):
            # Gradients of logits that are transposed are written to shared memory.
            assert instruction in ptx or (name, instruction) == (KERNELS[2], "tcgen05.st")
        assert name in said and "for 'sm_100a'" in said
        assert "error" not in said
        spilled = re.search(r"(\d+) bytes spill stores", said)
        assert spilled is not None and int(spilled[1]) <= 128
