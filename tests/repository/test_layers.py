"""Packages have levels. A module imports only from its package and from lower levels, and imports have no cycles."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator, Mapping
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Levels from bottom to top. A level contains packages, and modules whose level differs from their package's level.
#: Packages and modules of one level must not import from each other.
LEVELS = (
    ("natten_jax.source_tree", "natten_jax.version", "natten_jax.element_types"),
    ("natten_jax.arguments",),
    ("natten_jax.windows",),
    ("natten_jax.problem", "natten_jax.performance"),
    ("natten_jax.halo", "natten_jax.plan", "natten_jax.arrays"),
    ("natten_jax.native", "natten_jax.autotuning.tables"),
    ("natten_jax.cost_model",),
    ("natten_jax.sharding", "natten_jax.simulator"),
    ("natten_jax.backends",),
    ("natten_jax.execution",),
    ("natten_jax.ops",),
    ("natten_jax.autotuning.configurations", "natten_jax.plot", "natten_jax.rotary", "natten_jax.fp8"),
    ("natten_jax.profiler",),
    ("natten_jax.autotuning",),
    ("natten_jax.tuning",),
    ("natten_jax",),
    ("natten_jax.flax_modules",),
    ("natten_jax.doctor",),
)
_LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}


def _modules() -> dict[str, Path]:
    """Return the file of each module, by module name."""
    folders = {"natten_jax": ROOT / "natten_jax", "natten_jax.flax_modules": ROOT / "flax_modules"}
    found = {}
    for package, folder in folders.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


def _imported(module: str, path: Path) -> Iterator[str]:
    """Yield the modules and qualified names that a module imports, including imports inside functions."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def _graph() -> dict[str, set[str]]:
    """Return the modules of this package that each module imports."""
    modules = _modules()

    def imported(importer: str, path: Path) -> Iterator[str]:
        for name in _imported(importer, path):
            module = name if name in modules else name.rpartition(".")[0]
            if module in modules and module != importer:
                yield module

    return {importer: set(imported(importer, path)) for importer, path in modules.items()}


def _room(module: str) -> str:
    """Return the name in ``LEVELS`` that applies to a module: its own name, or the innermost package's name."""
    parts = module.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    found = next((name for name in names if name in _LEVEL_OF and (name != "natten_jax" or name == module)), None)
    assert found is not None, f"{module} has no level"
    return found


def _upward(graph: Mapping[str, set[str]]) -> list[str]:
    """Return imports from another package or module of the same level, or of a higher level."""
    return [
        f"{importer} imports {module}"
        for importer, imported in graph.items()
        for module in sorted(imported)
        if _room(importer) != _room(module) and _LEVEL_OF[_room(importer)] <= _LEVEL_OF[_room(module)]
    ]


def test_nothing_is_imported_from_above() -> None:
    upward = _upward(_graph())
    assert not upward, "\n".join(upward)


def test_modules_are_imported_in_an_order() -> None:
    graph = _graph()
    order = list(graphlib.TopologicalSorter(graph).static_order())  # a cycle raises CycleError, whose message shows it
    assert set(order) == set(graph)


def test_every_package_describes_its_modules() -> None:
    """The docstring of each package mentions its modules.

    Docstrings of public packages are for users. docs/architecture.md describes the modules of these packages.
    """
    architecture = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    unsaid = []
    for package, path in _modules().items():
        if path.name != "__init__.py":
            continue
        is_public = package in ("natten_jax", "natten_jax.flax_modules")
        said = architecture if is_public else ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        modules = [each for each in path.parent.glob("*.py") if each != path]
        packages = [each.parent for each in path.parent.glob("*/__init__.py")]
        names = sorted(each.stem for each in (*modules, *packages))
        unsaid += [f"{package}.{name}" for name in names if not re.search(rf"\b{name}\b", said)]
    assert not unsaid, unsaid
