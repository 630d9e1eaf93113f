"""Tests of a module meet in one worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xdist")

from tests.support.scheduling import APART, MOST_TOGETHER, TOGETHER_ON_GPUS, Groups

ROOT = Path(__file__).parents[2]


def test_tests_of_a_module_that_follow_each_other_are_a_group() -> None:
    groups, names = Groups(is_of_gpu=False), [f"tests/ops/test_x.py::test[{i}]" for i in range(2 * MOST_TOGETHER + 1)]
    found = [groups.of(name) for name in names]
    assert [found.count(each) for each in dict.fromkeys(found)] == [MOST_TOGETHER, MOST_TOGETHER, 1]
    assert groups.of("tests/ops/test_y.py::test") not in found
    assert [groups.of(name) for name in names] == found


def test_programs_of_their_own_and_tests_of_gpus_are_dealt_out_one_by_one() -> None:
    for module in APART:
        assert (ROOT / module).exists()
        groups = Groups(is_of_gpu=False)
        assert groups.of(f"{module}::test[1]") != groups.of(f"{module}::test[2]")
    on_gpus = Groups(is_of_gpu=True)
    assert on_gpus.of("tests/gpu/test_x.py::test[1]") != on_gpus.of("tests/gpu/test_x.py::test[2]")
    for function in TOGETHER_ON_GPUS:
        module, _, name = function.partition("::")
        assert f"def {name}(" in (ROOT / module).read_text()
        assert on_gpus.of(f"{function}[1]") == on_gpus.of(f"{function}[2]")


CONFTEST = """
from tests.support.scheduling import GroupScheduling

def pytest_xdist_make_scheduler(config, log):
    return GroupScheduling(config, log, is_of_gpu=False)
"""
MODULE = """
import time, pytest

@pytest.mark.parametrize("number", range(6))
def test(number):
    time.sleep(0.05)
"""


def test_workers_have_modules(tmp_path: Path) -> None:
    modules = [tmp_path / name for name in ("test_one.py", "test_other.py")]
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for module in modules:
        module.write_text(MODULE)
    options = "-vv", "--numprocesses", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, modules)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for module in modules:
        lines = [line for line in done.stdout.splitlines() if line.startswith("[gw") and module.name in line]
        assert len(lines) == 6 and len({line.split()[0] for line in lines}) == 1, lines
