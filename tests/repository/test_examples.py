"""Run the example programs in separate processes, as a user would, and check their output."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.support import programs

nnx = pytest.importorskip("flax.nnx")
for package in ("matplotlib", "optax", "rich", "sklearn"):
    if importlib.util.find_spec(package) is None:  # the examples import the package in other processes
        pytest.skip(f"{package} is not installed", allow_module_level=True)

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return programs.run_command([EXAMPLES / name, *arguments], {**os.environ, **environment})


def output_of(name: str, *arguments: str, **environment: str) -> str:
    return programs.output_of(run(name, *arguments, **environment))


def trained(name: str, *arguments: str, step: str = "step") -> str:
    """Return the output of a training example. Check that its step compiles once, or twice with ``--profile``."""
    result = run(name, *arguments, JAX_LOG_COMPILES="1")
    assert result.stderr.count(f"Compiling jit({step}) with") == 1 + ("--profile" in arguments)
    return programs.output_of(result)


def test_digits_learns_and_saves_a_picture(tmp_path):
    picture = tmp_path / "pictures" / "digits.png"
    output = trained("digits.py", "--epochs", "4", "--output", str(picture), step="train_step")
    accuracies = [float(match) for match in re.findall(r"^epoch +\d+ .*test accuracy ([\d.]+)%", output, re.MULTILINE)]
    assert len(accuracies) == 4
    assert accuracies[-1] > 80
    assert f"Test accuracy {accuracies[-1]:.2f}%" in output
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("cache", ["whole", "ring"])
def test_decode_equals_its_whole_sequences(cache):
    options = ("--tokens", "24", "--window", "6", "--prompts", "2", "11", "5", "--cache", cache)
    output = trained("decode.py", *options)
    assert len(re.findall(r"^ +(2|11|5) tokens of prompt, then (\d+ ){12}\.\.\.$", output, re.MULTILINE)) == 3
    (difference,) = re.findall(r"^Largest difference .*: (\S+)$", output, re.MULTILINE)
    assert 0 < float(difference) < 1e-4


def test_weather_is_forecast_across_the_date_line(tmp_path):
    picture = tmp_path / "pictures" / "weather.png"
    output = output_of("weather.py", "--steps", "125", "--batch", "4", "--forecast", "2", "--output", str(picture))
    pattern = r"^(cut|wrap) +(\d) +(\d\.\d+) +(\d\.\d+)$"
    rows = re.findall(pattern, output, re.MULTILINE)
    found = {(edges, int(step)): (float(at), float(away)) for edges, step, at, away in rows}
    assert set(found) == {("cut", 1), ("cut", 2), ("wrap", 1), ("wrap", 2)}
    at_the_line, elsewhere = (dict(zip(found, errors, strict=True)) for errors in zip(*found.values(), strict=True))
    assert max(elsewhere["cut", 1], elsewhere["wrap", 1]) < 0.6  # the standard deviation of the fields is 1
    for step in (1, 2):
        assert at_the_line["cut", step] > 1.3 * at_the_line["wrap", step]
        assert at_the_line["wrap", step] < 1.2 * elsewhere["wrap", step]
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_video_denoising_learns_alike_with_two_backends(tmp_path):
    problem = ("--tokens", "4", "8", "8", "--patch", "4", "--window", "3", "4", "4", "--stride", "1", "2", "2")
    model = ("--heads", "2", "--head-dim", "16", "--steps", "60", "--learning-rate", "3e-3", "--backend", "cpu-fna")
    compared, alone = tmp_path / "curves" / "compared.json", tmp_path / "alone.json"
    comparison = ("--compare", "flex-fna:float32", "--json", str(compared))
    output = output_of("video_denoising.py", *problem, *model, *comparison)
    curves = json.loads(compared.read_text())
    assert [(run["backend"], run["dtype"]) for run in curves["runs"]] == [
        ("cpu-fna", "bfloat16"),
        ("flex-fna", "float32"),
    ]
    losses, expected = (np.array(run["losses"]) for run in curves["runs"])
    assert losses.shape == expected.shape == (60,)
    assert losses[-20:].mean() < 0.75 * losses[0]

    smoothed, reference = (np.array([curve[i : i + 20].mean() for i in range(41)]) for curve in (losses, expected))
    difference = np.max(np.abs(smoothed / reference - 1))
    # Rounding to bfloat16 causes a difference of 0.02%. The difference would be 0.3% without the query gradient, and
    # 0.2% if one backend ignored the stride.
    assert 0 < difference < 1e-3
    assert f"Largest relative difference of losses smoothed over 20 steps: {difference:.2%}" in output
    assert re.search(rf"^ +60 +{losses[-6:].mean():.4f} +{expected[-6:].mean():.4f}$", output, re.MULTILINE)

    # The losses depend only on the seed: they are the same if no second model is trained in the run.
    runpy.run_path(str(EXAMPLES / "video_denoising.py"))["main"]([*problem, *model, "--json", str(alone)])
    (run,) = json.loads(alone.read_text())["runs"]
    assert run["losses"] == losses.tolist()


def test_train_sharded_trains_as_one_device_does():
    problem = ("--tokens", "2", "6", "6", "--window", "2", "3", "3", "--depth", "1", "--batch-size", "8")
    devices = ("--devices", "8", "--model-parallel", "2", "--compare")
    # With patches of 2 by 2, the loss is a mean of 7 thousand numbers. It decreases, and the losses with 8 devices and
    # with one device differ by 3e-6. With patches of 4 by 4, the loss would be a mean of 28 thousand numbers. In JAX
    # 0.10.0, such long sums have larger rounding errors: the losses differ by 5e-5 at every learning rate.
    training = ("--steps", "6", "--learning-rate", "1e-3", "--patch", "2")
    output = output_of("train_sharded.py", *problem, *devices, *training, JAX_PLATFORMS="cpu")
    assert re.search(r"^ +step +4 data x 2 model +1 data x 1 model$", output, re.MULTILINE)
    losses, expected = np.array(re.findall(r"^ +\d+ +(\d\.\d{6}) +(\d\.\d{6})$", output, re.MULTILINE), float).T
    assert losses.shape == (6,)
    assert losses[0] == 1  # loss of the untrained model
    assert (losses[1:] < 1).all()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    (difference,) = re.findall(r"^Largest relative difference .*: (\S+)$", output, re.MULTILINE)
    assert float(difference) < 1e-5
    assert re.search(r"^s/step +\d+\.\d{4} +\d+\.\d{4}$", output, re.MULTILINE)


def losses_of(output: str) -> np.ndarray:
    """Return the losses that an example prints. Check that it also prints the time of a step."""
    assert re.search(r"^Median step: \d+\.\d+(us|ms|s)$", output, re.MULTILINE)
    return np.array(re.findall(r"^ +\d+ +(\d+\.\d{4})$", output, re.MULTILINE), float)


def attention_share_of(output: str) -> float:
    """Return the printed share of attention in the device time of a step, in percent."""
    (share,) = re.findall(r"^Attention: ([\d.]+)% of a step's \S+ of device time \(forward", output, re.MULTILINE)
    return float(share)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--batch", "16", "--image-size", "48", "--kernel-size", "5", "--profile"),
        ("--batch", "8", "--image-size", "32", "--data", "digits", "--no-dilated", "--dtype", "bf16"),
    ],
)
def test_dinat_learns(arguments):
    output = trained("dinat.py", "--steps", "40", *arguments)
    assert ("DiNAT" in output) == ("--no-dilated" not in arguments)
    losses = losses_of(output)
    assert losses.shape == (10,)
    assert losses[-1] < 0.4 * losses[0]
    assert "--profile" not in arguments or 0 < attention_share_of(output) < 100
    (accuracy,) = re.findall(r"^Test accuracy: ([\d.]+)%$", output, re.MULTILINE)
    assert float(accuracy) > 75


def test_hdit_learns_and_samples(tmp_path):
    picture = tmp_path / "pictures" / "samples.png"
    model = ("--widths", "64", "64", "128", "--depths", "1", "1", "1", "--image-size", "32", "--patch", "2")
    sampling = ("--samples", "4", "--sampling-steps", "4", "--output", str(picture))
    output = trained("hdit.py", *model, "--steps", "30", "--batch", "8", "--profile", *sampling)
    losses = losses_of(output)
    assert losses.shape == (10,)
    assert losses[-1] < 0.7 * losses[0]
    assert 0 < attention_share_of(output) < 100
    # Sampling starts from noise with a standard deviation of 1. Samples of an untrained model have this deviation.
    (deviation,) = re.findall(r"^Samples after 4 steps: .*standard deviation ([\d.]+)$", output, re.MULTILINE)
    assert float(deviation) < 0.9
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


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
