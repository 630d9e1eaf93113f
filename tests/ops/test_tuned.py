"""Malformed files for ``load_tuned``. The error messages contain the path and the name of the invalid field."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import natten_jax

PAIR = {"q_tile_shape": [4, 8], "kv_tile_shape": [8, 4]}
NO_JSON = [b"", b'{"best_configuration": {"backend": "\xff\xfe"}}', b"[" * 200_000, b"[" + b"9" * 10_000 + b"]"]
NO_CONFIGURATION = [b"[]", b"null", b"3", b'"best_configuration"', b'{"rows": []}']
WRONG: list[Any] = [
    # Each row: a configuration, the invalid field, and another part of the message.
    ("cpu-fna", "best_configuration", "'cpu-fna'"),
    ({"scale": 2}, "best_configuration.scale", "unknown"),
    *(
        ({**PAIR, "q_tile_shape": value}, "best_configuration.q_tile_shape", shown)
        for value, shown in ((64, "64"), ([True, 8], "[True, 8]"), ([0, 8], "[0, 8]"), ([2**63, 1], "2**63"))
    ),
    ({"backward_kv_tile_shape": [4]}, "best_configuration.backward_kv_tile_shape", "backward_q_tile_shape"),
    ({**PAIR, "kv_tile_shape": [4]}, "best_configuration.kv_tile_shape", "[4]"),
    *(
        ({"backend": value}, "best_configuration.backend", shown)
        for value, shown in ((3, "3"), ("turbo-fna", "'turbo-fna'"), ("cpu-fmha", "'cpu-fmha'"), (["cpu-fna"], "['cpu"))
    ),
    ({"kernel_schedule": "fast"}, "best_configuration.kernel_schedule", "'fast'"),
    ({"run_persistent_kernel": 1}, "best_configuration.run_persistent_kernel", "1"),
    ({"attention_kwargs": "cpu-fmha"}, "best_configuration.attention_kwargs", "'cpu-fmha'"),
    ({"attention_kwargs": {"backend": "cpu-fna"}}, "best_configuration.attention_kwargs", "backend='cpu-fna'"),
    ({"attention_kwargs": {"q_tile_size": 4}}, "best_configuration.attention_kwargs", "kv_tile_size"),
]


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(ValueError) as caught:
        natten_jax.load_tuned(path)
    assert type(caught.value) is ValueError
    message = str(caught.value)
    assert message.startswith(f"path={os.fspath(path)!r}")
    assert all(part in message for part in parts), message
    assert len(message) < len(os.fspath(path)) + 400


def test_files_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    for content in NO_JSON:
        path.write_bytes(content)
        refused(path, "is not valid JSON")
    for content in NO_CONFIGURATION:
        path.write_bytes(content)
        refused(path, "best_configuration", "does not hold a tuned configuration", "--optimize --json PATH")


@pytest.mark.parametrize(("best", "field", "shown"), WRONG)
def test_malformed_fields(best: Any, field: str, shown: str, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"best_configuration": best}))
    refused(path, field, shown)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, error in ((tmp_path / "missing.json", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error) as caught:
            natten_jax.load_tuned(path)
        assert repr(str(path)) in str(caught.value)
    for wrong in (3, None, b"tuned.json", ["tuned.json"]):
        with pytest.raises(TypeError, match=r"^path must be a str or a path, got"):
            natten_jax.load_tuned(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^path must hold no null character, got 'tuned\\x00.json'"):
        natten_jax.load_tuned("tuned\0.json")


def test_fields_without_a_value_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    best = {**PAIR, "backend": None, "kernel_schedule": None, "run_persistent_kernel": False, "attention_kwargs": None}
    path.write_text(json.dumps({"best_configuration": best, "rows": []}))
    found = natten_jax.load_tuned(str(path))
    assert found == {"q_tile_shape": (4, 8), "kv_tile_shape": (8, 4), "run_persistent_kernel": False}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "q_tile_shape", "kv_tile_shape", "backward_q_tile_shape", "backward_kv_tile_shape", "backend", "kernel_schedule",
    "run_persistent_kernel", "attention_kwargs",
]  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(FIELDS), JSON | st.lists(st.integers(1, 8), max_size=3), max_size=4))
def test_arbitrary_files_load_or_are_rejected_with_their_path(tmp_path: Path, best: dict[str, Any]) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"best_configuration": best}))
    try:
        found = natten_jax.load_tuned(path)
    except ValueError as error:
        assert str(error).startswith(f"path={str(path)!r}")
        assert "best_configuration" in str(error)
    else:
        assert found.keys() == {name for name, value in best.items() if value is not None}
        assert all(list(found[name]) == best[name] for name in found if name.endswith("shape"))
