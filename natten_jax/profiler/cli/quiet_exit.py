"""How the command line programs end where their reader or their user has had enough."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from natten_jax.plan.devices import NoDeviceError
from natten_jax.profiler.cli.printable import escape_what_cannot_be_printed

#: Exit status of a program that Ctrl-C ended, as shells have it: 128 and the number of the signal.
INTERRUPTED = 130


def run_quietly(program: str, run: Callable[[], int | None]) -> int:
    """The exit status of ``run``; 1 where JAX has no device or whoever read its output left early, 130 after Ctrl-C.

    Args:
        program: Its name in messages.
        run: Does the work and returns the exit status; ``None`` is 0.
    """
    escape_what_cannot_be_printed()
    try:
        status = run() or 0
        sys.stdout.flush()
    except NoDeviceError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read the output has seen enough; Python would complain once more when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


def end(status: int) -> NoReturn:
    """End the process with an exit status.

    After Ctrl-C without Python's own clean-up: what JAX was compiling when it came would take the process down there.
    """
    if status != INTERRUPTED:
        sys.exit(status)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)
