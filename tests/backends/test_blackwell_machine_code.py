"""The Blackwell kernels compile to machine code for ``sm_100a``, without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.interpreted_blackwell import needs_interpreter
from tests.support.machine_code import KERNELS, PROBLEMS, compiled, ignored, missing

#: A kernel that reduces its registers without a number of blocks per multiprocessor.
SETMAXNREG = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry kernel()
.maxntid 384{bound}
{{
  setmaxnreg.dec.sync.aligned.u32 24;
  ret;
}}
"""


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="there is no ptxas")
@pytest.mark.parametrize(("bound", "is_ignored"), [("", True), ("\n.minnctapersm 1", False)])
def test_a_directive_that_ptxas_ignores_is_found_in_what_it_prints(
    bound: str, is_ignored: bool, tmp_path: Path
) -> None:
    source = tmp_path / "kernel.ptx"
    source.write_text(SETMAXNREG.format(bound=bound))
    command = [
        "ptxas",
        "--verbose",
        "--gpu-name",
        "sm_100a",
        "--output-file",
        str(tmp_path / "kernel.cubin"),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [("setmaxnreg" in line) for line in ignored(done.stderr)] == [True] * is_ignored


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
        assert ignored(said) == []
        spilled = re.search(r"(\d+) bytes spill stores", said)
        assert spilled is not None and int(spilled[1]) <= 128
