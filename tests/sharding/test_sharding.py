"""Operators on split arrays: nothing is gathered, results stay split, and they are those of one device."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import sharded
from tests.support.programs import output_of, run_python

PROGRAM = "from tests.support import sharded; sharded.main()"
OPERATORS = ("cpu-fna", "cpu-fmha", "flex-fna", "flex-fmha", "merge")
#: Attention goes the same way as neighborhood attention.
ATTENTION_MODES = ("Auto", "Explicit", "Auto+Manual")
#: Whose heads are split further than key/value heads can be: gradients of copies are summed over devices.
REDUCING = ("groups that are split", "groups across parts", "one key/value head")


def modes_of(what: str) -> list[str]:
    """The modes that an operator is tried in."""
    return [mode for mode in sharded.TYPES if mode in ATTENTION_MODES or not what.endswith("fmha")]


#: A process tries some modes of an operator: starting it takes as long as a mode, and one device's results serve all.
RUNS = [(what, tuple(modes_of(what)[i : i + 3])) for what in OPERATORS for i in range(0, len(modes_of(what)), 3)]


@pytest.mark.parametrize(("what", "modes"), [pytest.param(*run, id=f"{run[0]}-{'-'.join(run[1])}") for run in RUNS])
def test_batch_and_heads_stay_split(what: str, modes: tuple[str, ...]) -> None:
    """Forward pass, gradients, logsumexp's gradient, vmap, remat and scan."""
    output = output_of(run_python(PROGRAM, what, *modes, devices=8, timeout=600))
    rows = list(map(json.loads, output.splitlines()))
    assert {each["mode"] for each in rows} == set(modes)
    for mode in modes:
        check(mode, what, {each["split"]: each for each in rows if each["mode"] == mode})


def check(mode: str, what: str, found: dict[str, dict[str, Any]]) -> None:
    """Check what was found of the splits of a mode."""
    assert list(found) == sharded.splits_of(mode, what), mode
    for name, each in found.items():
        split = sharded.SPLITS[name]
        allowed = {"all-reduce"} if name in REDUCING and what != "merge" else set()
        assert set(each["collectives"]) <= allowed, (mode, name, each["collectives"])
        for kind, results in each["results"].items():
            for position, result in enumerate(results):
                is_bitwise = kind in ("forward", "scan") and what.startswith("cpu")
                assert result["distance"] <= (0 if is_bitwise else 2e-5), (mode, name, kind, result)
                of_key = kind in sharded.GRADIENTS and position > 0
                if of_key and what == "merge":
                    continue  # zeros: only the query is merged
                assert result["shard"] == shard_of(split, result["shape"], kind == "vmap", of_key), (mode, name, kind)


def shard_of(split: sharded.Split, shape: list[int], is_mapped: bool, of_key: bool) -> list[int]:
    """What a device has of a result."""

    def parts(axes: object) -> int:
        sizes = {"x": 4, "y": 2}
        product = 1
        for name in axes if isinstance(axes, tuple) else (axes,):
            product *= sizes.get(name, 1)
        return product

    shard = list(shape)
    shard[int(is_mapped)] //= parts(split.batch)
    shard[int(is_mapped) + 2] //= parts(split.heads_kv_axes if of_key else split.heads)
    return shard
