"""natten_jax inside a clone of the repository, where Python finds the clone's files before what is installed."""

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

ROOT = Path(__file__).parents[2]
LIBRARIES = tuple((ROOT / "natten_jax").glob("*.so"))

#: As setuptools finds the packages of an editable install: asked last, and for their modules, too.
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
    """A clone as git makes it, or with a library in place.

    What Python has compiled goes along, as it is of the same files: each start would compile them again.
    """
    leftovers = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "results", "*.so")
    clone = shutil.copytree(ROOT, folder, ignore=leftovers)
    for library in LIBRARIES if is_built else ():
        shutil.copy(library, clone / "natten_jax")
    return clone


class Environment:
    """An interpreter with everything that this one has but natten_jax."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder)
        self.python = folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        others = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
        # Folders that are named here are only looked into: the editable install of this interpreter does not count.
        (self.packages / "others.pth").write_text("\n".join(others))

    def install(self) -> None:
        """What ``pip install .`` leaves."""
        unpacked = shutil.copytree(ROOT / "natten_jax", self.packages / "natten_jax")
        shutil.copytree(ROOT / "flax_modules", unpacked / "flax_modules")

    def install_editable(self, clone: Path) -> None:
        """What ``pip install --editable .`` leaves."""
        (self.packages / "editable_finder.py").write_text(EDITABLE.format(clone=clone))
        (self.packages / "editable.pth").write_text("import editable_finder")

    def run(self, folder: Path, *arguments: str) -> str:
        """What a program prints that must succeed."""
        return run(self.python, folder, *arguments)


def run(python: str | Path, folder: Path, *arguments: str) -> str:
    """What a program prints that must succeed, run in a folder."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONPATH", None)
    finished = subprocess.run(
        [str(python), *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert finished.returncode == 0, f"{arguments}\n{finished.stdout[-4000:]}\n{finished.stderr[-4000:]}"
    return finished.stdout


STATE = textwrap.dedent("""
    import natten_jax, natten_jax.flax_modules
    from natten_jax.native import module as native
    print(natten_jax.__file__, natten_jax.flax_modules.__file__, native.path(), native.load_error, sep="\\n")
""")


class State(NamedTuple):
    """Where the package and the modules for Flax come from, the native module, and why there is none."""

    package: Path
    flax_modules: Path
    library: str
    error: str

    @classmethod
    def printed(cls, package: str, flax_modules: str, library: str, error: str) -> State:
        """What the lines say that ``STATE`` prints."""
        return cls(Path(package).parents[1], Path(flax_modules).parent, library, error)


def state(environment: Environment, folder: Path) -> State:
    """What a program finds that was started in a folder."""
    return State.printed(*environment.run(folder, "-c", STATE).splitlines())


def state_and_report(environment: Environment, folder: Path) -> tuple[State, str]:
    """The state in a folder, and the output of the doctor there."""
    return state(environment, folder), environment.run(folder, "-m", "natten_jax.doctor")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which nothing was built."""
    return clone_into(tmp_path_factory.mktemp("unbuilt") / "natten_jax")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment after ``pip install .``."""
    environment = Environment(tmp_path_factory.mktemp("installed"))
    environment.install()
    return environment


def test_an_install_works_everywhere_in_its_clone(clone: Path, installed: Environment) -> None:
    inside, *others = (state(installed, folder) for folder in (clone, clone / "tests"))
    for found in (inside, *others):
        assert found.error == "None"
        assert Path(found.library).parent == installed.packages / "natten_jax"
    # The Python files belong together, wherever they come from.
    assert (inside.package, inside.flax_modules) == (clone, clone / "flax_modules")
    for found in others:
        assert found.package == installed.packages
        assert found.flax_modules == installed.packages / "natten_jax" / "flax_modules"


def test_the_doctor_has_nothing_to_complain_of_in_the_clone(clone: Path, installed: Environment) -> None:
    report = installed.run(clone, "-m", "natten_jax.doctor")
    library = installed.packages / "natten_jax" / "_native"
    assert f"Native module: {library}" in report
    assert "of the installed natten_jax, built from the same csrc" in report
    for complaint in ("Missing kernels", "not available", "einstall", "cannot be loaded"):
        assert complaint not in report


def test_an_editable_install_works_everywhere_in_its_clone(tmp_path: Path) -> None:
    clone = clone_into(tmp_path / "natten_jax", is_built=True)
    environment = Environment(tmp_path / "environment")
    environment.install_editable(clone)
    for folder in (clone, clone / "tests", environment.packages):
        package, flax_modules, library, error = state(environment, folder)
        assert (package, flax_modules, error) == (clone, clone / "flax_modules", "None")
        assert Path(library).parent == clone / "natten_jax"


@pytest.mark.parametrize("is_editable", [False, True])
def test_a_library_of_other_native_sources_is_refused_with_the_remedy(is_editable: bool, tmp_path: Path) -> None:
    clone = clone_into(tmp_path / "changed")
    with (clone / "csrc" / "cpu" / "plan.cpp").open("a") as source:
        source.write("// changed\n")
    environment = Environment(tmp_path / "environment")
    if is_editable:
        other = clone_into(tmp_path / "other", is_built=True)
        environment.install_editable(other)
    else:
        environment.install()
    (package, flax_modules, library, error), report = state_and_report(environment, clone)
    assert (package, flax_modules, library) == (clone, clone / "flax_modules", "None")
    lender = other / "natten_jax" if is_editable else environment.packages / "natten_jax"
    assert f"{clone} is a clone without a built library" in error
    assert f"the natten_jax installed in {lender} was built from another csrc" in error
    assert f"Run `pip install .` in {clone}" in report and "einstall natten" not in report


def test_a_clone_of_which_nothing_was_installed_says_so(clone: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment")
    (package, flax_modules, _, error), report = state_and_report(environment, clone)
    assert (package, flax_modules) == (clone, clone / "flax_modules")
    assert f"{clone} is a clone without a built library, and no natten_jax with one is installed" in error
    assert f"Run `pip install .` in {clone}" in report


def test_a_library_in_the_clone_comes_before_an_installed_one(installed: Environment, tmp_path: Path) -> None:
    clone = clone_into(tmp_path / "built", is_built=True)
    (_, _, library, error), report = state_and_report(installed, clone)
    assert error == "None" and Path(library).parent == clone / "natten_jax"
    assert "Another csrc" not in report
    with (clone / "csrc" / "cpu" / "plan.cpp").open("a") as source:
        source.write("// changed\n")
    report = installed.run(clone, "-m", "natten_jax.doctor")
    remedy = f"run `pip install --editable .` in {clone}"
    assert f"  Another csrc: this library was built from another state of {clone / 'csrc'}: {remedy}\n" in report


def test_the_remedy_builds_the_library_that_is_used(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment")
    environment.install()
    variables = "NATTEN_JAX_CUDA=13"
    program = f"from natten_jax import source_tree; print(*map(source_tree.remedy, ('', {variables!r})), sep='\\n')"
    clones = {is_built: clone_into(tmp_path / str(is_built), is_built=is_built) for is_built in (False, True)}
    for folder, remedy, with_variables in (
        (clones[False], "run `pip install .` in {}", f"run `{variables} pip install .` in {{}}"),
        (clones[True], "run `pip install --editable .` in {}", f"run `{variables} pip install --editable .` in {{}}"),
        (tmp_path, "reinstall natten_jax", f"reinstall natten_jax with {variables}"),
    ):
        expected = [each.format(folder) for each in (remedy, with_variables)]
        assert environment.run(folder, "-c", program).splitlines() == expected
