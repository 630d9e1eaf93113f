"""Programs under any locale: names of files and scopes that neither ASCII nor UTF-8 has codes for."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import natten_jax
from tests.support.programs import PACKAGE, run_command

ROOT = PACKAGE.parent
#: Python with neither UTF-8 nor a way around ASCII; and UTF-8.
LOCALES = {
    "ascii": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "utf-8": {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "0"},
}
#: A name in UTF-8, and one that is no text in any locale here.
NAMES = [os.fsdecode("caf\N{LATIN SMALL LETTER E WITH ACUTE}".encode()), os.fsdecode(b"latin-\xe9")]
SCOPE = "sch\N{LATIN SMALL LETTER O WITH DIAERESIS}n \N{CJK UNIFIED IDEOGRAPH-6CE8}"
PROBLEM = ["-i", "64", "-w", "8", "--dtype", "fp32", "--iterations", "2", "--warmup-steps", "1"]


def run(locale: str, *arguments: str | Path, folder: Path | None = None) -> tuple[int, str, str]:
    """Exit status and streams of a program, decoded strictly."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("LC_")}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **LOCALES[locale]}
    done = run_command(arguments, environment, folder=folder, encoding="ascii" if locale == "ascii" else "utf-8")
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(params=NAMES, ids=ascii)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program whose scopes and names are not in ASCII."""
    path = tmp_path_factory.mktemp("trace")

    @jax.jit
    def attend(x: jax.Array) -> jax.Array:
        with jax.named_scope(SCOPE):
            return jnp.sin(natten_jax.na1d(x, x, x, 8)) + x

    x = jnp.ones((1, 64, 2, 64))
    attend(x).block_until_ready()
    with jax.profiler.trace(str(path)):
        attend(x).block_until_ready()
    return path


@pytest.mark.parametrize("locale", LOCALES)
def test_results_go_to_any_path(locale: str, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    outputs = [folder / name for name in ("result.json", "rows.csv", "rows.svg", "trace")]
    flags = zip(("--json", "--csv", "--plot", "--trace-dir"), outputs, strict=True)
    status, shown, said = run(locale, "-m", "natten_jax.profiler", *PROBLEM, *(each for flag in flags for each in flag))
    assert (status, said) == (0, "")
    assert "FnaForward" in shown
    result = json.loads(outputs[0].read_text(encoding="ascii"))
    assert len(result["iteration_times"]) == 2
    with outputs[1].open(encoding="utf-8", newline="") as file:
        assert len(list(csv.reader(file))) == 1 + len(result["rows"])
    assert outputs[2].read_bytes().endswith(b"</svg>\n")
    assert sorted(each.name for each in folder.iterdir()) == ["result.json", "rows.csv", "rows.svg", "trace"]

    rows = folder / "trace rows.json"
    status, shown, said = run(locale, "-m", "natten_jax.profiler.trace", outputs[3], "--json", rows)
    assert (status, said) == (0, "")
    assert "FnaForward" in shown
    assert json.loads(rows.read_text(encoding="ascii"))["modules"]


@pytest.mark.parametrize("locale", LOCALES)
def test_scopes_are_shown_and_saved(locale: str, trace: Path, tmp_path: Path) -> None:
    files = tmp_path / "rows.csv", tmp_path / "rows.json"
    flags = "--csv", files[0], "--json", files[1]
    status, shown, said = run(locale, "-m", "natten_jax.profiler.trace", trace, "--all", *flags)
    assert (status, said) == (0, "")
    expected = SCOPE if locale == "utf-8" else SCOPE.encode("ascii", "backslashreplace").decode()
    assert expected.split()[0] in shown
    table = [line for line in shown.splitlines() if line[:1] in ("|", "+", "\N{BOX DRAWINGS LIGHT VERTICAL}")]
    assert len(table) > 2 and (locale == "utf-8" or len(set(map(len, table))) == 1)
    assert SCOPE in files[0].read_text(encoding="utf-8")
    (rows,) = json.loads(files[1].read_text(encoding="ascii"))["modules"].values()
    assert any(SCOPE in row["operation"] for row in rows)


@pytest.mark.parametrize("locale", LOCALES)
def test_what_is_wrong_with_a_path_is_said(locale: str, folder: Path) -> None:
    wrong = folder / "nowhere" / "result.json"
    status, _, said = run(locale, "-m", "natten_jax.profiler", *PROBLEM, "--json", wrong)
    assert status == 2 and "does not exist" in said and len(said.splitlines()) == 1
    empty = folder / "empty.xplane.pb"
    empty.write_bytes(b"nothing")
    status, _, said = run(locale, "-m", "natten_jax.profiler.trace", empty)
    assert status == 1 and "truncated or corrupt" in said and len(said.splitlines()) == 1
    status, _, said = run(locale, "-m", "natten_jax.profiler.trace", folder)
    assert (status == 1 and "device events" in said) or "truncated or corrupt" in said


@pytest.mark.parametrize(
    "command",
    [
        ["natten_jax.doctor"],
        ["natten_jax.doctor", "--problem", "-i", "64", "-w", "8"],
        ["natten_jax.profiler", "-i", "64", "-w", "8", "--dry-run", "--compute-capability", "9.0"],
        ["natten_jax.profiler", "-i", "64", "64", "-w", "8", "--simulate", "--compute-capability", "9.0"],
        ["natten_jax.profiler", "--help"],
    ],
    ids=" ".join,
)
def test_everything_is_printed_in_ascii(command: list[str]) -> None:
    status, shown, said = run("ascii", "-m", *command)
    assert (status, said) == (0, "")
    assert len(shown.splitlines()) > 3


def test_the_package_runs_from_any_folder(folder: Path) -> None:
    (folder / "natten_jax").symlink_to(PACKAGE)
    program = "import sys; sys.path.insert(0, ''); from natten_jax.doctor.__main__ import main; sys.exit(main())"
    status, shown, said = run("ascii", "-c", program, folder=folder)
    assert (status, said) == (0, "")
    assert "cpu-fna        runs float16" in shown


def test_benchmarks_read_and_write_any_path(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    record = folder / "small.json"
    record.write_bytes((ROOT / "bench" / "results" / "h200" / "small.json").read_bytes())
    status, _, said = run("ascii", ROOT / "bench" / "plot_small.py", record, folder / "small.svg")
    assert (status, said) == (0, "")
    assert (folder / "small.svg").read_bytes().endswith(b"</svg>\n")


def test_the_build_understands_any_compiler(folder: Path) -> None:
    nvcc = folder / "nvcc"
    nvcc.write_bytes(b"#!/bin/sh\nprintf 'caf\\303\\251 \\377, release 13.4, V13.4.131'\n")
    nvcc.chmod(0o755)
    program = (
        "import runpy, setuptools, sys; from pathlib import Path; setuptools.setup = lambda **_: None; "
        f"print(runpy.run_path({str(ROOT / 'setup.py')!r})['cuda_of'](Path(sys.argv[1])))"
    )
    assert run("ascii", "-c", program, nvcc)[1].split() == ["13"]
