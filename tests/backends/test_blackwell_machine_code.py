"""The Blackwell kernels compile to machine code for ``sm_100a``, without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.interpreted_blackwell import needs_interpreter
from tests.support.machine_code import compiled, missing


@needs_interpreter
@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_kernel_is_assembled_and_keeps_to_its_registers(tmp_path: Path) -> None:
    ptx, said = compiled(tmp_path)
    for instruction in ("tcgen05.mma", "tcgen05.ld", "tcgen05.st", "cp.async.bulk.tensor", "setmaxnreg"):
        assert instruction in ptx
    assert "natten_jax_blackwell_forward" in said and "for 'sm_100a'" in said
    assert "error" not in said
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert spilled is not None and int(spilled[1]) <= 64
