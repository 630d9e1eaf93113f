"""An interpreter that has imported JAX and natten_jax, and runs programs in forks of itself: most of a test's program
would be its imports.

``python -m tests.support.warm_interpreter MODULE...``, which has imported these modules, too, reads requests from its
standard input, a line of JSON each, and answers each with two lines: the fork's process number, and how it ended, as
:class:`subprocess.Popen` has it. A fork is what a process would be that had run these imports first: no backend of JAX
is there yet, and no thread but this one.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
import types
import warnings
from typing import IO, Any

import natten_jax.doctor.__main__
import natten_jax.profiler.__main__  # noqa: F401


def serve() -> Any:
    """Answer requests until there are no more; returns in forks alone, with the request that each is for."""
    requests, answers = (os.fdopen(os.dup(number), mode) for number, mode in ((0, "r"), (1, "w")))
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    gc.collect()
    gc.freeze()
    while line := requests.readline():
        process = _fork()
        if process == 0:
            for stream in (requests, answers):
                stream.close()
            return json.loads(line)
        _say(answers, process)
        _say(answers, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    sys.exit()


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's, which is about threads that are not there
        return os.fork()


def _say(answers: IO[str], number: int) -> None:
    answers.write(f"{number}\n")
    answers.flush()


def run(request: Any) -> None:
    """Run a program in this process, as ``python COMMAND...`` would."""
    for number, path in ((1, request["output"]), (2, request["errors"])):
        file = os.open(path, os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update({name: _text(text) for name, text in request["environment"].items()})
    os.chdir(_text(request["folder"]))
    what, *arguments = map(_text, request["command"])
    if what not in ("-c", "-m"):
        sys.argv, sys.path[0] = [what, *arguments], os.path.dirname(what)
        runpy.run_path(what, run_name="__main__")
        return
    subject, *sys.argv[1:] = arguments
    sys.argv[0], sys.path[0] = what, "" if what == "-c" else os.getcwd()
    if what == "-m":
        # It is imported with what it imports; itself, it is to run.
        sys.modules.pop(f"{subject}.__main__", None)
        runpy.run_module(subject, run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(subject, "<string>", "exec"), vars(main))


def _text(of_bytes: str) -> str:
    """A word of a command line as this locale reads it, from its bytes, which stand for characters."""
    return os.fsdecode(of_bytes.encode("latin-1"))


if __name__ == "__main__":
    for each in sys.argv[1:]:
        importlib.import_module(each)
    run(serve())
