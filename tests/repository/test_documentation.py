"""The Python code of each documentation page runs as a program, and passes type checks as a user's file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import FILES, NOTEBOOKS, PAGES, program_of
from tests.support.programs import PACKAGE, run_python

ROOT = Path(__file__).parents[2]


def test_every_page_is_in_the_sites_table() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", index, re.MULTILINE | re.DOTALL)
    listed = {line for tree in trees for line in tree.split() if not line.startswith(":")}
    pages = [*(page.stem for page in ROOT.glob("docs/*.md")), *(f"notebooks/{page.stem}" for page in NOTEBOOKS)]
    assert set(pages) - listed == {"index"}


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that sites generate for a page's headings when they render Markdown."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")):
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)):
            path, _, anchor = target.partition("#")
            if "://" in target:
                continue
            file = page if not path else page.parent / path
            if not file.exists() or (anchor and anchor not in anchors_of(file)):
                wrong.append(f"{page.name}: {target}")
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("flatbuffers", "flax", "matplotlib", "optax", "sklearn"):
        pytest.importorskip(package)
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    result = run_python(program_of(page), devices=None)  # the code of a page sets the number of devices
    assert result.returncode == 0, f"{page.name}: {result.stderr}"


def test_pages_type_check(tmp_path: Path) -> None:
    """Check all pages in one run, because checking JAX's types takes most of the time."""
    mypy = sys.executable, "-m", "mypy"
    environment: dict[str, str] = {}  # empty, so that the developer's settings have no effect
    found = subprocess.run([*mypy, "--version"], capture_output=True, text=True, env=environment, check=False)
    if "No module named" in found.stderr:
        pytest.skip(f"mypy is not installed: {found.stderr.strip()}")
    # Arrange the package as if it were installed: flax_modules is a folder inside natten_jax.
    package = tmp_path / "site" / "natten_jax"
    package.mkdir(parents=True)
    for entry in (*PACKAGE.iterdir(), ROOT / "flax_modules"):
        (package / entry.name).symlink_to(entry)
    programs = [tmp_path / f"{page.stem.replace('-', '_')}.py" for page in PAGES]
    for program, page in zip(programs, PAGES, strict=True):
        program.write_text(program_of(page))
    # Ignore missing types in JAX and in other packages.
    untyped = "--allow-untyped-calls", "--disable-error-code=import-untyped", "--follow-imports=silent"
    command = [*mypy, "--strict", *untyped, f"--cache-dir={os.devnull}", "--config-file=", *map(str, programs)]
    environment["MYPYPATH"] = str(package.parent)
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_installation_page_lists_every_environment_variable() -> None:
    sources = [ROOT / "setup.py", *PACKAGE.rglob("*.py")]
    read = {name for path in sources for name in re.findall(r"""["'](NATTEN_JAX_[A-Z_]+)["']""", path.read_text())}
    assert len(read) >= 9
    page = (ROOT / "docs" / "installation.md").read_text()
    assert not [name for name in sorted(read) if f"`{name}" not in page]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_with_their_results(notebook: Path) -> None:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    program = "\n".join("".join(cell["source"]) for cell in cells)
    assert "pip install" in program
    # The notebook must also run without compiled kernels, so it must not name their backends.
    assert not re.search(r"\b(cpu|cutlass|hopper)-f(na|mha)", program)
