"""Programs where JAX was told to use what is not there: they answer without a device, or say in a sentence why not."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.programs import PACKAGE, output_of, run_command, run_python

BENCH = PACKAGE.parent / "bench"
#: What JAX finds on no machine that has neither plugin nor hardware for it; the first without a word of its own.
PLATFORMS = ["cuda", "nonsense"]
REASONS = {"cuda": "cuda", "nonsense": "'nonsense' is not in the list of known backends"}


def run(platform: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": platform, "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(PACKAGE.parent)
    return run_command(arguments, environment)


def sentences(text: str) -> str:
    assert "Traceback" not in text
    return " ".join(text.split())


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_doctor_reports(platform: str) -> None:
    found = run(platform, "-m", "natten_jax.doctor")
    report = sentences(output_of(found))
    assert "none: JAX has no device: " in report and REASONS[platform] in report
    assert "cpu-fna runs float16" in report
    assert not found.stderr


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("flags", [[], ["--compute-capability", "9.0"]])
def test_the_doctor_answers_for_a_problem(platform: str, flags: list[str]) -> None:
    report = sentences(output_of(run(platform, "-m", "natten_jax.doctor", "--problem", "-i", "64", "-w", "8", *flags)))
    assert ("JAX has no device: " in report) == (not flags)
    assert "query tile" in report


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("flags", [[], ["--compute-capability", "9.0"]])
@pytest.mark.parametrize("mode", ["--dry-run", "--simulate"])
def test_the_profiler_answers(platform: str, mode: str, flags: list[str], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = ["-m", "natten_jax.profiler", "-i", "64", "-w", "8", mode, *flags, "--json", str(path)]
    found = run(platform, *command)
    assert "tile" in output_of(found)
    said = sentences(found.stderr)
    if flags:
        assert not said
    else:
        assert said.startswith("natten-jax-profiler: warning: JAX has no device: ") and REASONS[platform] in said
    assert json.loads(path.read_text(encoding="utf-8"))["device"] is None


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("flags", [[], ["--optimize"], ["--compare", "xla"], ["--devices", "2", "-b", "2"]])
def test_what_needs_a_device_says_so(platform: str, flags: list[str]) -> None:
    found = run(platform, "-m", "natten_jax.profiler", "-i", "64", "-w", "8", *flags)
    assert found.returncode == 1
    said = sentences(found.stderr)
    assert said.startswith("natten-jax-profiler: error: JAX has no device: ") and REASONS[platform] in said
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize("script", ["run.py", "fmha_scaling.py", "scaling.py", "several_devices.py"])
def test_benchmarks_say_so(script: str) -> None:
    for flags, status in (([], 1), (["--help"], 0)):
        found = run("cuda", str(BENCH / script), *flags)
        assert found.returncode == status
        said = sentences(found.stderr)
        assert said.startswith(f"bench/{script}: error: JAX has no device: ") if status else not said


def test_questions_and_traces_need_none() -> None:
    program = """
    import jax
    import natten_jax
    from natten_jax.plan.devices import CPU, Device, NoDeviceError, default_device, local_devices, lowering_targets

    query = jax.ShapeDtypeStruct((1, 64, 2, 64), "float16")
    assert natten_jax.get_configs_for_cutlass_fna(query, compute_capability="9.0")
    assert jax.eval_shape(lambda x: natten_jax.na1d(x, x, x, 8), query).shape == query.shape
    assert lowering_targets()["cuda"] == Device("cuda") and local_devices() == (CPU,)
    assert next(iter(lowering_targets())) == "cpu"
    for ask in (default_device, lambda: natten_jax.get_configs_for_cpu_fna(query)):
        try:
            ask()
        except NoDeviceError as error:
            assert str(error).startswith("JAX has no device: "), error
        else:
            raise AssertionError("there is no device")
    # Nothing of it is kept: what JAX is told later counts.
    jax.config.update("jax_platforms", "cpu")
    assert default_device() == CPU and natten_jax.get_configs_for_cpu_fna(query)
    print(natten_jax.na1d(*3 * (jax.numpy.ones((1, 8, 1, 8)),), 3).sum())
    """
    environment = {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    assert output_of(run_python(program, environment=environment)).split() == ["64.0"]
