"""Malformed calls straight to the custom call targets: every one is an error with a sentence, never a crash.

The calls run in processes of their own, which report before and after each: a crash is the failure of one of them.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax.arrays.boxes import QueryBox
from natten_jax.arrays.operands import Cotangents, Inputs, Operands
from natten_jax.backends.base import Earlier
from natten_jax.backends.ffi import attributes
from natten_jax.native import module as native
from natten_jax.performance import Performance
from natten_jax.plan.devices import Device
from natten_jax.problem import problem_of
from tests.support.ffi_calls import BIASES, PROBLEM_OPERANDS, TARGETS, Call, Target, axis_fields, good_call, run_call
from tests.support.malformed_calls import CASES, DEVICE_ERROR
from tests.support.plans import plans_of
from tests.support.programs import run_python

TARGET_PARAMETERS = [pytest.param(target, id=target.label, marks=target.marks) for target in TARGETS]


#: How many cases share a process: starting one takes as long as some tens of calls.
AT_ONCE = 275


def groups() -> dict[str, tuple[Target, list[str]]]:
    """Cases that run in one process, by name: some of one target."""
    found = {}
    for target in TARGETS:
        names = [name for name, (own, _) in CASES.items() if own is target]
        for start in range(0, len(names), AT_ONCE):
            found[f"{target.label}-{start}"] = target, names[start : start + AT_ONCE]
    return found


GROUPS = groups()


def outcomes(platform: str, names: list[str]) -> dict[str, str]:
    """What each case led to; after a crash or a hang the next process goes on behind it."""
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


def complaint(name: str, outcome: str) -> str | None:
    """What is wrong with the outcome of a case."""
    case = CASES[name][1]
    # An error of the device itself outlives the call that led to it.
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
    complaints = [complaint(name, found[name]) for name in names]
    assert not any(complaints), "\n".join(filter(None, complaints))


def test_every_target_of_the_build_is_tested_here() -> None:
    assert native._module is not None
    known = {target.name for target in TARGETS}
    targets = {name for name in native._module.registrations() if not name.startswith("natten_jax_bench")}
    assert targets <= known, targets - known


def of_operators(call: Call) -> dict[str, Any]:
    """The biases of a call as operators take them; those that it has."""
    table, keys = (call.operands.get(name, np.zeros(0)) for name in BIASES)
    found = {"relative_bias": table[0].reshape(2, 3, 5, 5)} if table.size else {}
    return found | ({"key_bias": np.moveaxis(keys, -1, 1)} if keys.size else {})


def sinks_of(call: Call) -> np.ndarray | None:
    """The sinks of a forward call: most passes have the logit of one beside the scale of its head."""
    sinks = call.operands.get("sinks", call.operands["scales"][..., 1:])
    return sinks[0, :, 0] if sinks.size else None


@pytest.mark.parametrize("has_arrays", [True, False])
@pytest.mark.parametrize("target", TARGET_PARAMETERS)
def test_unchanged_call_runs(target: Target, has_arrays: bool) -> None:
    """Or else the cases would prove nothing."""
    call = good_call(target)
    if target.has_problem and not has_arrays:
        call.operands["origins"] = call.operands["origins"][:0]
        call.operands |= dict.fromkeys({"scales", "sinks"} & call.operands.keys(), np.zeros((0,), np.float32))
        of_sinks = {"dsinks", "sinks_parts"} & call.results.keys()
        call.results |= dict.fromkeys(of_sinks, jax.ShapeDtypeStruct((0,), np.float32))
        call.operands |= dict.fromkeys(set(BIASES) & call.operands.keys(), np.zeros((0,), np.float32))
        of_biases = {f"d{name}" for name in BIASES} & call.results.keys()
        call.results |= dict.fromkeys(of_biases, jax.ShapeDtypeStruct((0,), np.float32))
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
            **of_operators(call),
        )
        tolerance = 1e-5 if target.dtype == np.float32 else 5e-3
        for result, other in zip(results[:2], expected, strict=True):
            np.testing.assert_allclose(result, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.label)
def test_real_calls_are_those_tested_here(target: Target) -> None:
    """As backends trace them, which needs none of their devices."""
    good = good_call(target)
    (expected,) = (
        good_call(each)
        for each in TARGETS
        if each.is_backward
        and (each.backend, each.is_small, each.variant) == (target.backend, target.is_small, target.variant)
    )
    values = {name: array.tolist() for name, array in expected.attributes.items()}
    axes = axis_fields(expected.attributes["axes"])
    problem = problem_of(
        axes["query_extent"],
        axes["kernel_size"],
        axes["stride"],
        axes["dilation"],
        tuple(end == 1 for end in axes["ends"]),
        kv_layout=axes["kv_extent"],
        batch=2,
        heads=2,
        heads_kv=1,
        head_dim=target.head_dims[0],
        head_dim_v=target.head_dims[1],
        additional_kv=3,
        scale=values["scale"],
        dtype=np.dtype(target.dtype).name,
    )
    problem = dataclasses.replace(problem, relative_bias=target.has_biases, key_bias=target.has_key_bias)
    q_tile, kv_tile = (tuple(values[name]) for name in ("q_tile_shape", "kv_tile_shape"))
    # With small windows, queries have the tiles that keys have in the backward pass.
    of_queries, of_keys = (kv_tile, q_tile) if target.is_small else (q_tile, kv_tile)
    performance = Performance(
        q_tile_shape=of_queries,
        kv_tile_shape=of_keys,
        backward_q_tile_shape=q_tile,
        backward_kv_tile_shape=kv_tile,
        backward_deterministic=True,
    )
    gpu = Device("cuda", (9, 0), is_present=False)
    backend, plans = plans_of(target.backend, problem, performance, None if "cpu" in target.backend else gpu)

    def both_passes(operands: Operands) -> Any:
        saved = backend.forward(plans["forward"], operands, saves=True)
        if target.replaces:
            seeing = QueryBox(jnp.zeros(3, jnp.int32), good.operands["query"].shape[1:4])
            assert backend.form(plans["forward"]).continues
            saved = backend.forward(plans["forward"], operands, saves=True, earlier=Earlier(saved, seeing))
        return backend.backward(plans["backward"], operands, saved, Cotangents(*saved[:2]))

    *inputs, origins, _ = (expected.operands[name] for name in PROBLEM_OPERANDS)
    operands = Operands(Inputs(*inputs), origins)
    if target.has_biases:
        operands = operands._replace(inputs=operands.inputs._replace(relative_bias=expected.operands["relative_bias"]))
    if target.has_key_bias:
        keys = expected.operands["key_bias"][..., None]
        operands = operands._replace(inputs=operands.inputs._replace(key_bias=keys))
    if "sinks" in expected.operands:
        operands = operands._replace(inputs=operands.inputs._replace(sinks=expected.operands["sinks"]))
    if target.has_problem:
        good.operands["scales"] = np.zeros((0,), np.float32)
    (call,) = (
        equation
        for equation in jax.make_jaxpr(both_passes)(operands).jaxpr.eqns
        if equation.params.get("target_name") == target.name
    )

    def types(arrays: Any) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        return [(array.shape, np.dtype(array.dtype)) for array in arrays]

    assert types(variable.aval for variable in call.invars) == types(good.operands.values())
    assert types(variable.aval for variable in call.outvars) == types(good.results.values())
    assert dict(call.params["attributes"]).keys() == good.attributes.keys()
    assert attributes(plans["backward"])["axes"] == tuple(values["axes"])
