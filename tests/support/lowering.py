"""How JAX lowers the thousands of programs of a run: in few contexts of MLIR."""

from __future__ import annotations

import functools
import threading
from typing import Any

from jax._src.interpreters import mlir

#: That are lowered in a context. What a context has interned, types, attributes and places in sources, stays in it.
MOST_PROGRAMS = 100


def share_contexts() -> None:
    """Let programs that a thread lowers one after another have a context in common.

    JAX 0.10 makes one for each, with all dialects that it knows: 2 to 4 ms, where a small program takes 10. With a
    hundred programs in each, 900 tests took 63 instead of 71 s of processor time, and 700 instead of 1,080 MB. JAX
    0.11.2 has ten in each by itself. None documents it: a release that makes contexts in another way goes on doing so.
    """
    make = getattr(mlir, "make_ir_context", None)
    if make is None or hasattr(make, "__wrapped__"):
        return
    first, second, third = make(), make(), make()  # the first one may be the last program of its context
    if second in (first, third):
        return
    of_thread = threading.local()

    @functools.wraps(make)
    def shared() -> Any:
        if getattr(of_thread, "programs", MOST_PROGRAMS) == MOST_PROGRAMS:
            of_thread.context, of_thread.programs = make(), 0
        of_thread.programs += 1
        return of_thread.context

    mlir.make_ir_context = shared
