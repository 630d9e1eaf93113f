"""Which tests of a run one worker of pytest-xdist gets: mostly those of a module.

A test's name says which, not a mark ``xdist_group``: pytest-xdist 3.8 hands marks over in an attribute that pytest 9.2
has no more, and then gives every test to any worker.
"""

from __future__ import annotations

import collections
from typing import Any

from xdist.scheduler import LoadScopeScheduling

#: Tests of a module that follow each other and that one worker gets, so that there is work for many, and none is left
#: alone at the end.
MOST_TOGETHER = 100
#: Modules of which each test is a program of its own for seconds: whoever has nothing to do gets the next one.
APART = frozenset(
    {
        "tests/repository/test_examples.py",
        "tests/sharding/test_sharding.py",
        "tests/tpu/test_compiled.py",
        "tests/tpu/test_compiled_meshes.py",
    }
)
#: Tests that one worker gets on GPUs, where others are dealt out one by one: two at a time would not fit.
TOGETHER_ON_GPUS = frozenset({"tests/gpu/test_hopper.py::test_arrays_of_more_than_2_31_elements"})


class Groups:
    """The group of each test, in the order in which they are collected.

    Args:
        is_of_gpu: Whether the run is of a GPU.
    """

    def __init__(self, is_of_gpu: bool) -> None:
        self._is_of_gpu = is_of_gpu
        self._groups: dict[str, str] = {}
        self._counts: collections.Counter[str] = collections.Counter()

    def of(self, test: str) -> str:
        """The group of a test, by its id."""
        if test not in self._groups:
            self._groups[test] = self._of_gpu(test) if self._is_of_gpu else self._of_host(test)
        return self._groups[test]

    def _of_gpu(self, test: str) -> str:
        function = test.partition("[")[0]
        return function if function in TOGETHER_ON_GPUS else test

    def _of_host(self, test: str) -> str:
        module = test.partition("::")[0]
        if module in APART:
            return test
        number = self._counts[module] // MOST_TOGETHER
        self._counts[module] += 1
        return f"{module} {number}"


class GroupScheduling(LoadScopeScheduling):
    """Gives workers groups of tests: in a module they share what was compiled, built or expected before.

    Args:
        config: The run.
        log: Where xdist writes.
        is_of_gpu: Whether the run is of a GPU.
    """

    def __init__(self, config: Any, log: Any, is_of_gpu: bool) -> None:
        super().__init__(config, log)
        self._groups = Groups(is_of_gpu)

    def _split_scope(self, nodeid: str) -> str:
        return self._groups.of(nodeid)
