"""What the kernels for small windows keep in shared memory has room for what is seen in layouts of any length."""

from __future__ import annotations

from pathlib import Path

from tests.support.native_programs import output_of


def test_boxes_and_tables_have_room_for_layouts_of_all_lengths(tmp_path: Path) -> None:
    """Keys that have both ends of a short layout near are seen by more queries than any others."""
    sources = [f"cuda/small/{name}.cpp" for name in ("region", "region_shape", "region_time", "ring_shape")]
    regions, *too_small = map(int, output_of("region_boxes", sources, tmp_path, options=["-O1"]).split())
    assert regions > 1000
    assert too_small == [0, 0]
