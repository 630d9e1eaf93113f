"""The examples run, as a user would run them, and do what they say."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("flax", "matplotlib", "optax", "rich", "sklearn"):
    pytest.importorskip(package)

EXAMPLES = Path(__file__).parents[1] / "examples"


def output_of(name: str, *arguments: str) -> str:
    command = [sys.executable, EXAMPLES / name, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_digits_learns_and_saves_a_picture(tmp_path):
    picture = tmp_path / "pictures" / "digits.png"
    output = output_of("digits.py", "--epochs", "4", "--output", str(picture))
    accuracies = [float(match) for match in re.findall(r"^epoch +\d+ .*test accuracy ([\d.]+)%", output, re.MULTILINE)]
    assert len(accuracies) == 4
    assert accuracies[-1] > 80
    assert f"Test accuracy {accuracies[-1]:.2f}%" in output
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--features", "24"], "--features must be a multiple of 16"),
    ],
)
def test_digits_refuses_wrong_arguments(arguments, message, capsys):
    main = runpy.run_path(str(EXAMPLES / "digits.py"))["main"]
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [(), ("--backward", "--dtype", "bfloat16", "--backend", "flex-fna")])
def test_profile_block_prints_a_table(arguments):
    layout, window, width = ("--layout", "2", "6", "8"), ("--kernel-size", "2", "3", "3"), ("--features", "32")
    output = output_of("profile_block.py", *layout, *window, *width, "--heads", "2", "--iterations", "2", *arguments)
    assert "2x6x8 tokens" in output
    assert "Operation" in output
    assert "Total" in output
    assert "100.0%" in output
    assert "gemm" in output
    assert re.search(r"\d+\.\d+(us|ms|s)\b", output)
