"""Distribute tests among pytest-xdist workers, mostly by module.

Groups come from test names instead of ``xdist_group`` marks. pytest-xdist 3.8 reads these marks from an attribute that
pytest 9.2 has removed. With pytest 9.2, pytest-xdist therefore ignores the groups.
"""

from __future__ import annotations

import collections
from typing import Any

from xdist.scheduler import LoadScopeScheduling

#: Maximum number of tests in a group. A larger module has several groups, so that several workers share its tests and
#: finish at about the same time.
MAX_TOGETHER = 100
#: Modules in which each test runs a program for seconds. Their tests are distributed individually.
APART = frozenset(
    {
        "tests/repository/test_examples.py",
        "tests/sharding/test_sharding.py",
        "tests/tpu/test_compiled.py",
        "tests/tpu/test_compiled_meshes.py",
    }
)
#: Parametrized tests whose cases all run on one worker in GPU runs, because two cases at a time would not fit in GPU
#: memory. In GPU runs, all other tests are distributed individually.
TOGETHER_ON_GPUS = frozenset({"tests/gpu/test_hopper.py::test_arrays_of_more_than_2_31_elements"})


class GroupScheduling(LoadScopeScheduling):
    """Gives groups of tests to workers. Tests of a module share compiled programs, builds and expected results.

    Args:
        config: Configuration of the pytest run.
        log: Logger of xdist.
        is_of_gpu: True for a run on a GPU.
    """

    def __init__(self, config: Any, log: Any, is_of_gpu: bool) -> None:
        super().__init__(config, log)
        self._is_of_gpu = is_of_gpu
        self._groups: dict[str, str] = {}
        self._counts: collections.Counter[str] = collections.Counter()

    def _split_scope(self, nodeid: str) -> str:
        """Return the name of a test's group. The groups of a module are numbered in collection order."""
        module, function = nodeid.partition("::")[0], nodeid.partition("[")[0]
        if self._is_of_gpu or module in APART:
            return function if self._is_of_gpu and function in TOGETHER_ON_GPUS else nodeid
        if nodeid not in self._groups:
            self._groups[nodeid] = f"{module} {self._counts[module] // MAX_TOGETHER}"
            self._counts[module] += 1
        return self._groups[nodeid]
