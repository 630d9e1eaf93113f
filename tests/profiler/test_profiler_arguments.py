"""The profiler's command line: usage errors, help and defaults."""

from __future__ import annotations

import pytest

from natten_jax.performance import Performance
from natten_jax.problem import problem_of
from natten_jax.profiler import arguments, parse
from natten_jax.profiler.__main__ import main

#: A problem for several devices.
PROBLEM = "-i 6 8 -b 8 -n 8 -d 16 --dtype fp32"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "required: -i/--input-size"),
        ("-i 2 2 2 2", "-i/--input-size takes 1 to 3 integers"),
        ("-i 0", "must be at least 1, got 0"),
        ("-i x", "invalid integer value: 'x'"),
        ("-i 8 8 8 -w 4 4", "--window-size takes 3 value(s), or one for all"),
        ("-i 8 -s 1 1", "--stride takes 1 value(s)"),
        ("-i 8 -w 4 --dilation 1 2", "--dilation takes 1 value(s), or one for all"),
        ("-i 8 8 8 -c 1 0", "--causal takes 3 value(s), or one for all"),
        ("-i 8 -c maybe", "'maybe' is not a truth value"),
        ("-i 8 8 -w 4 9", "--window-size (4, 9) with --dilation (1, 1) exceeds --input-size (8, 8)"),
        ("-i 8 4 -w 6", "--window-size (6, 6) with --dilation (1, 1) exceeds --input-size (8, 4)"),
        ("-i 8 -w 4 -s 5", "--stride (5,) exceeds --window-size (4,)"),
        ("-i 8 -w 4 --dilation 3", "--window-size (4,) with --dilation (3,) exceeds --input-size (8,)"),
        ("-i 8 -n 6 --heads-kv 4", "--heads 6 is not a multiple of --heads-kv 4"),
        ("-i 8 -w 4 --q-tile 8", "--q-tile=(8,) was given without --kv-tile"),
        ("-i 8 -w 4 --kv-tile 8", "--kv-tile=(8,) was given without --q-tile"),
        ("-i 8 -w 4 --backward-kv-tile 8", "--backward-kv-tile=(8,) was given without --backward-q-tile"),
        ("-i 8 8 -w 4 4 --q-tile 8 --kv-tile 8 8", "--q-tile takes 2 value(s)"),
        ("-i 8 --backend nothing", "--backend 'nothing' is unknown; choose None or one of"),
        ("-i 8 --backend cpu-fmha", "is a backend of attention, and this is neighborhood attention"),
        ("-i 8 --fmha-backend cpu", "--fmha-backend 'cpu' is unknown: did you mean 'cpu-fmha'?"),
        ("-i 8 --fmha-backend cpu-fna", "is a backend of neighborhood attention, and this is attention"),
        ("-i 8 --backend xformers", "baseline of PyTorch; JAX's are cudnn"),
        ("-i 8 --backend fav2", "use --backend cudnn"),
        ("-i 8 --backend xla --add-kv 4", "--add-kv does not go with --backend xla"),
        ("-i 8 --dtype fp17", "argument --dtype: invalid choice: 'fp17'"),
        (
            "-i 8 --dtype e4m3 --backprop",
            "--backprop does not go with --dtype e4m3: arrays of 8 bits have no gradients",
        ),
        ("-i 8 --no-compile", "--no-compile does not exist here: every program is compiled by XLA"),
        ("-i 8 --add-kv 4 --fuse-additional-kv", "--fuse-additional-kv does not exist here: additional tokens go into"),
        ("-i 8 --schedule fast", "invalid choice: 'fast'"),
        ("-i 8 --iterations 0", "must be at least 1, got 0"),
        ("-i 8 --warmup-steps -1", "must be at least 0, got -1"),
        ("-i 8 --json no/such/folder/out.json", "the folder 'no/such/folder' does not exist"),
        ("-i 8 --nonsense", "unrecognized arguments: --nonsense"),
        # Modes.
        ("-i 8 --dry-run --optimize", "--dry-run and --optimize exclude each other"),
        ("-i 8 --dry-run --simulate", "--dry-run and --simulate exclude each other"),
        ("-i 8 --simulate --optimize", "--simulate and --optimize exclude each other"),
        ("-i 8 --compute-capability 9.0", "--compute-capability is for --dry-run and --simulate"),
        ("-i 8 --dry-run --compute-capability nine", "'nine' is not a compute capability such as 9.0"),
        ("-i 8 --dry-run --compute-capability 9.75", "'9.75' is not a compute capability"),
        ("-i 8 --dry-run --compare xla", "--compare would need a measurement"),
        ("-i 8 --simulate --plot a.png --csv a.csv", "--csv, --plot would need a measurement"),
        ("-i 8 --dry-run --backend xla", "which the baseline xla does not have"),
        ("-i 8 --optimize --backend cudnn", "which the baseline cudnn does not have"),
        ("-i 8 --compare nothing", "--compare 'nothing' is unknown"),
        ("-i 8 --compare fav2", "use --compare cudnn"),
        ("-i 8 --compare xla --backend xla", "--compare xla is what --backend runs already"),
        ("-i 8 --max-configs -1", "must be at least 0"),
        ("-i 8 --optimize --optimize-warmup-steps -1", "must be at least 0"),
        ("-i 8 --backward-q-tile 8 --backward-kv-tile 8", "runs with --backprop only"),
        ("-i 8 --plot no/such/folder/a.png", "the folder 'no/such/folder' does not exist"),
        # Several devices.
        (f"{PROBLEM} --devices 0", "must be at least 1, got 0"),
        (f"{PROBLEM} --devices two", "invalid integer value: 'two'"),
        (
            f"{PROBLEM} --split tokens",
            "--split takes batch, heads, H, W, or token dimensions with commas, as H,W; got tokens",
        ),
        (f"{PROBLEM} --split H,H --devices 2", "got H,H"),
        (
            f"{PROBLEM} --split W --devices 16",
            "cannot share the tokens equally that --split W names: the input size is 6 8",
        ),
        (f"{PROBLEM} --devices 3", "--batch-size 8 is not a multiple of --devices 3"),
        (f"{PROBLEM} --devices 3 --split heads", "--heads 8 is not a multiple of --devices 3"),
        (f"{PROBLEM} --devices 2 --optimize", "--devices 2 does not go with --optimize, which is about one device"),
        (f"{PROBLEM} --devices 8 --split heads --dry-run", "--devices 8 does not go with --dry-run"),
        (f"{PROBLEM} --devices 2 --compare pallas", "--compare pallas does not go with --devices 2"),
        (f"{PROBLEM} --devices 2 --backend pallas", "--backend pallas does not go with --devices 2"),
        (
            f"{PROBLEM} --devices 4 --split heads --heads-kv 2 --compare cudnn",
            "--devices 4 and --split heads; use --compare xla",
        ),
        # TPUs, and the backward pass.
        ("-i 32 --device v5e", "--device is for --dry-run and --simulate"),
        ("-i 32 --device v5e --simulate --compute-capability 9.0", "exclude each other"),
        ("-i 32 --device v9 --dry-run", "invalid choice: 'v9'"),
        ("-i 64 64 -w 9 --backward-deterministic", "is for the backward pass, which runs with --backprop only"),
        ("-i 64 64 -w 9 --backward-kv-splits 3", "is for the backward pass, which runs with --backprop only"),
    ],
)
def test_usage_errors(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_flags_of_natten_that_change_nothing_are_taken() -> None:
    assert parse(["-i", "8", "--compile"]) == parse(["-i", "8"])


def test_every_rule_of_the_operators_is_one_of_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("kernel_size must be prime, and stride, dilation and is_causal odd")

    monkeypatch.setattr(arguments, "problem_of", refuse)
    with pytest.raises(SystemExit):
        parse(["-i", "8"])
    assert "--window-size must be prime, and --stride, --dilation and --causal odd" in capsys.readouterr().err


def test_baselines_ignore_windows_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(["-i", "8", "8", "-w", "3", "3", "-s", "2", "2", "-c", "1", "--backend", "xla"])
    assert (options.problem.kernel_size, options.problem.stride, options.problem.is_causal) == (
        (8, 8),
        (1, 1),
        (False, False),
    )
    error = capsys.readouterr().err
    assert "warning: --backend xla computes self attention only: flags of windows" in error


def test_every_performance_argument_has_a_flag() -> None:
    line = "-i 64 64 -w 9 --backprop --backward-kv-splits 2 --backward-use-xla-reduction --backward-deterministic"
    line += " --memory-usage-preference strict --no-persistent --schedule coop --q-tile 8 8 --kv-tile 8 16"
    assert parse(line.split()).performance == Performance(
        (8, 8), (8, 16), None, None, (2, 2), True, True, "strict", False, "coop"
    )
