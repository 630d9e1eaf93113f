"""Tables of flags and backends in the documentation match the program, and sample outputs match the real output."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS))

import generated  # noqa: E402

from natten_jax import backends  # noqa: E402
from natten_jax.backends.select import CHOICES  # noqa: E402
from natten_jax.native import module as native  # noqa: E402
from natten_jax.profiler.options import FOREIGN_FLAGS, profiler_parser  # noqa: E402

pytestmark = pytest.mark.skipif(native.path() is None, reason="the native module is not built")

PAGES = [page for page in generated.PAGES if generated._TABLE.search(page.read_text(encoding="utf-8"))]
SAMPLES = [
    (page.name, match)
    for page in generated.PAGES
    for match in generated._SAMPLE.finditer(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_of_this_version(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- table: ") == len(generated._TABLE.findall(text)) == text.count("<!-- end of table -->")
    for marker, name, _ in generated._TABLE.findall(text):
        assert f"{marker}\n{generated.table(name)}\n\n" in text, f"{page.name}: {name}; make tables writes it"


@pytest.mark.parametrize(("name", "match"), SAMPLES, ids=[name for name, _ in SAMPLES])
def test_samples_equal_the_printed_output(name: str, match: re.Match[str]) -> None:
    pytest.importorskip("rich")
    assert generated.generated(match[0]) == match[0], f"{name}; make tables writes it"


def test_every_option_has_a_row_with_its_default() -> None:
    page = (DOCS / "profiler-options.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `-")]
    listed = {option: row for row in rows for option in re.findall(r"`(-[-\w]+)`", row[0])}
    parser = profiler_parser()
    every = {option for action in parser._actions for option in action.option_strings} | FOREIGN_FLAGS.keys()
    assert set(listed) == every
    defaults = parser.parse_args(["-i", "8"])
    for action in parser._actions:
        value = getattr(defaults, action.dest, None)
        if action.help != argparse.SUPPRESS and isinstance(value, (int, str)) and not isinstance(value, bool):
            assert listed[action.option_strings[-1]][2].strip() == str(value)


def test_the_page_of_backends_names_each_and_all_that_it_may_ignore() -> None:
    page = (DOCS / "backends.md").read_text(encoding="utf-8")
    for family in (backend.family for backend in backends.registered()):
        assert f"`{family}-" in page
    for argument in CHOICES:
        assert f"\n| `{argument}` |" in page
    for backend in backends.registered():
        assert re.search(rf"^\*\*`{backend.family}-\*`\*\* are", page, re.MULTILINE), backend.family
