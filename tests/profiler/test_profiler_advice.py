"""Profiler commands in the README, recommendations in errors, and warnings about flags that have no effect."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.support.programs import PACKAGE, run_command

from .conftest import Profiler

README = (PACKAGE.parent / "README.md").read_text(encoding="utf-8")
FEW = "--iterations 1 --warmup-steps 0"


def test_lines_of_the_readme_run_on_a_host(tmp_path: Path) -> None:
    joined = README.replace("\\\n", "")
    lines = re.findall(r"^python -m (natten_jax\.profiler .*?)(?:  #.*)?$", joined, re.MULTILINE)
    assert len(lines) == 3
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(PACKAGE.parent)}
    for line in lines:
        done = run_command(["-m", *shlex.split(line)], environment, timeout=600, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
    assert (tmp_path / "tuned.json").exists()


@pytest.mark.parametrize("name", ["cudnn", "pallas"])
@pytest.mark.parametrize("option", ["--compare", "--backend"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_advice_works(name: str, option: str, dtype: str, profiler: Profiler) -> None:
    command = f"-i 8 8 -d 16 -w 3 --dtype {dtype} {FEW}"
    said = profiler(f"{command} {option} {name}", status=1).err
    advice = re.search(r"use (--\S+ xla(?: --dtype \S+)?)\n", said)
    assert advice is not None, said
    profiler(f"{command} {advice[1]}")


@pytest.mark.parametrize("arguments", ["--compare xla --dtype bf16", "--backend xla --dtype fp32"])
def test_baselines_without_room_for_logits_are_refused(arguments: str, profiler: Profiler) -> None:
    said = profiler(f"-i 512 512 -n 8 -w 9 {arguments}", status=1).err.splitlines()[-1]
    assert "omit it, compare with flex-fna, or take fewer tokens or heads" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--schedule pp", "--schedule='pp' has no effect on cpu: cpu-fna has no kernel schedules (hopper-fna has)"),
        ("--no-persistent", "--persistent=False has no effect on cpu: cpu-fna has no persistent tile scheduling"),
        ("--backprop --backward-kv-splits 2", "--backward-kv-splits=(2, 2) has no effect on cpu: cpu-fna has no"),
        ("--backend xla --dtype fp32 --no-persistent", "--backend xla computes self attention only: flags of"),
        ("--backprop --backward-deterministic", ""),
        ("--q-tile 4 4 --kv-tile 4 8", ""),
    ],
)
def test_flags_without_effect_are_reported(flags: str, said: str, profiler: Profiler) -> None:
    lines = profiler(f"-i 8 8 -d 16 -w 3 {FEW} {flags}").err.splitlines()
    assert all(line.startswith("natten-jax-profiler: warning: ") for line in lines)
    assert len(lines) == bool(said)
    assert said in "\n".join(lines)
