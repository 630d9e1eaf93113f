"""The workflows run what the gate runs, for the versions that the metadata name."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
#: With `make` for the function that calls it.
GATE = (ROOT / ".ci" / "run").read_text().replace("wheels() { make", "make").replace("gate_make", "make")
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def jobs(name: str) -> dict[str, Any]:
    """The jobs of a workflow."""
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())["jobs"]


def commands(name: str) -> str:
    """What a workflow runs."""
    return "\n".join(step.get("run", "") for job in jobs(name).values() for step in job["steps"])


def targets(text: str) -> set[str]:
    """The targets of make that a workflow, or the gate by its function, names."""
    return set(re.findall(r'^\s*(?:\w+=\S+ )*(?:part "[^"]*" )?make ([a-z-]+)', text, re.MULTILINE))


def default(variable: str) -> list[str]:
    """The words that a variable of the Makefile stands for."""
    (value,) = re.findall(rf"^{variable} \?= (.*)$", MAKEFILE, re.MULTILINE)
    return value.split()


def test_workflows_together_run_the_targets_of_the_gate() -> None:
    run = set().union(*(targets(commands(path.stem)) for path in WORKFLOWS))
    assert run == targets(GATE) - {"setup"} == {"lint", "docs", "test-all", "fuzz", "wheels"}
    declared = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split()
    assert run <= set(declared)
    assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in run)


def test_tests_run_with_every_python_and_the_oldest_and_newest_jax() -> None:
    (job,) = jobs("tests").values()
    matrix = job["strategy"]["matrix"]
    prefix = "Programming Language :: Python :: 3."
    named = [name for name in PROJECT["project"]["classifiers"] if name.startswith(prefix)]
    assert matrix["python"] == [name.rpartition(" ")[2] for name in named]
    assert PROJECT["project"]["requires-python"] == f">={matrix['python'][0]}"
    oldest, newest = matrix["jax"]
    assert newest == ""
    assert f"jaxlib=={oldest}" in PROJECT["build-system"]["requires"]
    lower_bound = oldest.removesuffix(".0")
    assert f"jax>={lower_bound}" in PROJECT["project"]["dependencies"]
    for cuda in ("cuda12", "cuda13"):
        assert PROJECT["project"]["optional-dependencies"][cuda] == [f"jax[{cuda}]>={lower_bound}"]


def test_the_gate_looks_for_every_python_and_installs_the_oldest_jax() -> None:
    (job,) = jobs("tests").values()
    minors = [int(version.partition(".")[2]) for version in job["strategy"]["matrix"]["python"]]
    assert re.findall(r"find-python (\d+) (\d+)\)", GATE) == [
        (str(minors[0]), str(minors[0])),
        (str(minors[1]), str(minors[-1])),
    ]
    assert f"no Python 3.{minors[0]} to 3.{minors[-1]} " in GATE
    pattern = re.search(r"""sed -n '(.*)' pyproject.toml""", GATE)
    assert pattern is not None
    command = ["sed", "-n", pattern[1], "pyproject.toml"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found.strip() == job["strategy"]["matrix"]["jax"][0]


def test_wheels_of_every_kind_are_built_for_every_python() -> None:
    (tests,) = jobs("tests").values()
    (wheels,) = jobs("wheels").values()
    pythons = tests["strategy"]["matrix"]["python"]
    assert default("PYTHONS") == [f"python{version}" for version in pythons]
    (setup,) = (step for step in wheels["steps"] if "setup-python" in step.get("uses", ""))
    assert setup["with"]["python-version"].split() == pythons
    kinds = [each["kind"] for each in wheels["strategy"]["matrix"]["include"]]
    assert kinds == [word if word != "$(CROSS)" else "aarch64" for word in default("KINDS")]
    assert kinds == list(runpy.run_path(str(ROOT / "release" / "wheels.py"))["KINDS"])
    extras = PROJECT["project"]["optional-dependencies"]
    assert [name for name in kinds if "cuda" in name] == [name for name in extras if name.startswith("cuda")]


def test_the_demo_installs_what_it_runs_and_no_more(tmp_path: Path) -> None:
    dry_run = ["make", "--dry-run", "demo", f"VENV={tmp_path / 'none'}"]
    printed = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    installed = re.findall(r"^[^#\n]*python -m pip install --quiet (.*)$", printed, re.MULTILINE)
    words = {word.strip("'") for line in installed for word in line.split() if not word.startswith("--")}
    assert words == {"jax>=0.10", "rich", "."}
    assert "next: " in printed and f"{tmp_path / 'none'}/bin/python" in printed
