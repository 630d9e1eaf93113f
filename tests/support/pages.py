"""Python code of the documentation as programs: all code blocks of a page, or all cells of a notebook, in order."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)

#: Files that the pages' Python code may read. Readers create them with the commands on the page.
FILES = {"tuned.json": json.dumps({"best_configuration": {"q_tile_shape": [2, 8, 8], "kv_tile_shape": [2, 8, 8]}})}


def program_of(page: Path) -> str:
    """Return all Python code of a page, at its original line numbers, or of a notebook, where ``%pip`` raises."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        program = "\n".join("".join(cell["source"]) for cell in cells)
        return re.sub(r"^( *)%pip .*$", r'\1raise RuntimeError("natten_jax is not installed")', program, flags=re.M)
    lines = [""] * text.count("\n")
    for match in _BLOCK.finditer(text):
        first = text.count("\n", 0, match.start(2))
        block = textwrap.dedent(match[2]).splitlines()
        lines[first : first + len(block)] = block
    return "\n".join(lines).rstrip() + "\n"


PAGES = [
    page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")))
    if _BLOCK.search(page.read_text(encoding="utf-8"))
]
NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.ipynb"))
