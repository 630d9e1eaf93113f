"""The fuzzer reports every planted defect, and no defects in correct kernels."""

from __future__ import annotations

import collections
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax.arrays.operands import Saved
from natten_jax.backends import cpu
from natten_jax.performance import Performance
from natten_jax.plan import devices
from natten_jax.plan.plan import Plan
from natten_jax.problem import OPERATORS
from tests.fuzz import execution
from tests.fuzz.accuracy import excesses, expectation
from tests.fuzz.execution import find_errors, find_leaks, run
from tests.fuzz.features import FEATURES, RINGS, draw_with, kernels_of
from tests.fuzz.options import Options, parse
from tests.fuzz.problem import FLOAT8, Fuzzed, draw
from tests.fuzz.reproducer import program_of, simplest
from tests.fuzz.session import problems_of
from tests.fuzz.spoiled import Spoiled
from tests.support import oracle, programs
from tests.support.families import family_named
from tests.support.float8 import BLOCK_KINDS, HEAD_KINDS
from tests.support.plans import plans_of
from tests.support.problems import Case

ROOT = Path(__file__).parents[2]
CPU = family_named("cpu")


def run_command(*arguments: str, before: str = "", timeout: float = 400) -> subprocess.CompletedProcess[str]:
    """Run the fuzzer in a new process.

    If the folder ``before`` is given, every Python process imports the folder's module ``sitecustomize`` at startup.
    """
    paths = filter(None, (before, os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    command = "-m", "tests.fuzz", *arguments
    return programs.run_command(command, environment, timeout, ROOT, fresh=bool(before))


def options_of(*arguments: str) -> Options:
    return parse(["--backend", "cpu", *arguments])


@pytest.mark.parametrize("arguments", [("--backend", "cpu-fna"), ("--backend", "cpu", "--direct", "--workers", "2")])
def test_command_finds_no_defect_in_correct_kernels(arguments: tuple[str, ...], tmp_path: Path) -> None:
    finished = run_command(*arguments, "--problems", "6", "--at-once", "4", "--output-dir", str(tmp_path))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.splitlines()[-1] == "6 problems, 0 bad"
    assert not list(tmp_path.iterdir())


#: Source code that every process runs at its start. It makes the CPU backend fail on causal problems.
PLANTED = """
import os, signal
import jax
import natten_jax.backends.cpu as cpu
forward = cpu.CpuBackend.forward
def lose_the_device():
    def computing(*_, **__):
        raise jax.errors.JaxRuntimeError("an illegal memory access was encountered")
    jax.jit = computing
    computing()
def planted(self, plan, operands, **options):
    saved = forward(self, plan, operands, **options)
    if any(plan.problem.is_causal):
        DEFECT
        saved = saved._replace(out=saved.out + 1)
    return saved
cpu.CpuBackend.forward = planted
"""


@pytest.mark.parametrize(
    ("defect", "what"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "the process ended with status -9"),
        ("lose_the_device()", "the process ended with status 1"),
        ("if plan.problem.heads == 1: lose_the_device()", "out: off by"),
    ],
    ids=["kills", "loses the device", "is wrong, and its simpler forms lose the device"],
)
def test_command_survives_and_names_the_problem(defect: str, what: str, tmp_path: Path) -> None:
    """The planted defect kills the process, breaks the device like an illegal memory access, or changes the output."""
    (tmp_path / "sitecustomize.py").write_text(PLANTED.replace("DEFECT", defect))
    output = tmp_path / "found"
    arguments = ["--backend", "cpu-fna", "--problems", "4", "--at-once", "2", "--output-dir", str(output)]
    finished = run_command(*arguments, before=str(tmp_path))
    numbered = [each for batch in range(2) for each in problems_of(parse(arguments), batch)]
    causal = [number for number, problem in numbered if any(problem.case.causal)]
    assert 0 < len(causal) < 4 and causal[0] < 2  # a problem of the first batch fails; later problems still run
    assert finished.returncode == 1, finished.stderr
    assert finished.stdout.splitlines()[-1] == f"4 problems, {len(causal)} bad", finished.stdout
    assert sorted(int(n) for n in re.findall(rf"BAD problem (\d+): {what}", finished.stdout)) == causal
    assert len(list(output.iterdir())) == len(causal)


@pytest.mark.parametrize("is_direct", [False, True])
def test_planted_defect_is_found_made_simpler_and_written_down(
    is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = cpu.CpuBackend.forward

    def wrong(self: cpu.CpuBackend, plan: Plan, operands: Any, **options: Any) -> Saved:
        saved = forward(self, plan, operands, **options)
        # If a dimension is dilated, the outputs are wrong: they are shifted by one query.
        return saved if max(plan.problem.dilation) == 1 else saved._replace(out=jnp.roll(saved.out, 1, axis=1))

    options = options_of("--seed", "1", "--problems", "12", "--at-once", "12", *(["--direct"] if is_direct else []))
    problems = [problem for _, problem in problems_of(options, 0)]
    assert not any(find_errors(problems))
    monkeypatch.setattr(cpu.CpuBackend, "forward", wrong)
    failures = {i: what for i, what in enumerate(find_errors(problems)) if what}
    assert failures and all(max(problems[i].case.dilation or (1,)) > 1 for i in failures)
    assert any(each.startswith("out: off by") for what in failures.values() for each in what)

    first, what = next(iter(failures.items()))
    found: dict[str, Any] = {}
    exec(program_of(simplest(problems[first]), "; ".join(what), 1, first), found)
    simple = found["problem"]
    assert find_errors([simple])[0]
    assert max(simple.case.dilation) > 1 and simple.case.heads == 1 and not simple.tiles
    assert np.prod(simple.case.layout) <= np.prod(problems[first].case.layout)


def test_result_memory_was_full_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Result buffers are filled with NaN before the call.

    Otherwise, elements that a kernel does not write could be right by chance.
    """
    donated: list[int] = []
    make = execution.not_a_number

    def remember(like: Any) -> jax.Array:
        array = make(like)
        assert np.isnan(np.asarray(array, np.float32)).all()
        donated.append(array.unsafe_buffer_pointer())
        return array

    monkeypatch.setattr(execution, "not_a_number", remember)
    results = run([Fuzzed("cpu", Case((40,), (7,), head_dim=16), "float32", 0, is_direct=True)])
    pointers = [result.ctypes.data for result in jax.tree.leaves(results)]  # the NumPy arrays share the result buffers
    assert len(pointers) == 5 and set(pointers) == set(donated)


COMPARED = {
    "copies of a batch": Fuzzed(
        "cpu", Case((5, 6), (3, 2), heads=2, batch=2, scales=(0.3, 0.4), sinks=True, key_bias="tokens"), "float32", 7,
        copies=3,
    ),
    "every operand": Fuzzed(
        "cpu", Case((4, 5), (3, 2), heads=2, scales=(0.3, -0.4), additional=3, fused=True), "float32", 7
    ),
    "biases and sinks": Fuzzed(
        "flex", Case((5,), (3,), heads=2, relative_bias=True, key_bias="heads", sinks=True), "float32", 7
    ),
    "biases of parts": Fuzzed(
        "cpu", Case((7, 9), (3, 4), heads=2, heads_kv=1, batch=2, relative_bias=True, key_bias="tokens"), "float32", 7,
        is_direct=True, queries=((1, 5), (2, 8)), keys=((0, 7), (1, 9)),
    ),
    "8 bits, blocks": Fuzzed("cpu", Case((5, 6), (3, 2), heads=2, head_dim=16), "float8_e4m3fn", 7, factors="block"),
    "8 bits, heads": Fuzzed("flex", Case((5, 6), (3, 2), heads=2, head_dim=16), "float8_e4m3fn", 7, factors="head"),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPARED)
def test_every_result_is_compared(name: str) -> None:
    problem = COMPARED[name]
    expected = expectation(problem)
    ((outputs, gradients),) = run([problem])
    assert excesses(problem, expected, outputs, gradients) == []
    assert (gradients.query is None) == problem.is_float8

    def spoiled(array: oracle.Operand, value: float) -> np.ndarray:
        array = np.array(array)
        array.flat[array.size // 2] += array.dtype.type(value)
        return array

    for value in (np.nan, np.inf, 1.0):
        for i, result in enumerate(("out", "lse")):
            wrong = (spoiled(outputs[0], value), outputs[1]) if i == 0 else (outputs[0], spoiled(outputs[1], value))
            assert [each.name for each in excesses(problem, expected, wrong, gradients)] == [result]
        for result, gradient in gradients._asdict().items():
            if gradient is None:
                continue
            changed = gradients._replace(**{result: spoiled(getattr(gradients, result), value)})
            assert [each.name for each in excesses(problem, expected, outputs, changed)] == [f"d_{result}"]
    short = outputs[0][..., :-1], outputs[1]
    assert "shape" in excesses(problem, expected, short, gradients)[0].name
    other = outputs[0].astype(np.float64), outputs[1]
    assert "type float64" in excesses(problem, expected, other, gradients)[0].name


BIASES: dict[str, Any] = {"relative_bias": True, "key_bias": "heads", "sinks": True, "scales": (0.3, -0.4, 0.5, 0.6)}
BIASED = Case((7,), (3,), batch=2, heads=4, heads_kv=2, **BIASES)


@pytest.mark.parametrize("name", ["relative_bias", "key_bias", "sinks", "scale"])
def test_lost_or_leaked_nans_are_detected(name: str) -> None:
    problem = Fuzzed("flex", BIASED, "float32", 7, spoiled=Spoiled(name, "nan", "number", head=1, batch=1))
    rows = problem.broken_rows()
    assert rows.any() and not rows[..., [0, 2, 3]].any()
    (without,), (spoiled,) = execution.run_both([problem])

    assert find_leaks(problem, without, spoiled) == []
    out, lse = np.array(spoiled[0][0]), spoiled[0][1]
    out[tuple(np.argwhere(rows)[0])] = 0
    assert find_leaks(problem, without, ((out, lse), spoiled[1])) == [
        f"nan in {name}: 8 of {8 * rows.sum()} numbers of out are finite"
    ]
    out = np.array(spoiled[0][0])
    out[0, 0, 0, 0] += 1
    (error,) = find_leaks(problem, without, ((out, lse), spoiled[1]))
    assert error.startswith(f"nan in {name} reaches out of other entries or heads: 1 of ")


@pytest.mark.parametrize("features", [*((each,) for each in FEATURES if each not in RINGS), ("extents", "odd_heads")])
def test_problems_with_features_are_drawn_for_the_asking(features: tuple[str, ...]) -> None:
    options = options_of("--seed", "2", "--problems", "6", "--feature", *features)
    drawn = [problem for _, problem in problems_of(options, 0)]
    assert len(drawn) == 6 and drawn == [problem for _, problem in problems_of(options, 0)]
    assert all(FEATURES[feature](problem) for problem in drawn for feature in features)


def test_features_that_only_direct_kernels_lack_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"^no problem of cpu has upsample"):
        draw_with(["upsample"], CPU, ("fna",), 0, 0, is_direct=True)


def test_features_of_gpus_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems for GPUs include wrapped windows, relative biases with many batch entries, and all ring kernels."""
    monkeypatch.setattr(devices, "default_device", lambda: devices.Device("cuda", (9, 0), is_present=False))
    family = family_named("cutlass")

    def drawn(feature: str, count: int) -> list[Fuzzed]:
        return [draw_with((feature,), family, ("fna",), 0, number, is_direct=True) for number in range(count)]

    for problem in drawn("wrap", 2):
        _, plans = plans_of(problem.backend, problem.description(), Performance(**problem.tiles))
        assert all(family.backend.form(plan).wraps for plan in plans.values())
    tables = [problem.case for problem in drawn("relative_bias", 30)]
    many = [case for case in tables if case.batch * case.heads > 528]
    assert 0 < len(many) < len(tables) and all(case.heads == case.heads_kv for case in many)
    kernels = {kernel for feature in RINGS for problem in drawn(feature, 5) for kernel in kernels_of(problem)}
    assert kernels == {"forward with a ring", "query gradient with a ring", "key/value gradient with a ring"}


def test_problems_vary_with_the_number_and_follow_from_the_seed() -> None:
    def drawn(seed: int, count: int) -> list[Fuzzed]:
        return [draw(CPU, OPERATORS, seed, i, is_direct) for i in range(count) for is_direct in (False, True)]

    problems = drawn(3, 150)
    assert drawn(3, 20) == problems[:40] != drawn(4, 20)
    values = collections.defaultdict(set)
    for problem in problems:
        tiles = {f"tiles.{name}": problem.tiles.get(name) for name in vars(Performance())}
        case = {f"case.{name}": value for name, value in vars(problem.case).items()}
        for name, value in (vars(problem) | case | tiles).items():
            values[name].add(repr(value))
    assert {name for name, found in values.items() if len(found) == 1} == {"family", "copies", "case.table_size"}
    assert {problem.dtype for problem in problems} == {*CPU.dtypes, *FLOAT8}
    assert {problem.factors for problem in problems} == {None, *HEAD_KINDS, *BLOCK_KINDS}
    assert {problem.case.rank for problem in problems} == {1, 2, 3}
