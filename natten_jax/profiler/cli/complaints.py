"""What the profiler's command line says on standard error: a sentence, not a traceback."""

from __future__ import annotations

import sys

#: The name of the program, in front of every sentence.
PROGRAM = "natten-jax-profiler"


def complain(what: object) -> None:
    """Say why something asked for was not done: it is the user's to change."""
    _say("error", what)


def warn(what: object) -> None:
    """Say how what is done differs from what was asked for."""
    _say("warning", what)


def tell(what: object) -> None:
    """Say what is going on, for whoever waits."""
    print(f"{PROGRAM}: {what}", file=sys.stderr, flush=True)


def _say(kind: str, what: object) -> None:
    print(f"{PROGRAM}: {kind}: {' '.join(str(what).split())}", file=sys.stderr)
