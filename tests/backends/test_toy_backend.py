"""A backend that is registered from outside is like one of the package's own."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.programs import output_of, run_command

ROOT = Path(__file__).parents[2]
WITH_TOY = "import sys, tests.support.toy_backend\n"


def run(*arguments: str) -> str:
    """What a process that knows the toy backend prints."""
    return output_of(run_command(arguments, os.environ, folder=ROOT))


def test_it_is_written_in_fewer_than_40_lines() -> None:
    assert sum(map(bool, (ROOT / "tests" / "support" / "toy_backend.py").read_text().splitlines())) < 40


def test_it_is_known_to_operators_and_queries() -> None:
    code = """
import jax, natten_jax
array = jax.ShapeDtypeStruct((1, 12, 2, 8), "float32")
print(natten_jax.get_configs_for_toy_fna(array), natten_jax.get_bwd_configs_for_toy_fmha(array))
print([name for name in dir(natten_jax) if "toy" in name])
try:
    natten_jax.na1d(*[jax.numpy.zeros((1, 12, 2, 8))] * 3, 3, backend="nobody-fna")
except ValueError as error:
    print(error)
"""
    printed = run("-c", WITH_TOY + code)
    for part in ("[((1,), (1,))] [(1, 1)]", "get_bwd_configs_for_toy_fmha", "cpu-fna, tpu-fna, toy-fna, flex-fna"):
        assert part in printed, part


@pytest.mark.parametrize(
    ("module", "arguments", "expected"),
    [
        ("doctor", "", "toy-fmha       runs float16, float32"),
        ("profiler", "-i 12 -w 3 --dtype fp32 --dry-run", "Use case is compatible with backend toy-fna."),
        ("profiler", "-i 12 -w 3 --dtype fp32 --backend toy-fna --iterations 2", "toy-fna"),
    ],
)
def test_it_is_known_to_the_tools(module: str, arguments: str, expected: str) -> None:
    code = f"""
import runpy
sys.argv = ["tool", *{arguments.split()}]
runpy.run_module("natten_jax.{module}", run_name="__main__")
"""
    assert expected in run("-c", WITH_TOY + code)


@pytest.mark.slow
def test_it_passes_the_suite_of_a_family() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    files = "tests/ops/test_operators.py", "tests/ops/test_configs.py"
    # It has one tile: layouts of many would be no other problem, only the largest ones.
    options = "-q", "-p", "tests.support.toy_backend", "-k", "toy and not many-tiles", "--problems", "8"
    done = run_command(["-m", "pytest", *options, *files], environment, timeout=900, folder=ROOT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = re.search(r"toy-float32 \((\d+) problems\)", done.stdout)
    assert found and int(found[1]) > 60, done.stdout[-500:]
