"""The package agrees with the records, except for the entries that were recorded later."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.guard import exported, lowered, record, results
from tests.guard.calls import Call, windows

#: Programs of one test.
PROGRAMS = 40
NAMES = list(lowered.programs())


def test_public_names_and_flags_have_the_recorded_signatures() -> None:
    assert record.differences("signatures") == {}


@pytest.mark.parametrize("first", range(0, len(NAMES), PROGRAMS))
def test_programs_have_the_recorded_custom_calls(first: int) -> None:
    recorded, found = record.load("lowered"), lowered.take(NAMES[first : first + PROGRAMS])
    for name, lines in found.items():
        assert lowered.required_targets(name) <= {line.split("(")[0] for line in lines}, name
        assert lines == recorded[name], name


def test_every_recorded_program_is_lowered() -> None:
    assert set(NAMES) == set(record.load("lowered"))
    assert all(sum(name.startswith(gpu) for name in NAMES) >= 20 for gpu in lowered.GPUS)


@pytest.mark.parametrize("name", exported.PROGRAMS)
def test_exported_programs_run_and_agree(name: str) -> None:
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    assert exported.disagreements(name, record.load("exported")[name]) == []


@pytest.mark.parametrize("first", range(0, results.PROBLEMS, 50))
def test_random_problems_have_the_recorded_results(first: int) -> None:
    numbers = range(first, first + 50)
    recorded, found = record.load("results"), results.take(numbers)
    assert found.keys() == {name for name in recorded if int(name[:3]) in numbers}
    for name, array in found.items():
        assert results.difference(recorded[name], array, results.problem(int(name[:3])).dtype) is None, name


def test_entries_recorded_later_have_reasons() -> None:
    reasons = json.loads(record.LATER.read_text(encoding="utf-8"))
    assert all(name.split(":")[0] in record.KINDS and why for name, why in reasons.items())


def test_exchanged_operands_differ() -> None:
    call = Call("na2d", windows((48, 48), head_dim=64), {"kernel_size": (24, 24)}, "bfloat16")
    exchanged = lowered.Case(call, {"sm_80": "sm80"})
    with lowered.fake_gpu("sm_80"):
        (expected,) = lowered.lines_of(exchanged, call.run)
        (found,) = lowered.lines_of(exchanged, lambda x: call.run({**x, "key": x["value"], "value": x["key"]}))
    assert expected != found


def test_small_errors_of_results_are_found() -> None:
    recorded = np.linspace(-1, 1, 100, dtype=np.float32)
    assert results.difference(recorded, recorded, "float32") is None
    assert results.difference(recorded, recorded * np.float32(1.0001), "float32") is not None
    assert results.difference(recorded, np.where(recorded == 1, np.nan, recorded), "bfloat16") is not None
