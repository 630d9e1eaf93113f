"""CTAs with a ring share strips that take longer than others."""

from __future__ import annotations

from pathlib import Path

from tests.support.native_programs import output_of


def test_no_cta_has_many_of_the_strips_that_take_longest(tmp_path: Path) -> None:
    """Keys next to a border are seen by more queries than others: with 8 strips and 132 CTAs, some had two of them."""
    sources = [f"cuda/small/{name}.cpp" for name in ("ring_balance", "ring_shape")]
    output = output_of("ring_turns", sources, tmp_path, options=["-O1"])
    layouts = [tuple(map(int, line.split())) for line in output.splitlines()]
    assert len(layouts) == 6
    for average, most, most_without, wrong in layouts:
        assert wrong == 0
        assert most <= most_without
        assert most <= average + 1
    assert any(most < most_without for _, most, most_without, _ in layouts)
