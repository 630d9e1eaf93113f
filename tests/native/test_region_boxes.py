"""What the kernels for small windows keep in shared memory has room for what is seen in layouts of any length."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_boxes_and_tables_have_room_for_layouts_of_all_lengths(tmp_path: Path) -> None:
    """Keys that have both ends of a short layout near are seen by more queries than any others."""
    program = tmp_path / "boxes"
    compiler = (sysconfig.get_config_var("CXX") or "g++").split()[0]
    sources = [
        ROOT / "tests/native/region_boxes.cpp",
        *(ROOT / "csrc/cuda/small" / f"{name}.cpp" for name in ("region", "region_shape", "region_time", "ring_shape")),
    ]
    includes = [ROOT / "csrc", ROOT / "csrc/include"]
    command = [compiler, "-O1", "-std=c++17", *(f"-I{each}" for each in includes), *map(str, sources)]
    subprocess.run([*command, "-o", str(program)], check=True, capture_output=True, text=True)
    regions, *too_small = map(int, subprocess.run([program], check=True, capture_output=True, text=True).stdout.split())
    assert regions > 1000
    assert too_small == [0, 0]
