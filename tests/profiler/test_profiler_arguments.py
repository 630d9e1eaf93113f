"""The profiler's command line: usage errors, help and defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from natten_jax.performance import Performance
from natten_jax.problem import problem_of
from natten_jax.profiler import options as profiler_options
from natten_jax.profiler import parse
from natten_jax.profiler.__main__ import main

#: Lines ``flags -> message``: invalid flags of the profiler, and a part of the error message.
USAGE_ERRORS = (Path(__file__).parents[1] / "data" / "usage_errors.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("line", USAGE_ERRORS)
def test_usage_errors(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, _, message = line.partition(" -> ")
    with pytest.raises(SystemExit) as exit_:
        main(command.split())
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("natten-jax-profiler: error: ")
    assert error.count("\n") == 1
    assert len(error) < 400


def test_help_has_groups_and_examples(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for part in ("problem:", "backend and configuration:", "measurement and output:", "examples:", "-i 8 16 24"):
        assert part in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_defaults() -> None:
    options = parse(["-i", "8", "16"])
    assert options.problem == problem_of((8, 16), (8, 16), dtype="float16")
    assert not options.backprop
    assert options.performance == Performance()
    assert (options.warmup_steps, options.iterations) == (10, 20)
    assert parse(["-i", "8", "-n", "4", "-d", "32"]).problem.heads_kv == 4
    assert parse(["-i", "8", "-n", "4", "-d", "32"]).problem.head_dim_v == 32


@pytest.mark.parametrize(
    ("given", "expected"),
    [("true 0", (True, False)), ("False 1", (False, True)), ("1", (True, True)), ("False", (False, False))],
)
def test_causal(given: str, expected: tuple[bool, ...]) -> None:
    assert parse(["-i", "8", "8", "-c", *given.split()]).problem.is_causal == expected


@pytest.mark.parametrize("flag", ["-w", "-s", "--dilation"])
def test_one_extent_is_for_all_dimensions(flag: str) -> None:
    problem = ["-i", "16", "16", "16", "-w", "4"]
    assert parse([*problem, flag, "2"]) == parse([*problem, flag, "2", "2", "2"])


@pytest.mark.parametrize(
    ("full", "short"),
    [
        ("float16", "fp16"),
        ("bfloat16", "bf16"),
        ("float32", "fp32"),
        ("float64", "fp64"),
        ("float8_e4m3fn", "e4m3"),
        ("float8_e5m2", "e5m2"),
    ],
)
def test_element_types_have_one_spelling_in_results(full: str, short: str) -> None:
    given, shorter = (parse(["-i", "8", "--dtype", name]) for name in (full, short))
    assert given == shorter and given.as_given()["dtype"] == short


def test_natten_flags_without_effect_are_accepted() -> None:
    assert parse(["-i", "8", "--compile"]) == parse(["-i", "8"])


def test_every_rule_of_the_operators_is_one_of_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("kernel_size must be prime, and stride, dilation and is_causal odd")

    monkeypatch.setattr(profiler_options, "problem_of", refuse)
    with pytest.raises(SystemExit):
        parse(["-i", "8"])
    assert "--window-size must be prime, and --stride, --dilation and --causal odd" in capsys.readouterr().err


def test_baselines_ignore_windows_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    problem = parse(["-i", "8", "8", "-w", "3", "3", "-s", "2", "2", "-c", "1", "--backend", "xla"]).problem
    assert (problem.kernel_size, problem.stride, problem.is_causal) == ((8, 8), (1, 1), (False, False))
    error = capsys.readouterr().err
    assert "warning: --backend xla computes self attention only: flags of windows" in error


def test_every_performance_argument_has_a_flag() -> None:
    line = "-i 64 64 -w 9 --backprop --backward-kv-splits 2 --backward-use-xla-reduction --backward-deterministic"
    line += " --memory-usage-preference strict --no-persistent --schedule coop --q-tile 8 8 --kv-tile 8 16"
    assert parse(line.split()).performance == Performance(
        (8, 8), (8, 16), None, None, (2, 2), True, True, "strict", False, "coop"
    )
