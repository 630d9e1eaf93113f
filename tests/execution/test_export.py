"""``jax.export`` of the operators: serialized programs, symbolic batch sizes, and calls in other processes."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest

import natten_jax
from natten_jax import backends
from natten_jax.arrays.operands import Cotangents, Inputs, Operands
from natten_jax.backends.base import Backend
from natten_jax.backends.pallas.blackwell import missing_in_jax
from natten_jax.ops.canonicalize import attention_problem, neighborhood_problem
from natten_jax.performance import Performance
from natten_jax.plan.devices import Device
from natten_jax.windows import WindowArguments
from tests.execution.test_transforms import assert_close
from tests.support import oracle
from tests.support.families import Family
from tests.support.plans import plans_of
from tests.support.problems import Case, quick
from tests.support.programs import output_of, run_python

pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")

export = functools.partial(jax.export.export, disabled_checks=natten_jax.EXPORT_CHECKS)


def with_gradients(case: Case, backend: str | None) -> Any:
    """Return a function that computes the output, the logsumexp, and the gradients for all operands."""
    function = case.operator(backend)

    def run(operands: oracle.Tensors) -> Any:
        results, pullback = jax.vjp(function, operands)
        return results, pullback(jax.tree.map(jnp.cos, results))[0]

    return run


def with_any_batch(operands: oracle.Tensors) -> oracle.Tensors:
    """Return the shapes and element types of the operands. The batch size in the shapes is symbolic."""
    (batch,) = jax.export.symbolic_shape("batch")
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct((batch, *array.shape[1:]), array.dtype), operands)


# Serialisation ------------------------------------------------------------------------------------------------------


def test_export_survives_serialisation(family: Family) -> None:
    case = Case((12,), (5,), head_dim=8)
    operands = case.operands(family.dtype, 0)
    run = with_gradients(case, family.fna)
    exported = export(jax.jit(lambda *arrays: jax.tree.leaves(run(oracle.Tensors(*arrays)))))(*operands[:3])
    restored = jax.export.deserialize(exported.serialize())
    assert_close(restored.call(*operands[:3]), jax.jit(run)(operands))


def test_export_for_several_platforms_chooses_a_backend_for_each() -> None:
    case = Case((12,), (5,), head_dim=8)
    operands = case.operands("float32", 0)
    exported = export(jax.jit(case.operator()), platforms=["cpu", "cuda", "tpu"])(operands)
    assert set(exported.platforms) == {"cpu", "cuda", "tpu"}
    assert_close(exported.call(operands), jax.jit(case.operator())(operands))


# Any batch size -----------------------------------------------------------------------------------------------------

CASES = {
    "1d": Case((11,), (4,), stride=(3,), dilation=(2,), is_causal=(True,), heads=4, heads_kv=2, head_dim_v=16),
    "2d": Case((5, 6), (3, 4), stride=(1, 2), heads=2, additional=3, fused=True),
    "3d": Case((2, 3, 4), (2, 3, 3)),
    "merged": Case((9,), (4,), additional=3),
    "attention": Case((9,), queries=7, heads=4, heads_kv=2),
}


@pytest.mark.parametrize("name", CASES)
def test_one_program_for_every_batch_size(family: Family, name: str) -> None:
    case = CASES[name].fitted(family)
    run = with_gradients(case, family.fmha if case.queries is not None else family.fna)
    exported = export(quick(run))(with_any_batch(case.operands(family.dtype, 0)))
    stacked = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *(case.operands(family.dtype, i) for i in range(3)))
    assert_close(quick(exported.call)(stacked), quick(run)(stacked))


def test_a_mapped_axis_may_be_symbolic(family: Family) -> None:
    case = Case((9,), (3,), heads=2)
    function = jax.vmap(case.operator(family.fna))
    operands = jax.tree.map(lambda array: jnp.stack([array] * 3), case.operands(family.dtype, 0))
    exported = export(quick(function))(with_any_batch(operands))
    assert_close(exported.call(operands), quick(function)(operands))


@pytest.mark.parametrize("backend", backends.registered(), ids=lambda backend: backend.family)
@pytest.mark.parametrize("operator", ["fna", "fmha"])
def test_every_backend_plans_without_the_batch_size(backend: Backend, operator: str) -> None:
    """All backends trace both passes for an absent GPU, with a symbolic batch size and every memory preference."""
    if backend.family == "blackwell" and (reason := missing_in_jax()) is not None:
        pytest.skip(reason)
    (batch,) = jax.export.symbolic_shape("batch")
    array: Any = jax.ShapeDtypeStruct((batch, 96, 4, 64), jnp.bfloat16)
    inputs = Inputs(array, array, array)
    problem = (
        attention_problem(*inputs[:3], None, False)
        if operator == "fmha"
        else neighborhood_problem(1, inputs, WindowArguments(7))
    )

    def run(operands: Operands, performance: Performance) -> Any:
        name, device = f"{backend.family}-{operator}", Device("cuda", (9, 0), is_present=False)
        _, plans = plans_of(name, problem, performance, device)
        saved = backend.forward(plans["forward"], operands, saves=True)
        return saved, backend.backward(plans["backward"], operands, saved, Cotangents(*saved[:2]))

    choices = [("default", False)]
    if not backend.capabilities.is_plain_jax:
        choices = [*itertools.product(("default", "strict", "unrestricted"), (False, True))]
    for preference, is_deterministic in choices:
        performance = Performance(memory_usage_preference=preference, backward_deterministic=is_deterministic)
        saved, gradients = jax.eval_shape(functools.partial(run, performance=performance), Operands(inputs))
        assert saved.out.shape == gradients.query.shape == array.shape


# Calling without this package ---------------------------------------------------------------------------------------

CALL = """
import sys
import jax, jax.export, jax.numpy as jnp
exported = jax.export.deserialize(open(sys.argv[1], "rb").read())
arrays = [jnp.ones((2, 9, 2, 8))] * 3
for module in "jax", "natten_jax":
    __import__(module)
    assert ("natten_jax" in sys.modules) == (module == "natten_jax")
    try:
        print("sum", float(jnp.sum(exported.call(*arrays))))
    except jax.errors.JaxRuntimeError as error:
        print(" ".join(str(error).split()))
"""


@pytest.mark.parametrize(
    ("backend", "without_import"),
    [("cpu-fna", "No FFI handler registered for natten_jax_cpu_forward"), ("flex-fna", "sum 288.0")],
)
def test_exported_programs_are_called_elsewhere(backend: str, without_import: str, tmp_path: Path) -> None:
    (batch,) = jax.export.symbolic_shape("batch")
    array = jax.ShapeDtypeStruct((batch, 9, 2, 8), "float32")
    function = jax.jit(lambda query, key, value: natten_jax.na1d(query, key, value, 3, backend=backend))
    path = tmp_path / "program"
    path.write_bytes(export(function, platforms=["cpu"])(array, array, array).serialize())
    before, after = output_of(run_python(CALL, str(path), fresh=True)).splitlines()
    assert without_import in before and after == "sum 288.0"
