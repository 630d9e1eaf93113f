"""``jax.export`` of the operators: programs that outlive the process, for any batch size, and how they are called."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax import backends
from natten_jax.arrays.operands import Cotangents, Inputs, Operands
from natten_jax.backends.base import Backend
from natten_jax.backends.pallas.blackwell import missing_in_jax
from natten_jax.ops.canonicalize import attention_problem, neighborhood_problem
from natten_jax.performance import Performance
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import BackendId
from natten_jax.problem import Problem
from natten_jax.windows import WindowArguments
from tests.support import oracle
from tests.support.families import Family
from tests.support.plans import plans_of
from tests.support.problems import QUICK_COMPILATION, Case, relative_error
from tests.support.programs import run_python

pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")

TOLERANCES = {"float32": 1e-5, "float64": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}
export = functools.partial(jax.export.export, disabled_checks=natten_jax.EXPORT_CHECKS)
quick = functools.partial(jax.jit, compiler_options=QUICK_COMPILATION)


def assert_close(found: Any, expected: Any, dtype: str) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        error = relative_error(np.asarray(one), np.asarray(other).astype(np.float64), np.zeros(1))
        assert error <= TOLERANCES[dtype]


def with_gradients(case: Case, backend: str | None) -> Any:
    """Output, logsumexp and gradients, as a function of operands."""
    function = case.operator(backend)

    def run(operands: oracle.Tensors) -> Any:
        results, pullback = jax.vjp(function, operands)
        return results, pullback(jax.tree.map(jnp.cos, results))[0]

    return run


def with_any_batch(operands: oracle.Tensors) -> oracle.Tensors:
    """The operands' types with a symbolic batch size."""
    (batch,) = jax.export.symbolic_shape("batch")
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct((batch, *array.shape[1:]), array.dtype), operands)


# Serialisation ------------------------------------------------------------------------------------------------------


def test_export_survives_serialisation(family: Family) -> None:
    case = Case((12,), (5,), head_dim=8)
    operands = case.operands(family.dtype, 0)
    run = with_gradients(case, family.fna)
    exported = export(jax.jit(lambda *arrays: jax.tree.leaves(run(oracle.Tensors(*arrays)))))(*operands[:3])
    restored = jax.export.deserialize(exported.serialize())
    assert_close(restored.call(*operands[:3]), jax.jit(run)(operands), family.dtype)


def test_export_for_several_platforms_chooses_a_backend_for_each() -> None:
    case = Case((12,), (5,), head_dim=8)
    operands = case.operands("float32", 0)
    exported = export(jax.jit(case.operator()), platforms=["cpu", "cuda", "tpu"])(operands)
    assert set(exported.platforms) == {"cpu", "cuda", "tpu"}
    assert_close(exported.call(operands), jax.jit(case.operator())(operands), "float32")


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
    assert_close(quick(exported.call)(stacked), quick(run)(stacked), family.dtype)


def test_one_program_is_called_with_several_batch_sizes(family: Family) -> None:
    case = Case((11,), (4,))
    function = case.operator(family.fna)
    exported = export(jax.jit(function))(with_any_batch(case.operands(family.dtype, 0)))
    # What was kept of one program's symbols must not meet another's.
    assert export(jax.jit(function))(with_any_batch(case.operands(family.dtype, 0))).in_avals[0].ndim == 4
    for batch in (1, 2, 70):
        stacked = jax.tree.map(lambda array, n=batch: jnp.concatenate([array] * n), case.operands(family.dtype, 0))
        assert_close(exported.call(stacked), jax.jit(function)(stacked), family.dtype)


def test_a_mapped_axis_may_be_symbolic(family: Family) -> None:
    case = Case((9,), (3,), heads=2)
    function = jax.vmap(case.operator(family.fna))
    operands = jax.tree.map(lambda array: jnp.stack([array] * 3), case.operands(family.dtype, 0))
    exported = export(quick(function))(with_any_batch(operands))
    assert_close(exported.call(operands), quick(function)(operands), family.dtype)


@pytest.mark.parametrize(
    "backend",
    backends.registered(),
    ids=lambda backend: backend.family,
)
@pytest.mark.parametrize("operator", ["fna", "fmha"])
def test_every_backend_plans_without_the_batch_size(backend: Backend, operator: str) -> None:
    """Backends of absent devices, too, are traced, with every way of spending memory."""
    if backend.family == "blackwell" and (reason := missing_in_jax()) is not None:
        pytest.skip(reason)
    (batch,) = jax.export.symbolic_shape("batch")
    shape = (batch, 96, 4, 64)
    array: Any = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    problem = _problem(operator, array)
    device = Device("cuda", (9, 0), is_present=False)

    def run(operands: Operands, performance: Performance) -> Any:
        name = str(BackendId(backend.family, problem.operator))
        _, plans = plans_of(name, problem, performance, device)
        saved = backend.forward(plans["forward"], operands, saves=True)
        return saved, backend.backward(plans["backward"], operands, saved, Cotangents(*saved[:2]))

    operands = Operands(Inputs(array, array, array))
    for preference in ("default",) if backend.capabilities.is_plain_jax else ("default", "strict", "unrestricted"):
        for is_deterministic in (False,) if backend.capabilities.is_plain_jax else (False, True):
            performance = Performance(memory_usage_preference=preference, backward_deterministic=is_deterministic)
            saved, gradients = jax.eval_shape(functools.partial(run, performance=performance), operands)
            assert saved.out.shape == gradients.query.shape == shape


def _problem(operator: str, array: jax.Array) -> Problem:
    if operator == "fmha":
        return attention_problem(array, array, array, None, False)
    return neighborhood_problem(1, Inputs(array, array, array), WindowArguments(7))


# Calling without this package ---------------------------------------------------------------------------------------

CALL = """
import sys
import jax, jax.export, jax.numpy as jnp
exported = jax.export.deserialize(open(sys.argv[1], "rb").read())
arrays = [jnp.ones((2, 9, 2, 8))] * 3
if "import" in sys.argv:
    import natten_jax
try:
    print("sum", float(jnp.sum(exported.call(*arrays))))
except jax.errors.JaxRuntimeError as error:
    print(error)
assert ("natten_jax" in sys.modules) == ("import" in sys.argv)
"""


@pytest.mark.parametrize(("backend", "needs_import"), [("cpu-fna", True), ("flex-fna", False)])
def test_exported_programs_are_called_elsewhere(backend: str, needs_import: bool, tmp_path: Path) -> None:
    (batch,) = jax.export.symbolic_shape("batch")
    array = jax.ShapeDtypeStruct((batch, 9, 2, 8), "float32")
    function = jax.jit(lambda query, key, value: natten_jax.na1d(query, key, value, 3, backend=backend))
    path = tmp_path / "program"
    path.write_bytes(export(function, platforms=["cpu"])(array, array, array).serialize())
    imported = run_python(CALL, str(path), "import", fresh=True)
    assert "sum 288.0" in imported.stdout, imported.stderr
    alone = run_python(CALL, str(path), fresh=True)
    assert alone.returncode == 0, alone.stderr
    expected = "No FFI handler registered for natten_jax_cpu_forward" if needs_import else "sum 288.0"
    assert expected in alone.stdout
