"""Fixtures and parametrization shared by all tests.

A test runs once for each value of the following parameters, if it has them:

- ``family``: all backend families. ``native_family``: the families with compiled kernels. ``pure_family``: the families
  in plain JAX.
- ``dtype``: the element types of the family. ``other_dtype``: these types except the first.
- ``problem_indices``: ranges of indices of random problems. ``--problems`` sets the number of problems per family.
  ``other_problem_indices``: ranges of indices for a quarter as many problems.

A test session runs on the CPU or, with ``-m gpu``, on a GPU. It never uses both, so that all modules, fixtures and
processes have the same default platform.
"""

from __future__ import annotations

import collections
import functools
import gc
import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import natten_jax
from natten_jax.performance import PASSES
from natten_jax.plan.devices import default_device
from tests.support.compilation import QUICK_HOST_OPTIONS, flags_of
from tests.support.families import FAMILIES, Family
from tests.support.machine import Machine
from tests.support.resources import COMPILER_FLAG, known, limits

for name, examples in (("core", 25), ("all", 200)):
    hypothesis.settings.register_profile(
        name, derandomize=True, deadline=None, database=None, print_blob=True, max_examples=examples
    )

# These tests need files that only a clone of the repository has: documentation, build script or benchmarks. They are
# not collected if these files are absent.
_CLONE_ONLY = ["bench", "repository", "profiler/test_profiler_advice.py"]
collect_ignore = [] if (Path(__file__).parents[1] / "README.md").exists() else _CLONE_ONLY

SELECTIONS: Mapping[str, Callable[[Family], bool]] = {
    "family": lambda family: True,
    "native_family": lambda family: family.target is not None,
    "pure_family": lambda family: family.capabilities.is_plain_jax,
}
#: Number of CPU devices in a test process. Tests of meshes need several. By default, processes that tests start have
#: one device.
DEVICES = 8
#: Parameters of a test that depend on its family.
_FAMILY_PARAMETERS = "pass_", "dtype", "other_dtype", "problem_indices", "other_problem_indices"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this suite."""
    parser.addoption("--problems", type=int, help="random problems per backend family, instead of its default")
    parser.addoption("--all-compiled", action="store_true", help="compile every problem for TPUs, not just a few")
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")
    parser.addoption(
        "--core",
        action="store_true",
        help="a quarter of the random problems, two element types of a family, and a third of the tests of plain JAX",
    )


def _is_of_gpu(config: pytest.Config) -> bool:
    """Return True if ``-m`` selects tests that are marked ``gpu``."""
    return re.search(r"(?<!\bnot )\bgpu\b", config.option.markexpr) is not None


def pytest_configure(config: pytest.Config) -> None:
    """Choose the default platform. Limit the resources of this process and of the workers that it will start."""
    hypothesis.settings.load_profile("core" if config.getoption("core") else "all")
    os.environ["PYTHONFAULTHANDLER"] = "1"  # processes that tests start print a stack trace if they crash
    # By default, garbage collection scans JAX's long-lived traces again and again, for a tenth of the session's time.
    gc.set_threshold(200_000, 20, 100)
    if not _is_of_gpu(config):
        # The variable is for workers, and for processes that tests start. In this process, JAX has already read it.
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", DEVICES)
    if not hasattr(config, "workerinput"):  # not in workers, which inherit the environment
        if not _is_of_gpu(config):
            _store_programs()
            flags = os.environ.get("XLA_FLAGS", ""), *known([*flags_of(QUICK_HOST_OPTIONS), COMPILER_FLAG])
            os.environ["XLA_FLAGS"] = " ".join(flags).strip()
        processes = getattr(config.option, "numprocesses", None) or 1
        os.environ.update(limits(os.environ, len(os.sched_getaffinity(0)), processes))


def _store_programs() -> None:
    """Cache compiled XLA programs in ``build/compiled``. All test processes and later sessions share the cache.

    A change of the package or of ``tests/support`` starts a new cache, because callbacks that partition calls over
    devices can change a program without changing its cache key. The key includes a program's metadata, because the
    profiler reads the metadata.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folders = Path(natten_jax.__file__).parent, Path(__file__).parent / "support"
    sources = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    folder = Path(__file__).parents[1] / "build" / "compiled"
    others = sorted((each for each in folder.glob("*") if each.name != digest), key=lambda each: each.stat().st_mtime)
    for outdated in others[:-2]:  # other sessions may still use the two latest caches
        shutil.rmtree(outdated, ignore_errors=True)
    options: dict[str, Any] = {
        "jax_compilation_cache_dir": str(folder / digest),
        "jax_compilation_cache_include_metadata_in_key": True,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in options.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)


@pytest.fixture
def without_stored_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disable the cache of compiled programs in this process and in processes that the test starts."""
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "0")
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@functools.cache
def _has_gpu() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that do not run on this platform and, unless ``--slow`` is given, tests that are marked ``slow``.

    Slow tests run first. Otherwise, one worker might still run a slow test after all other workers have finished.
    """
    if config.getoption("core"):
        _keep_a_third_of_plain_jax(config, items)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        is_of_gpu = item.get_closest_marker("gpu") is not None
        if is_of_gpu != _is_of_gpu(config):
            item.add_marker(pytest.mark.skip(reason="needs -m gpu" if is_of_gpu else "host test: excluded by -m gpu"))
        elif is_of_gpu and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="there is no NVIDIA GPU"))
        if item.get_closest_marker("slow") and not config.getoption("slow"):
            item.add_marker(pytest.mark.skip(reason="needs --slow"))


def _keep_a_third_of_plain_jax(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect two of three parameter sets of each test in plain JAX.

    Compiling these tests takes most of the time of a test session.
    """
    counts: collections.Counter[str] = collections.Counter()
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        function, _, parameters = item.nodeid.partition("[")
        (left_out if "flex" in parameters and counts[function] % 3 else kept).append(item)
        counts[function] += "flex" in parameters
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be missing
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Assign consecutive tests of a module to one worker, because they share compiled programs and expected results."""
    from tests.support.scheduling import GroupScheduling

    return GroupScheduling(config, log, _is_of_gpu(config)) if config.getoption("dist") == "loadgroup" else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests with the families that run on this platform, and with parameters that depend on the family."""
    family_name = next((name for name in SELECTIONS if name in metafunc.fixturenames), None)
    if family_name is None:
        return
    on_gpu = _is_of_gpu(metafunc.config)
    names = [name for name in (family_name, *_FAMILY_PARAMETERS) if name in metafunc.fixturenames]
    values = []
    for family in filter(SELECTIONS[family_name], FAMILIES):
        if (family.needs_gpu and not on_gpu) or (on_gpu and _has_gpu() and not family.runs_on(default_device())):
            continue
        is_core = metafunc.config.getoption("core")
        problems = metafunc.config.getoption("problems") or family.problems // (4 if is_core else 1)
        dtypes = family.dtypes[: 2 if is_core else None]
        choices: dict[str, Iterable[Any]] = {
            family_name: [family],
            "pass_": PASSES,
            "dtype": dtypes,
            "other_dtype": dtypes[1:],
            "problem_indices": _parts(problems, family.at_once),
            "other_problem_indices": _parts(max(1, problems // 4), family.at_once),
        }
        for combination in itertools.product(*(choices[name] for name in names)):
            identifier = "-".join(map(_identifier, combination))
            values.append(pytest.param(*combination, marks=[pytest.mark.gpu] * family.needs_gpu, id=identifier))
    metafunc.parametrize(names, values)


def _parts(count: int, size: int) -> list[range]:
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def _identifier(value: Any) -> str:
    if isinstance(value, range):
        return f"{value.start}..{value.stop - 1}" if len(value) > 1 else str(value.start)
    return str(getattr(value, "name", value))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Make this process appear to run on another machine, which the test configures."""
    found = Machine(monkeypatch)
    yield found
    monkeypatch.undo()
    found.forget()


@pytest.fixture(autouse=True, scope="module")
def _forget_programs() -> Iterator[None]:
    """Free the compiled programs after each test module. Later modules rarely need them."""
    yield
    jax.clear_caches()
