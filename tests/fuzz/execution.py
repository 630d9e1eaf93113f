"""Run several fuzzed problems in one compiled program. Its result buffers are initialized with NaN."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from natten_jax import backends
from natten_jax.arrays.biases import per_head_key_bias
from natten_jax.arrays.operands import Cotangents, Operands
from natten_jax.arrays.operands import Inputs as InputArrays
from natten_jax.ops.canonicalize import LogitTerms, with_biases
from natten_jax.performance import Performance
from natten_jax.problem import Problem
from tests.support import oracle
from tests.support.plans import plans_of
from tests.support.problems import QUICK_COMPILATION

from .accuracy import excesses, expectation
from .problem import Fuzzed
from .spoiled import Inputs

Results = tuple[tuple[jax.Array, jax.Array], oracle.Tensors]


def find_errors(problems: Sequence[Fuzzed]) -> list[list[str]]:
    """Run the problems in one compiled program, and return a list of errors per problem.

    Raises:
        Exception: The exception of a run that left the device unable to compute. All later runs in this process would
            also fail.
    """
    try:
        results, spoiled = run_both(problems)
    except Exception as error:
        if not device_computes():
            raise
        if len(problems) == 1:
            return [[f"{type(error).__name__}: {error}"]]
        alone = [find_errors([problem])[0] for problem in problems]
        if not any(alone):
            alone[0] = [f"fails in one program with {len(problems) - 1} others, but not alone: {error}"]
        return alone
    different = {inputs_of(problem): problem for problem in problems if problem.is_compared_with_oracle}
    expected = {inputs: expectation(problem) for inputs, problem in different.items()}
    return [
        [str(excess) for excess in excesses(problem, expected[inputs_of(problem)], *result)]
        if problem.is_compared_with_oracle
        else find_leaks(problem, result, with_spoiled)
        for problem, result, with_spoiled in zip(problems, results, spoiled, strict=True)
    ]


def find_leaks(problem: Fuzzed, result: Any, spoiled: Any) -> list[str]:
    """List the errors in the results of a run with spoiled inputs.

    Args:
        problem: The problem.
        result: Results of a run with ordinary numbers instead of the spoiled numbers.
        spoiled: Results of the run with the spoiled numbers.
    """
    assert problem.spoiled is not None
    return problem.spoiled.find_errors(
        problem.inputs()[0],
        problem.broken_rows(),
        result,
        spoiled,
        is_reproducible=problem.is_reproducible,
        has_columns=problem.has_columns,
    )


def device_computes() -> bool:
    """Return True if the device still computes. After an illegal memory access, all CUDA calls of the process fail."""
    try:
        return int(jax.jit(lambda number: number + 1)(1)) == 2
    except Exception:
        return False


def run(problems: Sequence[Fuzzed]) -> list[Results]:
    """Run both passes of each problem, and return the results as NumPy arrays."""
    return run_both(problems)[0]


def run_both(problems: Sequence[Fuzzed]) -> tuple[list[Results], list[Results]]:
    """Run both passes of each problem with :meth:`Fuzzed.inputs`, and then with :meth:`Fuzzed.spoiled_inputs`.

    Returns the results of both runs as NumPy arrays. If the oracle can check all problems, there is only one run, and
    its results are returned twice. Buffers of NaN are donated for the results: an element that no kernel writes remains
    NaN, and is detected.
    """
    is_double = any(problem.dtype == "float64" for problem in problems)
    with jax.enable_x64(is_double):
        arguments = _arguments(problems, Fuzzed.inputs)
        functions = [both_passes(problem) for problem in problems]

        def program(arguments: Any) -> list[Results]:
            return [function(*each) for function, each in zip(functions, arguments, strict=True)]

        jaxpr, types = jax.make_jaxpr(program, return_shape=True)(arguments)
        poisoned = jax.jit(
            lambda arrays, _: jaxpr_as_fun(jaxpr)(*arrays),
            donate_argnums=1,
            keep_unused=True,
            compiler_options=QUICK_COMPILATION,
        )

        def results_of(arguments: Any) -> list[Results]:
            poison = jax.tree.map(not_a_number, types)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
                flat = poisoned(jax.tree.leaves(arguments), jax.tree.leaves(poison))
            found: list[Results] = jax.tree.map(np.asarray, jax.tree.unflatten(jax.tree.structure(types), flat))
            return found

        results = spoiled = results_of(arguments)
        if not all(problem.is_compared_with_oracle for problem in problems):
            spoiled = results_of(_arguments(problems, Fuzzed.spoiled_inputs))
        jax.clear_caches()
        return results, spoiled


def _arguments(problems: Sequence[Fuzzed], inputs: Callable[[Fuzzed], Inputs]) -> list[Any]:
    """Copy inputs and origins of each problem to the device. Problems with equal inputs share the arrays."""
    shared: dict[Any, Any] = {}
    for problem in problems:
        if inputs_of(problem) not in shared:
            shared[inputs_of(problem)] = jax.tree.map(jax.device_put, (inputs(problem), problem.origins()))
    return [shared[inputs_of(problem)] for problem in problems]


def not_a_number(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return an array full of NaN."""
    # JAX does not copy an aligned NumPy array, and then cannot donate its memory. It copies an unaligned array.
    unaligned = np.full(math.prod(like.shape) + 1, np.nan, like.dtype)[1:]
    return jax.device_put(unaligned.reshape(like.shape))


def inputs_of(problem: Fuzzed) -> tuple[Any, ...]:
    """Return the fields that determine the inputs of a problem. All variants of a problem have equal fields."""
    return (
        problem.case, problem.dtype, problem.seed, problem.query_factor, problem.value_factor,
        problem.queries, problem.keys, problem.spoiled, problem.factors, problem.copies,
    )  # fmt: skip


def both_passes(problem: Fuzzed) -> Callable[..., Results]:
    """Return a function that runs both passes. Its arguments are ``Fuzzed.inputs()`` and ``Fuzzed.origins()``."""
    return functools.partial(_direct if problem.is_direct else _public, problem)


def _public(problem: Fuzzed, inputs: tuple[oracle.Tensors, Any], origins: None) -> Results:
    operands, cotangents = inputs
    if problem.is_float8:
        outputs = problem.case.operator(problem.backend, **problem.arguments())(operands)
        return outputs, oracle.Tensors(*[None] * len(operands))
    outputs, pullback = jax.vjp(problem.case.operator(problem.backend, **problem.arguments()), operands)
    return outputs, pullback(cotangents)[0]


def _direct(problem: Fuzzed, inputs: tuple[oracle.Tensors, Any], origins: jax.Array | None) -> Results:
    tensors, cotangents = inputs
    factors = tensors.scale
    if factors is not None:
        tensors = tensors._replace(scale=jnp.broadcast_to(factors, (problem.batch, problem.case.heads)))
    described = problem.description()

    def with_terms(*terms: jax.Array | None) -> tuple[Problem, InputArrays]:
        found, arrays = with_biases(described, InputArrays(*tensors[:6]), LogitTerms(None, *terms))
        arrays = arrays._replace(relative_bias=per_entry(arrays.relative_bias))
        return found, arrays if takes_shared else per_head_key_bias(arrays)

    def per_entry(shared: jax.Array | None) -> jax.Array | None:
        """Repeat an operand for each batch entry, as ``jax.vmap`` does, if the problem's seed is a multiple of 4."""
        if shared is None or problem.seed % 4 != 0:
            return shared
        return jnp.broadcast_to(shared, (problem.batch, *shared.shape[1:]))

    takes_shared = "shared_key_bias" in backends.find(problem.backend, problem.operator).capabilities.features
    terms = tensors.relative_bias, tensors.key_bias
    described, arrays = with_terms(*terms)
    _, term_gradients = jax.vjp(lambda *terms: with_terms(*terms)[1][6:9], *terms)
    backend, plans = plans_of(problem.backend, described, Performance(**problem.tiles))
    sinks = tensors.sinks
    if sinks is not None:
        arrays = arrays._replace(sinks=per_entry(sinks[None, :, None]))
    operands = Operands(arrays, None if origins is None else jnp.asarray(origins))
    saved = backend.forward(plans["forward"], operands, saves=True)
    gradients = backend.backward(plans["backward"], operands, saved, Cotangents(*cotangents))
    if factors is not None and gradients.scale is not None:
        gradients = gradients._replace(scale=gradients.scale.sum(axis=tuple(range(2 - factors.ndim))))
    sink_gradient = None if gradients.sinks is None else gradients.sinks.sum(axis=(0, 2))
    found = oracle.Tensors(*gradients[:6], *term_gradients(gradients[6:9]))._replace(sinks=sink_gradient)
    return (saved.out, saved.logsumexp), found
