"""Differential fuzzing: random problems, as many as there is time for, against the float64 oracle.

``python -m tests.fuzz --help`` in the repository's root says how. The modules beside this folder, the oracle among
them, are top-level modules for pytest, and are here, too.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
