"""CTAs with a ring share strips that take longer than others."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_cta_has_many_of_the_strips_that_take_longest(tmp_path: Path) -> None:
    """Keys next to a border are seen by more queries than others: with 8 strips and 132 CTAs, some had two of them."""
    program = tmp_path / "turns"
    compiler = (sysconfig.get_config_var("CXX") or "g++").split()[0]
    sources = [
        ROOT / "tests/native/ring_turns.cpp",
        *(ROOT / "csrc/cuda/small" / f"{name}.cpp" for name in ("ring_balance", "ring_shape")),
    ]
    includes = [ROOT / "csrc", ROOT / "csrc/include"]
    command = [compiler, "-O1", "-std=c++17", *(f"-I{each}" for each in includes), *map(str, sources)]
    subprocess.run([*command, "-o", str(program)], check=True, capture_output=True, text=True)
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    layouts = [tuple(map(int, line.split())) for line in output.splitlines()]
    assert len(layouts) == 6
    for average, most, most_without, wrong in layouts:
        assert wrong == 0
        assert most <= most_without
        assert most <= average + 1
    assert any(most < most_without for _, most, most_without, _ in layouts)
