"""Programs in forks of an interpreter are what they are in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.programs import PACKAGE, run_command, run_python
from tests.support.warm_programs import run_warm

ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(PACKAGE.parent)}


@pytest.mark.parametrize("fresh", [False, True])
def test_streams_status_arguments_folder_and_devices(fresh: bool, tmp_path: Path) -> None:
    program = (
        "import os, sys, jax; print(sys.argv, os.getcwd()); print(len(jax.devices()), file=sys.stderr); sys.exit(7)"
    )
    environment = {**ENVIRONMENT, "XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    done = run_command(["-c", program, "a b"], environment, folder=tmp_path, fresh=fresh)
    assert (done.returncode, done.stdout, done.stderr) == (7, f"['-c', 'a b'] {tmp_path}\n", "3\n")


@pytest.mark.parametrize("fresh", [False, True])
def test_files_and_modules_are_main(fresh: bool, tmp_path: Path) -> None:
    for name in ("program.py", "__main__.py"):
        (tmp_path / name).write_text("import sys, other; print(__name__, sys.argv[1:], other.__name__)")
    (tmp_path / "other.py").write_text("")
    file = run_command([tmp_path / "program.py", "x"], ENVIRONMENT, fresh=fresh)
    assert file.stdout == "__main__ ['x'] other\n", file.stderr
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(
        "import sys; print(__name__, sys.argv[1:], sys.modules['__main__'])"
    )
    module = run_command(["-m", "package", "x"], ENVIRONMENT, folder=tmp_path, fresh=fresh)
    assert module.stdout.startswith("__main__ ['x'] <module 'package.__main__' from "), module.stderr


def test_each_is_alone() -> None:
    first = run_python("import natten_jax, os; natten_jax.mark = os.environ['MARK'] = 'here'; print('done')")
    second = run_python("import natten_jax, os; print(hasattr(natten_jax, 'mark'), 'MARK' in os.environ)")
    assert (first.stdout, second.stdout) == ("done\n", "False False\n")


def test_a_crash_and_a_traceback_are_told_apart() -> None:
    crash, error = run_python("import os; os.abort()"), run_python("1 / 0")
    assert (crash.returncode, error.returncode) == (-signal.SIGABRT, 1)
    assert error.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_what_takes_too_long_is_killed_and_what_it_printed_is_kept() -> None:
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        run_warm(["-c", "import time; print('begun', flush=True); time.sleep(60)"], ENVIRONMENT, timeout=1)
    assert raised.value.stdout == b"begun\n"
    assert run_warm(["-c", "print('next')"], ENVIRONMENT).stdout == b"next\n"


def test_an_interpreter_that_cannot_start_says_so() -> None:
    with pytest.raises(RuntimeError, match="has ended with status 1"):
        run_warm(["-c", ""], ENVIRONMENT, modules=["no_such_module"])


def test_words_are_bytes_in_any_locale() -> None:
    environment = {**ENVIRONMENT, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [os.fsdecode(b"caf\xc3\xa9"), os.fsdecode(b"latin-\xe9")]
    done = run_warm(["-c", "import os, sys; print([os.fsencode(word) for word in sys.argv[1:]])", *words], environment)
    assert done.stdout == b"[b'caf\\xc3\\xa9', b'latin-\\xe9']\n"
