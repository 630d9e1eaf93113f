"""natten_jax inside a clone of the repository, where Python imports the clone's package, not an installed one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import venv
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.programs import output_of

ROOT = Path(__file__).parents[2]
LIBRARIES = tuple((ROOT / "natten_jax").glob("*.so"))

#: An import finder like that of setuptools' editable installs. Python calls it after all other finders, also for
#: submodules.
EDITABLE = """
import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        mapping = {{"natten_jax": "{clone}/natten_jax", "natten_jax.flax_modules": "{clone}/flax_modules"}}
        if name in mapping:
            return spec_from_file_location(name, mapping[name] + "/__init__.py")
        parent = name.rpartition(".")[0]
        return PathFinder.find_spec(name, path=[mapping[parent]]) if parent in mapping else None

sys.meta_path.append(Finder)
"""

pytestmark = pytest.mark.skipif(not LIBRARIES, reason="no library is built in the source tree")


def clone_into(folder: Path, *, is_built: bool = False) -> Path:
    """Copy the repository as a fresh clone, optionally with the compiled library.

    Bytecode files are also copied, because they match the sources. Without them, each new process would compile the
    sources again.
    """
    leftovers = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "results", "*.so")
    clone = shutil.copytree(ROOT, folder, ignore=leftovers)
    for library in LIBRARIES if is_built else ():
        shutil.copy(library, clone / "natten_jax")
    return clone


class Environment:
    """A virtual environment that can import the packages of this environment, but no editable install of natten_jax."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder)
        self.python = folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        others = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
        # Python imports modules from folders that a .pth file lists. In these folders, it ignores .pth files, for
        # example the files of editable installs.
        (self.packages / "others.pth").write_text("\n".join(others))

    def install(self) -> None:
        """Copy the files that ``pip install .`` installs."""
        unpacked = shutil.copytree(ROOT / "natten_jax", self.packages / "natten_jax")
        shutil.copytree(ROOT / "flax_modules", unpacked / "flax_modules")

    def install_editable(self, clone: Path) -> None:
        """Write the files that ``pip install --editable .`` writes."""
        (self.packages / "editable_finder.py").write_text(EDITABLE.format(clone=clone))
        (self.packages / "editable.pth").write_text("import editable_finder")

    def run(self, folder: Path, *arguments: str) -> str:
        """Run a program in a folder, and return its output."""
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTHONPATH", None)
        command = [str(self.python), *arguments]
        finished = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        return output_of(finished)

    def state(self, folder: Path) -> State:
        """Start a program in a folder, and return where it finds the package and the native library."""
        package, flax_modules, library, error = self.run(folder, "-c", STATE).splitlines()
        return State(Path(package), Path(flax_modules), Path(library), error)

    def report(self, folder: Path) -> str:
        """Run natten_jax.doctor in a folder, and return its output."""
        return self.run(folder, "-m", "natten_jax.doctor")


STATE = textwrap.dedent("""
    from pathlib import Path
    import natten_jax, natten_jax.flax_modules
    from natten_jax.native import module as native
    folders = Path(natten_jax.__file__).parents[1], Path(natten_jax.flax_modules.__file__).parent
    print(*folders, Path(native.path() or "nowhere/none").parent, native.load_error, sep="\\n")
""")


class State(NamedTuple):
    """Folders of the package, the Flax modules and the native library, and the error if no library was loaded."""

    package: Path
    flax_modules: Path
    library: Path
    error: str


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clone without a compiled library."""
    return clone_into(tmp_path_factory.mktemp("unbuilt") / "natten_jax")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with the files that ``pip install .`` installs."""
    environment = Environment(tmp_path_factory.mktemp("installed"))
    environment.install()
    return environment


def test_an_install_works_everywhere_in_its_clone(clone: Path, installed: Environment) -> None:
    library = installed.packages / "natten_jax"
    # The package and the Flax modules must come from the same tree.
    assert installed.state(clone) == State(clone, clone / "flax_modules", library, "None")
    assert installed.state(clone / "tests") == State(installed.packages, library / "flax_modules", library, "None")
    report = installed.report(clone)
    assert f"Native module: {library / '_native'}" in report
    assert "of the installed natten_jax, built from the same csrc" in report
    for complaint in ("Missing kernels", "not available", "einstall", "cannot be loaded"):
        assert complaint not in report


def test_an_editable_install_works_everywhere_in_its_clone(tmp_path: Path) -> None:
    clone = clone_into(tmp_path / "natten_jax", is_built=True)
    environment = Environment(tmp_path / "environment")
    environment.install_editable(clone)
    for folder in (clone, clone / "tests", environment.packages):
        assert environment.state(folder) == State(clone, clone / "flax_modules", clone / "natten_jax", "None")


@pytest.mark.parametrize("is_editable", [False, True])
def test_a_library_of_other_native_sources_is_rejected_with_a_remedy(is_editable: bool, tmp_path: Path) -> None:
    clone = clone_into(tmp_path / "changed")
    change_native_sources(clone)
    environment = Environment(tmp_path / "environment")
    lender = environment.packages / "natten_jax"
    if is_editable:
        other = clone_into(tmp_path / "other", is_built=True)
        environment.install_editable(other)
        lender = other / "natten_jax"
    else:
        environment.install()
    package, flax_modules, library, error = environment.state(clone)
    assert (package, flax_modules, library.name) == (clone, clone / "flax_modules", "nowhere")
    assert f"{clone} is a clone without a built library" in error
    assert f"the natten_jax installed in {lender} was built from another csrc" in error
    report = environment.report(clone)
    assert f"Run `pip install .` in {clone}" in report and "einstall natten" not in report


def change_native_sources(clone: Path) -> None:
    with (clone / "csrc" / "cpu" / "plan.cpp").open("a") as source:
        source.write("// changed\n")


def test_an_uninstalled_clone_is_reported(clone: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment")
    package, flax_modules, _, error = environment.state(clone)
    assert (package, flax_modules) == (clone, clone / "flax_modules")
    assert f"{clone} is a clone without a built library, and no natten_jax with one is installed" in error
    assert f"Run `pip install .` in {clone}" in environment.report(clone)


def test_a_library_in_the_clone_comes_before_an_installed_one(installed: Environment, tmp_path: Path) -> None:
    clone = clone_into(tmp_path / "built", is_built=True)
    assert installed.state(clone)[2:] == (clone / "natten_jax", "None")
    assert "Another csrc" not in installed.report(clone)
    change_native_sources(clone)
    remedy = f"run `pip install --editable .` in {clone}"
    complaint = f"  Another csrc: this library was built from another state of {clone / 'csrc'}: {remedy}\n"
    assert complaint in installed.report(clone)


def test_the_remedy_builds_the_library_that_is_used(clone: Path, installed: Environment, tmp_path: Path) -> None:
    variables = "NATTEN_JAX_CUDA=13"
    program = f"from natten_jax import source_tree; print(*map(source_tree.remedy, ('', {variables!r})), sep='\\n')"
    built = clone_into(tmp_path / "built", is_built=True)
    for folder, remedy, with_variables in (
        (clone, f"run `pip install .` in {clone}", f"run `{variables} pip install .` in {clone}"),
        (built, f"run `pip install --editable .` in {built}", f"run `{variables} pip install --editable .` in {built}"),
        (tmp_path, "reinstall natten_jax", f"reinstall natten_jax with {variables}"),
    ):
        assert installed.run(folder, "-c", program).splitlines() == [remedy, with_variables]
