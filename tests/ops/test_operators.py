"""Compare every backend with the oracle: outputs, logsumexp and all gradients of every feature."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax.arrays.operands import Inputs, Operands
from natten_jax.execution import custom_vjp
from natten_jax.native import module as native
from natten_jax.ops.canonicalize import neighborhood_problem
from natten_jax.plan.devices import default_device
from natten_jax.plan.plan import Request
from natten_jax.problem import Problem
from natten_jax.windows import WindowArguments
from tests.support import oracle
from tests.support.cases import attention_cases, feature_cases, random_case, random_tiles
from tests.support.families import FAMILIES, Family, tile_pair
from tests.support.problems import (
    BOUNDS,
    Case,
    Trial,
    check,
    check_all,
    check_gradients_repeat,
    element_types,
    errors,
    relative_error,
    value_and_gradients,
)

FEATURES = feature_cases()

ATTENTION = attention_cases()


@pytest.mark.parametrize("name", FEATURES)
def test_feature(family: Family, name: str) -> None:
    check(FEATURES[name], family, family.dtype)


def random_trial(family: Family, dtype: str, seed: int) -> Trial:
    case = random_case(seed)
    with element_types(dtype):
        return Trial(case, dtype, seed, random_tiles(case, family, dtype, seed))


def test_random_problems(family: Family, problem_indices: range) -> None:
    check_all([random_trial(family, family.dtype, index) for index in problem_indices], family)


def test_random_problems_in_other_element_types(family: Family, other_problem_indices: range) -> None:
    others = family.dtypes[1:]
    trials = [random_trial(family, others[i % len(others)], 100_000 + i) for i in other_problem_indices]
    check_all(trials, family)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(family: Family, name: str) -> None:
    check(ATTENTION[name], family, family.dtype)


def test_attention_in_other_element_types(family: Family, other_dtype: str) -> None:
    check(ATTENTION["mqa-causal"], family, other_dtype)


def test_output_equals_the_first_result_with_return_lse(family: Family) -> None:
    case = FEATURES["stride"]
    query, key, value, *_ = case.operands(family.dtype, 0)
    call = functools.partial(natten_jax.na1d, query, key, value, 9, 4, backend=family.fna)
    out, first = (np.asarray(a, np.float32) for a in (call(), call(return_lse=True)[0]))
    np.testing.assert_array_equal(out, first)


#: Error bounds of merged outputs, by element type. Outputs of 16 bits are rounded twice, before and after the merge,
#: and so are their cotangents.
MERGED = {dtype: bound if dtype == "float32" else 2 * bound for dtype, bound in BOUNDS.items()}

# Windows of the layout's size run as attention ----------------------------------------------------------------------
WHOLE_LAYOUT = {
    "1d": Case((21,), (21,), stride=(4,), batch=2, heads=2),
    "1d-causal": Case((21,), (21,), stride=(5,), is_causal=(True,)),
    "2d": Case((4, 6), (4, 6), stride=(2, 6), heads=4, heads_kv=2),
    "3d": Case((2, 3, 4), (2, 3, 4), head_dim_v=12),
    "2d-additional": Case((4, 6), (4, 6), additional=5),
    "1d-scale-zero": Case((9,), (9,), scale=0.0),
}


@pytest.mark.parametrize("name", WHOLE_LAYOUT)
def test_whole_layout_runs_as_attention(family: Family, name: str) -> None:
    case = WHOLE_LAYOUT[name].fitted(family)
    check(case, family, family.dtype)
    text = lowered(case.operator(family.fna), case, family.dtype)
    assert "attention" in text and f"{family.fmha}" in text
    assert family.fna not in text


@pytest.mark.parametrize("case", [Case((5, 4), (5, 4)), Case((20,), (7,), additional=4)], ids=["whole", "additional"])
def test_attention_arguments_override_the_operator(family: Family, case: Case) -> None:
    for other in FAMILIES:
        if family.dtype not in other.dtypes or not other.runs_on(default_device()):
            continue
        if other.target is not None and native.path() is None:
            continue  # this build has no kernels
        text = lowered(case.operator(family.fna, attention_kwargs={"backend": other.fmha}), case, family.dtype)
        assert other.fmha in text
        assert other is family or family.fmha not in text


def test_additional_tokens_are_fused_unless_their_attention_has_arguments(native_family: Family) -> None:
    case = Case((20,), (7,), additional=8, head_dim=native_family.head_dim_step)
    query, key, value, keys, values = case.operands(native_family.dtype, 0)[:5]

    def calls(**arguments: Any) -> int:
        operator = functools.partial(natten_jax.na1d, kernel_size=7, backend=native_family.fna, **arguments)
        text = jax.jit(operator).lower(query, key, value, additional_keys=keys, additional_values=values).as_text()
        return text.count(f"@{native_family.target}_forward(")

    assert calls() == 1
    assert calls(try_fuse_additional_kv=False) == 2
    for nothing in ({}, {"torch_compile": False}, {"is_causal": False}):
        assert calls(attention_kwargs=nothing) == 1
    own = {"backend": native_family.fmha}
    assert calls(attention_kwargs=own) == 2
    assert calls(attention_kwargs=own, try_fuse_additional_kv=True) == 1


def test_tiles_of_a_whole_layout_reach_attention(family: Family) -> None:
    configs = family.query("fmha", "forward")(jnp.ones((1, 64, 1, 8), family.dtype))
    q_tile, kv_tile = tile_pair(configs[-1])
    case = Case((64,), (64,))
    check(case, family, family.dtype, q_tile_shape=(q_tile,), kv_tile_shape=(kv_tile,))


# Backend choice -----------------------------------------------------------------------------------------------------
def lowered(function: Callable[..., Any], case: Case, dtype: str) -> str:
    """Return the text of a lowered forward call."""
    return jax.jit(function).lower(case.operands(dtype, 0)).as_text()


@pytest.mark.parametrize(("dtype", "name"), [("float32", "cpu"), ("bfloat16", "cpu"), ("float64", "flex")])
@pytest.mark.parametrize("case", [Case((20,), (5,)), Case((20,), queries=10)], ids=["fna", "fmha"])
def test_default_backend_is_the_first_that_runs_the_problem(case: Case, dtype: str, name: str) -> None:
    with element_types(dtype):
        text = lowered(case.operator(), case, dtype)
    families = {family.name: family for family in FAMILIES}
    target = families["cpu"].target
    assert target is not None
    assert (f"{target}_forward" in text) == (name == "cpu")


def test_named_backend_is_the_one_that_runs(family: Family) -> None:
    case = Case((20,), (5,))
    text = lowered(case.operator(family.fna), case, family.dtype)
    for other in FAMILIES:
        if other.target is not None:
            assert (f"{other.target}_forward" in text) == (other is family)


# Parts of a larger layout -------------------------------------------------------------------------------------------
def part_problems() -> dict[str, tuple[Case, tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]]:
    """Return problems and, for each dimension, a range of queries and a range of keys.

    The keys include all keys that the queries see.
    """
    return {
        "middle": (Case((40,), (7,), heads=2), ((10, 25),), ((7, 28),)),
        "last": (Case((40,), (8,), stride=(4,)), ((28, 40),), ((20, 40),)),
        "causal": (Case((40,), (9,), stride=(2,), is_causal=(True,)), ((16, 30),), ((8, 30),)),
        "dilation-not-divisible": (Case((50,), (5,), dilation=(4,)), ((24, 50),), ((12, 50),)),
        "2d": (Case((12, 20), (3, 6), batch=2, heads=4, heads_kv=2), ((4, 8), (10, 20)), ((2, 10), (6, 20))),
        "3d-dilated": (
            Case((4, 9, 16), (2, 3, 3), stride=(1, 2, 1), dilation=(2, 1, 2), is_causal=(True, False, False)),
            ((0, 4), (4, 6), (8, 14)),
            ((0, 4), (2, 8), (4, 16)),
        ),
        "additional": (Case((30,), (5,), additional=6, fused=True), ((10, 20),), ((8, 22),)),
    }


PARTS = part_problems()


def part_request(case: Case, operands: oracle.Tensors, backend: str | None) -> tuple[Request, Problem]:
    """Return a problem with the whole layout, and its request. Tests compute a part of this problem."""
    problem = neighborhood_problem(
        case.rank, Inputs(*operands[:5]), WindowArguments(**case.window_arguments), case.scale
    )
    return Request(problem, backend=backend), problem


@pytest.mark.parametrize("name", PARTS)
def test_part_of_a_layout_equals_that_part_of_the_whole(family: Family, name: str) -> None:
    """Call an operator with a part of the queries, the keys that they see, and the origins of queries and keys."""
    case, queries, keys = PARTS[name]
    operands = case.operands(family.dtype, 0)
    request, _ = part_request(case, operands, family.fna)
    own = (slice(None), *(slice(*ends) for ends in queries))
    halo = (slice(None), *(slice(*ends) for ends in keys))
    visible = case.mask().reshape(*case.layout, *case.layout)[own[1:]]
    outside = visible.copy()
    outside[(slice(None),) * case.rank + halo[1:]] = False
    assert not outside.any(), "the test's own halo is too small"

    pad = (0,) * (3 - case.rank)
    origins = jnp.asarray([(*pad, *(a for a, _ in queries)), (*pad, *(a for a, _ in keys))], jnp.int32)
    d_out, d_lse = case.cotangents(family.dtype, 0)

    def part(local: oracle.Tensors) -> tuple[Any, Any]:
        out, logsumexp = custom_vjp.attend(request, Operands(Inputs(*local[:6]), origins))
        return out, logsumexp

    local = operands._replace(query=operands.query[own], key=operands.key[halo], value=operands.value[halo])
    outputs, gradients = value_and_gradients(part, local, (d_out[own], d_lse[own]))

    # Results of the whole problem. Cotangents are 0 for queries that are not in this part.
    mine = np.zeros(case.layout, bool)
    mine[own[1:]] = True
    expected = oracle.reference(
        oracle.Tensors(*(a if a is None else np.asarray(a) for a in operands)),
        case.mask(),
        case.actual_scale,
        np.asarray(d_out, np.float64) * mine[..., None, None],
        np.asarray(d_lse) * mine[..., None],
    )
    cut = {"query": own, "key": halo, "value": halo}
    found = {"out": relative_error(outputs[0], expected.forward.out[own], expected.forward_magnitude.out[own])}
    found["lse"] = relative_error(outputs[1], expected.forward.lse[own], expected.forward_magnitude.lse[own])
    for field, gradient in gradients._asdict().items():
        if gradient is not None:
            where = cut.get(field, ...)
            reference = getattr(expected.gradients, field)[where]
            found[field] = relative_error(gradient, reference, getattr(expected.gradient_magnitude, field)[where])
    assert all(error <= BOUNDS[family.dtype] for error in found.values()), found


def test_parts_of_the_keys_merge_to_the_whole(family: Family) -> None:
    """Split the keys into parts, compute attention to each part, and merge the results.

    If a query sees no key of a part, the result for this part is an output of 0 and a logsumexp of -inf. The part then
    does not affect the query's merged output and gradients.
    """
    case = Case((40,), (7,), stride=(2,), heads=2)
    operands = case.operands(family.dtype, 0)
    request, _ = part_request(case, operands, family.fna)

    def merged(operands: oracle.Tensors) -> tuple[Any, Any]:
        results = []
        for start, end in ((0, 12), (12, 25), (25, 40)):
            origins = jnp.asarray([[0, 0, 0], [0, 0, start]], jnp.int32)
            key, value = operands.key[:, start:end], operands.value[:, start:end]
            results.append(custom_vjp.attend(request, Operands(Inputs(operands.query, key, value), origins)))
        return natten_jax.merge_attentions(*zip(*results, strict=True))

    found = value_and_gradients(merged, operands, case.cotangents(family.dtype, 0))
    worst = errors(case, *found, seed=0)
    assert max(worst.values()) <= MERGED[family.dtype], worst


@pytest.mark.parametrize(
    "case",
    [
        Case((700,), (700,)),
        Case((700,), (150,), stride=(5,), dilation=(3,), additional=150, fused=True),
        Case((20, 26), (7, 6), dilation=(2, 1), is_causal=(False, True)),
        Case((8, 10, 12), (4, 3, 5), stride=(2, 1, 1), additional=40, fused=True),
    ],
    ids=["whole", "1d", "2d", "3d"],
)
def test_gradients_are_equal_in_every_run(family: Family, case: Case) -> None:
    width = 64 if family.needs_gpu else 16  # on the CPU, matrix products take most of the time
    case = dataclasses.replace(case, batch=2, heads=4, heads_kv=2, head_dim=width)
    check_gradients_repeat(case, family.fna, dtype=family.dtype, backward_deterministic=True)
