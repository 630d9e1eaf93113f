"""Installs natten_jax in each way that the pages say, each into an environment of its own, and runs pages with it.

    python -m tests.support.documented_installs build/installs --ways sources python-alone --pages README

Ways start from a copy of the sources without anything that was built. A page runs twice: outside of that copy, and
inside, where Python finds its ``natten_jax`` before the installed one. Ways of Python alone have no compiler on their
path. CUDA is compiled for the ``NATTEN_JAX_CUDA_ARCHS`` of the environment; programs run on the CPU everywhere. The
table says seconds; the exit status is 1 where something failed, whose message stands above the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

from natten_jax import __version__
from tests.support.pages import FILES, NOTEBOOKS, PAGES, ROOT, program_of

#: Which extra brings what programs import beside natten_jax, JAX and NumPy.
EXTRAS = {"flax": "flax", "matplotlib": "plot", "optax": "bench", "sklearn": "bench"}
OF_BENCH = {"flax", "plot", "profiler", "bench"}


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to install natten_jax.

    Attributes:
        requirement: What pip is asked for, in the folder of the sources, with these extras.
        extras: Those that the line names.
        variables: The variables of the environment of the installation.
        kind: The kind of the wheel that ``make wheels`` makes before; empty where pip builds.
        options: The options of pip.
        beside: What the line installs beside it.
        is_python_alone: Whether nothing is compiled.
    """

    requirement: str = "."
    extras: tuple[str, ...] = ("bench", "export")
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kind: str = ""
    options: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    is_python_alone: bool = False

    def has(self, program: str) -> bool:
        """Whether the line installs what a program imports."""
        own = set(self.extras) | (OF_BENCH if "bench" in self.extras else set())
        imported = re.findall(r"^ *(?:from|import) (\w+)", program, re.MULTILINE)
        return {EXTRAS[name] for name in imported if name in EXTRAS} <= own


PYTHON_ALONE = {"NATTEN_JAX_NATIVE": "0"}
HOST = {"NATTEN_JAX_CUDA": "0"}
FIND = "--find-links", "dist"
WAYS: Mapping[str, Way] = {
    "sources": Way(variables=HOST),
    "sources-flax": Way(variables=HOST, extras=("flax",)),
    "sources-no-extras": Way(variables=HOST, extras=()),
    "editable": Way(variables=HOST, options=("--editable",)),
    "python-alone": Way(variables=PYTHON_ALONE, is_python_alone=True),
    "wheel": Way(f"natten_jax=={__version__}", kind="cpu", options=FIND),
    "wheel-of-python-alone": Way(f"natten_jax=={__version__}", kind="python", options=FIND, is_python_alone=True),
    "tpu": Way(variables=PYTHON_ALONE, beside=("jax[tpu]",), is_python_alone=True),
    **{
        f"cuda{cuda}": Way(variables={"NATTEN_JAX_CUDA": cuda}, extras=(f"cuda{cuda}", "bench", "export"))
        for cuda in ("12", "13")
    },
    **{
        f"wheel-of-cuda{cuda}": Way(
            f"natten_jax=={__version__}+cu{cuda}",
            kind=f"cuda{cuda}",
            options=FIND,
            extras=(f"cuda{cuda}", "bench", "export"),
        )
        for cuda in ("12", "13")
    },
}


def environment_of(**variables: str) -> dict[str, str]:
    """The environment of a command, without this checkout or this interpreter in its way."""
    hidden = "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"
    return {**{name: value for name, value in os.environ.items() if name not in hidden}, **variables}


def install(way: Way, folder: Path) -> tuple[Path, Path]:
    """An interpreter with natten_jax, and the sources that it was installed from."""
    shutil.rmtree(folder, ignore_errors=True)
    sources = folder / "sources"
    # What an earlier build left beside the sources is none of theirs.
    leftovers = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__")
    shutil.copytree(ROOT, sources, ignore=leftovers)
    venv.create(folder / "environment")
    python = folder / "environment" / "bin" / "python"
    if way.kind:
        wheels = [sys.executable, "release/wheels.py", "--pythons", sys.executable, "--kinds", way.kind]
        subprocess.run(wheels, cwd=sources, env=environment_of(), check=True, capture_output=True)
    name, equal, version = way.requirement.partition("==")
    requirement = f"{name}[{','.join(way.extras)}]{equal}{version}" if way.extras else way.requirement
    path = {"PATH": str(python.parent)} if way.is_python_alone else {}
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
    command = [*pip, *way.options, requirement, *way.beside]
    subprocess.run(command, cwd=sources, env=environment_of(**way.variables, **path), check=True)
    return python, sources


def run(page: Path, python: Path, way: Way, folder: Path) -> float:
    """Seconds that a page takes in a folder.

    Raises:
        RuntimeError: The page failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in FILES.items():
        (folder / name).write_text(content, encoding="utf-8")
    path = str(python.parent) if way.is_python_alone else f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    start = time.monotonic()
    finished = subprocess.run(
        [python, "-c", program_of(page)],
        cwd=folder,
        env=environment_of(JAX_PLATFORMS="cpu", MPLBACKEND="Agg", PATH=path),
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        raise RuntimeError(finished.stderr[-3000:])
    return time.monotonic() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, run, and print the table; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of environments and copies of the sources; what it had is removed")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="all by default")
    pages = {page.stem: page for page in (*PAGES, *NOTEBOOKS)}
    first = "README", "index", "tutorial", *(page.stem for page in NOTEBOOKS)
    parser.add_argument("--pages", nargs="+", choices=[*pages, "all"], default=first, metavar="PAGE", help="or all")
    options = parser.parse_args(arguments)
    chosen = pages if "all" in options.pages else {name: pages[name] for name in options.pages}
    rows, failures = [], 0
    for name in options.ways:
        way, folder = WAYS[name], options.folder.resolve() / name
        start = time.monotonic()
        python, sources = install(way, folder)
        rows.append(f"{name:24}{'installed':16}{time.monotonic() - start:6.0f} s")
        for title, page in chosen.items():
            if not way.has(program_of(page)):
                continue
            row = f"{name:24}{title:16}"
            for place, where in (("outside", folder / "elsewhere"), ("inside", sources)):
                try:
                    row += f"{run(page, python, way, where):6.0f} s {place}"
                except RuntimeError as error:
                    failures += 1
                    row += f"  FAILED {place}"
                    print(f"{name}, {title}, {place}:\n{error}", file=sys.stderr, flush=True)
            rows.append(row)
            print(row, flush=True)
    print("\n".join(["", *rows, f"{failures} failed"]))
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
