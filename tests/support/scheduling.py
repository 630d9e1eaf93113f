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


class GroupScheduling(LoadScopeScheduling):
    """Gives workers groups of tests: in a module they share what was compiled, built or expected before.

    Args:
        config: The run.
        log: Where xdist writes.
        is_of_gpu: True for a run on a GPU.
    """

    def __init__(self, config: Any, log: Any, is_of_gpu: bool) -> None:
        super().__init__(config, log)
        self._is_of_gpu = is_of_gpu
        self._groups: dict[str, str] = {}
        self._counts: collections.Counter[str] = collections.Counter()

    def _split_scope(self, nodeid: str) -> str:
        """The group of a test, numbered in the order in which they are collected."""
        module, function = nodeid.partition("::")[0], nodeid.partition("[")[0]
        if self._is_of_gpu or module in APART:
            return function if self._is_of_gpu and function in TOGETHER_ON_GPUS else nodeid
        if nodeid not in self._groups:
            self._groups[nodeid] = f"{module} {self._counts[module] // MOST_TOGETHER}"
            self._counts[module] += 1
        return self._groups[nodeid]
