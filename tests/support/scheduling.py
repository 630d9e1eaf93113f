"""Distribution of tests among pytest-xdist workers: mostly by module.

Groups come from test names instead of ``xdist_group`` marks: pytest-xdist 3.8 passes marks in an attribute that
pytest 9.2 removed, and then gives every test to any worker.
"""

from __future__ import annotations

import collections
from typing import Any

from xdist.scheduler import LoadScopeScheduling

#: Maximum number of consecutive tests of a module that one worker gets, so that work is spread over many workers and no
#: single worker is still busy at the end.
MOST_TOGETHER = 100
#: Modules in which each test runs a program for seconds: any idle worker takes the next test.
APART = frozenset(
    {
        "tests/repository/test_examples.py",
        "tests/sharding/test_sharding.py",
        "tests/tpu/test_compiled.py",
        "tests/tpu/test_compiled_meshes.py",
    }
)
#: Tests that one worker runs sequentially on GPUs, because two of them would not fit in memory. On GPUs, all other
#: tests are distributed individually.
TOGETHER_ON_GPUS = frozenset({"tests/gpu/test_hopper.py::test_arrays_of_more_than_2_31_elements"})


class GroupScheduling(LoadScopeScheduling):
    """Gives groups of tests to workers: tests of a module share compiled programs, builds and expected results.

    Args:
        config: Configuration of the run.
        log: Log of xdist.
        is_of_gpu: True for a run on a GPU.
    """

    def __init__(self, config: Any, log: Any, is_of_gpu: bool) -> None:
        super().__init__(config, log)
        self._is_of_gpu = is_of_gpu
        self._groups: dict[str, str] = {}
        self._counts: collections.Counter[str] = collections.Counter()

    def _split_scope(self, nodeid: str) -> str:
        """Return the group of a test, numbered in collection order."""
        module, function = nodeid.partition("::")[0], nodeid.partition("[")[0]
        if self._is_of_gpu or module in APART:
            return function if self._is_of_gpu and function in TOGETHER_ON_GPUS else nodeid
        if nodeid not in self._groups:
            self._groups[nodeid] = f"{module} {self._counts[module] // MOST_TOGETHER}"
            self._counts[module] += 1
        return self._groups[nodeid]
