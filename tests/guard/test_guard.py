"""The package agrees with the records, including the entries that were recorded at a later commit."""

from __future__ import annotations

import pytest

from tests.guard import exported, lowered, record, results

#: Number of programs that a test lowers.
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
