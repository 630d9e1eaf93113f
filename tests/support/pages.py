"""Programs from the documentation: all Python blocks of a page, or all code cells of a notebook, in order."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)

#: Content of the files that the Python code of pages reads, by name. Readers create them with commands on the page.
FILES = {"tuned.json": json.dumps({"best_configuration": {"q_tile_shape": [2, 8, 8], "kv_tile_shape": [2, 8, 8]}})}


def program_of(page: Path) -> str:
    """Return all Python code of a page or a notebook.

    Code of a page keeps its line numbers. In notebooks, code that raises an error replaces each ``%pip`` line.
    """
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
