"""The profiler's command line program."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import jax

from natten_jax.profiler.arguments import parse
from natten_jax.profiler.capture import CaptureError
from natten_jax.profiler.measure import profile
from natten_jax.profiler.report import print_report, to_json


def main(argv: Sequence[str] | None = None) -> int:
    """Profile what the command line asks for; return the exit status."""
    options = parse(argv)
    try:
        result = profile(options)
    except (ValueError, CaptureError, jax.errors.JaxRuntimeError) as error:
        # What cannot run here is the user's to change: one sentence, not a traceback.
        print(f"natten-jax-profiler: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps(to_json(result), indent=2) + "\n")
    print_report(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
