"""What is different where this package is imported from a clone of the repository, not from where it was installed.

Python looks into the current directory first, so inside a clone ``import natten_jax`` finds the clone's files, whatever
is installed. ``pip install .`` puts no library beside these, and ``flax_modules`` lies at the top of the repository.
Here both are found all the same: the Python files are always the clone's, and the library is one that was built from
the clone's ``csrc``, or none. ``setup.py`` reads this file, too: it imports the standard library alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent
_NATIVE_SOURCES = (".cpp", ".cu", ".cuh", ".h", ".map", ".txt")

#: The repository that the package lies in; ``None`` where it lies among installed packages.
ROOT = _PACKAGE.parent if (_PACKAGE.parent / "csrc" / "CMakeLists.txt").is_file() else None


def fingerprint(csrc: Path) -> str:
    """What tells one state of the native sources from another; the build puts it into the library."""
    files = {path.relative_to(csrc).as_posix(): path for path in csrc.rglob("*") if path.suffix in _NATIVE_SOURCES}
    state = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        state.update(f"{name} {len(content)}\n".encode() + content)
    return state.hexdigest()[:16]


def is_unbuilt() -> bool:
    """Whether the package lies in a clone without a library of its own."""
    return ROOT is not None and not _has_library()


def _has_library() -> bool:
    """Whether a native module for this interpreter lies beside these files."""
    return PathFinder.find_spec("natten_jax._native", [str(_PACKAGE)]) is not None


def find_library() -> ModuleSpec:
    """Where the native module lies: beside these files or, of a clone without one, in an installed natten_jax.

    Raises:
        ModuleNotFoundError: Nowhere.
    """
    spec = importlib.util.find_spec("natten_jax._native")
    if spec is None and is_unbuilt():
        # Entries of the path that are this clone's would find its own package again.
        elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
        installed = PathFinder.find_spec("natten_jax", elsewhere)
        folders = installed.submodule_search_locations if installed is not None else None
        spec = PathFinder.find_spec("natten_jax._native", folders) if folders is not None else None
    if spec is not None:
        return spec
    if is_unbuilt():
        raise ModuleNotFoundError(f"{ROOT} is a clone without a built library, and no natten_jax with one is installed")
    raise ModuleNotFoundError(f"the natten_jax installed in {_PACKAGE} is Python alone, without a native library")


def check_library(file: str, sources: str | None) -> None:
    """Check that a library which a clone takes from elsewhere is the one that it would build.

    Args:
        file: The native module.
        sources: The :func:`fingerprint` of what it was built from; ``None`` of builds that do not tell.

    Raises:
        ImportError: It was built from other native sources.
    """
    if ROOT is not None and is_unbuilt() and sources != fingerprint(ROOT / "csrc"):
        raise ImportError(
            f"{ROOT} is a clone without a built library, and the natten_jax installed in {Path(file).parent} was built "
            "from another csrc"
        )


def staleness(sources: str | None) -> str | None:
    """A sentence about a library in a clone that was built from another state of the clone's native sources.

    Args:
        sources: As above.
    """
    if ROOT is None or sources == fingerprint(ROOT / "csrc"):
        return None
    return f"this library was built from another state of {ROOT / 'csrc'}: {remedy()}"


def remedy(variables: str = "") -> str:
    """How to have a library built with these environment variables: the end of a sentence."""
    if sys.platform == "darwin":
        variables = f"NATTEN_JAX_NATIVE=1 {variables}".rstrip()  # or else nothing would be compiled there
    if ROOT is None and not _has_library():
        setting = f"with {variables}" if variables else "without NATTEN_JAX_NATIVE=0"
        return f"install natten_jax from its sources, {setting}"
    if ROOT is None:
        return f"reinstall natten_jax{' with ' * bool(variables)}{variables}"
    # A library that lies in the clone comes before an installed one: it is the one to build again.
    editable = "" if is_unbuilt() else "--editable "
    return f"run `{variables}{' ' * bool(variables)}pip install {editable}.` in {ROOT}"


class _FlaxModulesFinder(MetaPathFinder):
    """Finds ``natten_jax.flax_modules`` where it lies in a clone."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        """The package; nothing of any other name."""
        if fullname != "natten_jax.flax_modules" or ROOT is None:
            return None
        file = ROOT / "flax_modules" / "__init__.py"
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=[str(file.parent)])


def serve_flax_modules() -> None:
    """Let ``natten_jax.flax_modules`` be imported from a clone, whose Python files belong together."""
    if ROOT is not None:
        sys.meta_path.insert(0, _FlaxModulesFinder())
