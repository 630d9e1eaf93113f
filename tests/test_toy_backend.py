"""A backend that is registered from outside is like one of the package's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
WITH_TOY = "import sys; sys.path.insert(0, 'tests'); import toy_backend\n"


def run(*arguments: str) -> str:
    """What a process that knows the toy backend prints."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=TESTS.parent, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_written_in_fewer_than_40_lines() -> None:
    assert sum(map(bool, (TESTS / "toy_backend.py").read_text().splitlines())) < 40


def test_it_is_known_wherever_backends_are_listed() -> None:
    code = """
import runpy, jax, natten_jax
array = jax.ShapeDtypeStruct((1, 12, 2, 8), "float32")
print(natten_jax.get_configs_for_toy_fna(array), natten_jax.get_bwd_configs_for_toy_fmha(array))
print([name for name in dir(natten_jax) if "toy" in name])
try:
    natten_jax.na1d(*[jax.numpy.zeros((1, 12, 2, 8))] * 3, 3, backend="nobody-fna")
except ValueError as error:
    print(error)
for module, *arguments in (
    ("natten_jax.doctor",),
    ("natten_jax.profiler", *"-i 12 -w 3 --dtype fp32 --dry-run".split()),
    ("natten_jax.profiler", *"-i 12 -w 3 --dtype fp32 --backend toy-fna --iterations 2".split()),
):
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        assert not end.code, end.code
"""
    printed = run("-c", WITH_TOY + code)
    for part in (
        "[((1,), (1,))] [(1, 1)]",
        "get_bwd_configs_for_toy_fmha",
        "choose None or one of",
        "toy-fna",
        "toy-fmha       runs float32",
        "Use case is compatible with backend toy-fna.",
    ):
        assert part in printed, part


@pytest.mark.slow
def test_it_passes_the_suite_of_a_family() -> None:
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    files = "test_operators.py", "test_transforms.py", "test_configs.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "toy_backend", "-k", "toy", *(f"tests/{file}" for file in files)],
        cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = int(done.stdout.rsplit(" passed", 1)[0].rsplit(None, 1)[1].lstrip(","))
    assert passed > 60, done.stdout[-500:]
