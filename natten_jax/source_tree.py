"""Support for imports of natten_jax from a clone of the repository instead of an installed package.

Python searches the current directory first. So inside a clone, ``import natten_jax`` imports the clone's files even if
the package is installed. The native library can be missing from the clone, because ``pip install .`` does not put it
there. ``flax_modules`` is at the top of the repository instead of inside the package. This module finds the library and
``flax_modules``. All Python files come from the clone. An installed library is used only if it was built from the
clone's ``csrc``.

``setup.py`` also runs this file, so this file imports only the standard library.
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

#: The repository that contains this package; ``None`` for an installed package.
ROOT = _PACKAGE.parent if (_PACKAGE.parent / "csrc" / "CMakeLists.txt").is_file() else None


def fingerprint(csrc: Path) -> str:
    """Hash the native sources. The build stores the hash in the library."""
    files = {path.relative_to(csrc).as_posix(): path for path in csrc.rglob("*") if path.suffix in _NATIVE_SOURCES}
    state = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        state.update(f"{name} {len(content)}\n".encode() + content)
    return state.hexdigest()[:16]


def is_unbuilt() -> bool:
    """Return True if the package is in a clone that does not contain a native library."""
    return ROOT is not None and not _has_library()


def _has_library() -> bool:
    """Return True if this folder contains a native module for this interpreter."""
    return PathFinder.find_spec("natten_jax._native", [str(_PACKAGE)]) is not None


def find_library() -> ModuleSpec:
    """Find the native module in this folder or, for a clone without a library, in an installed natten_jax.

    Raises:
        ModuleNotFoundError: There is no native module in either place.
    """
    spec = importlib.util.find_spec("natten_jax._native")
    if spec is None and is_unbuilt():
        # The clone's own directory in sys.path would lead to this package again.
        elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
        installed = PathFinder.find_spec("natten_jax", elsewhere)
        folders = installed.submodule_search_locations if installed is not None else None
        spec = PathFinder.find_spec("natten_jax._native", folders) if folders is not None else None
    if spec is not None:
        return spec
    if is_unbuilt():
        raise ModuleNotFoundError(f"{ROOT} is a clone without a built library, and no natten_jax with one is installed")
    raise ModuleNotFoundError(
        f"the natten_jax installed in {_PACKAGE} is the Python-only build, without a native library"
    )


def check_library(file: str, sources: str | None) -> None:
    """Check that an installed library which a clone uses was built from the clone's native sources.

    Args:
        file: Path of the native module.
        sources: The :func:`fingerprint` that the library contains; ``None`` if it contains no fingerprint.

    Raises:
        ImportError: The library was built from other native sources.
    """
    if ROOT is not None and is_unbuilt() and sources != fingerprint(ROOT / "csrc"):
        raise ImportError(
            f"{ROOT} is a clone without a built library, and the natten_jax installed in {Path(file).parent} was built "
            "from another csrc"
        )


def staleness(sources: str | None) -> str | None:
    """Return a warning if a clone's library was not built from the current native sources, otherwise ``None``.

    Args:
        sources: The :func:`fingerprint` that the library contains; ``None`` if it contains no fingerprint.
    """
    if ROOT is None or sources == fingerprint(ROOT / "csrc"):
        return None
    return f"this library was built from another state of {ROOT / 'csrc'}: {remedy()}"


def remedy(variables: str = "") -> str:
    """Return the end of a sentence that explains how to build the library with the given environment variables."""
    if sys.platform == "darwin":
        variables = f"NATTEN_JAX_NATIVE=1 {variables}".rstrip()  # otherwise nothing is compiled on macOS
    if ROOT is None and not _has_library():
        setting = f"with {variables}" if variables else "without NATTEN_JAX_NATIVE=0"
        return f"install natten_jax from its sources, {setting}"
    if ROOT is None:
        return f"reinstall natten_jax{' with ' * bool(variables)}{variables}"
    # If the clone contains a library, it takes precedence over an installed library. So rebuild the clone's library.
    editable = "" if is_unbuilt() else "--editable "
    return f"run `{variables}{' ' * bool(variables)}pip install {editable}.` in {ROOT}"


class _FlaxModulesFinder(MetaPathFinder):
    """Import finder that finds ``natten_jax.flax_modules`` in a clone."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        """Return the spec of ``natten_jax.flax_modules``; ``None`` for other names."""
        if fullname != "natten_jax.flax_modules" or ROOT is None:
            return None
        file = ROOT / "flax_modules" / "__init__.py"
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=[str(file.parent)])


def serve_flax_modules() -> None:
    """Make ``natten_jax.flax_modules`` importable from a clone, so that all Python files come from the clone."""
    if ROOT is not None:
        sys.meta_path.insert(0, _FlaxModulesFinder())
