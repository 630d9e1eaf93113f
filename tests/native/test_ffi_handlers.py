"""Malformed direct calls of the custom call targets must raise errors with messages, and must not crash the process.

The calls run in separate processes. A process prints a line before and after each call. If a call crashes its process,
only this call fails, because a new process runs the remaining calls.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax.native import module as native
from tests.support.ffi_calls import BIASES, PROBLEM_OPERANDS, TARGETS, Call, Target, good_call, run_call
from tests.support.malformed_calls import CASES, DEVICE_ERROR
from tests.support.programs import run_python

TARGET_PARAMETERS = [pytest.param(target, id=target.label, marks=target.marks) for target in TARGETS]


#: Maximum number of cases per process. It is large, because starting a process takes as long as tens of calls.
AT_ONCE = 275


def groups() -> dict[str, tuple[Target, list[str]]]:
    """Return groups of cases by name. A group is a target and the names of the cases that one process runs."""
    found = {}
    for target in TARGETS:
        names = [name for name, (own, _) in CASES.items() if own is target]
        for start in range(0, len(names), AT_ONCE):
            found[f"{target.label}-{start}"] = target, names[start : start + AT_ONCE]
    return found


GROUPS = groups()


def outcomes(platform: str, names: list[str]) -> dict[str, str]:
    """Return the outcome of each case. After a crash or a hang, a new process continues with the next case."""
    found: dict[str, str] = {}
    remaining = names
    environment = {"JAX_PLATFORMS": platform, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    while remaining:
        program = f"from tests.support import malformed_calls; malformed_calls.main({remaining!r})"
        try:
            result = run_python(program, timeout=240, environment=environment, fresh=platform != "cpu")
            output, ending = result.stdout, f"crashed with status {result.returncode}: {result.stderr[-2000:]}"
        except subprocess.TimeoutExpired as error:
            output, ending = (error.stdout or b"").decode(), "did not end"
        for line in output.splitlines():
            name, outcome = json.loads(line)
            found[name] = ending if outcome is None else outcome
        assert output, ending
        remaining = [name for name in remaining if name not in found]
    return found


def mismatch(name: str, outcome: str) -> str | None:
    """Return an error message if the outcome of a case is wrong."""
    case = CASES[name][1]
    # A GPU error is a failure: it persists, and would make all later calls of the process fail.
    if outcome.startswith(("crashed", "did not end")) or DEVICE_ERROR in outcome:
        return f"{name} {outcome}"
    if case.message is None:
        return None
    if outcome == "ran":
        return f"{name} was accepted"
    missing = [part for part in case.message if part not in outcome]
    return f"{name} does not say {missing}: {outcome}" if missing else None


@pytest.mark.parametrize("group", [pytest.param(name, marks=target.marks) for name, (target, _) in GROUPS.items()])
def test_malformed_calls(group: str) -> None:
    target, names = GROUPS[group]
    found = outcomes(target.platform, names)
    mismatches = [mismatch(name, found[name]) for name in names]
    assert not any(mismatches), "\n".join(filter(None, mismatches))


def test_every_target_of_the_build_is_tested_here() -> None:
    assert native._module is not None
    known = {target.name for target in TARGETS}
    targets = {name for name in native._module.registrations() if not name.startswith("natten_jax_bench")}
    assert targets <= known, targets - known


def operator_attributes(call: Call) -> dict[str, Any]:
    """Return the biases of a call as keyword arguments of an operator, without absent biases."""
    table, keys = (call.operands.get(name, np.zeros(0)) for name in BIASES)
    found = {"relative_bias": table[0].reshape(2, 3, 5, 5)} if table.size else {}
    return found | ({"key_bias": np.moveaxis(keys, -1, 1)} if keys.size else {})


def sinks_of(call: Call) -> np.ndarray | None:
    """Return the sinks of a forward call, or ``None``. Most targets take sinks as a part of the array ``scales``."""
    sinks = call.operands.get("sinks", call.operands["scales"][..., 1:])
    return sinks[0, :, 0] if sinks.size else None


@pytest.mark.parametrize("has_arrays", [True, False])
@pytest.mark.parametrize("target", TARGET_PARAMETERS)
def test_unchanged_call_runs(target: Target, has_arrays: bool) -> None:
    """A valid call succeeds. Each malformed call is a valid call with one change, so the change causes its error."""
    call = good_call(target)
    if target.has_problem and not has_arrays:
        call.operands["origins"] = call.operands["origins"][:0]
        call.operands |= dict.fromkeys({"scales", "sinks"} & call.operands.keys(), np.zeros((0,), np.float32))
        sink_results = {"dsinks", "sinks_parts"} & call.results.keys()
        call.results |= dict.fromkeys(sink_results, jax.ShapeDtypeStruct((0,), np.float32))
        call.operands |= dict.fromkeys(set(BIASES) & call.operands.keys(), np.zeros((0,), np.float32))
        bias_results = {f"d{name}" for name in BIASES} & call.results.keys()
        call.results |= dict.fromkeys(bias_results, jax.ShapeDtypeStruct((0,), np.float32))
    elif target.has_problem and call.operands["scales"].size:
        call.attributes["scale"] = np.float32(7)  # unused
    results = [
        result for name, result in zip(call.results, run_call(target, call), strict=True) if name not in target.scratch
    ]
    assert all(np.isfinite(result).all() for result in results)
    if "out" in target.results:
        query, key, value, keys, values = (
            jnp.asarray(call.operands[name], jnp.float32) for name in PROBLEM_OPERANDS[:5]
        )
        sinks = sinks_of(call)
        expected = natten_jax.na3d(
            *(query, key, value, (2, 3, 3), (1, 2, 3), (2, 1, 2), (False, True, False), 0.3, keys, values),
            backend="flex-fna",
            return_lse=True,
            sinks=None if sinks is None else jnp.asarray(sinks),
            **operator_attributes(call),
        )
        tolerance = 1e-5 if target.dtype == np.float32 else 5e-3
        for result, other in zip(results[:2], expected, strict=True):
            np.testing.assert_allclose(result, other, rtol=tolerance, atol=tolerance)
