"""``python -m tests.fuzz``."""

from __future__ import annotations

import sys

from .options import parse
from .supervisor import Rejected, Supervisor


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parse(arguments)
    try:
        totals = Supervisor(options).run()
    except Rejected as error:
        print(f"{options.family} cannot run here: {error}", file=sys.stderr)
        return 2
    print(f"{totals.problems} problems, {len(totals.failures)} bad")
    return 1 if totals.failures else 0


if __name__ == "__main__":
    sys.exit(main())
