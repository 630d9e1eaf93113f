"""Compare results with the oracle's results, within error bounds that hold for inputs of any magnitude."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from natten_jax import backends
from tests.support import oracle
from tests.support.families import BOUNDS, Family, family_named
from tests.support.float8 import factors_for, scaled
from tests.support.problems import LOGIT_OPERANDS, expected_of, lse_dtype

from .problem import PER_ENTRY_OPERANDS, Fuzzed

#: Factor by which ``BOUNDS`` are multiplied. Results of the hundreds of problems in the other tests are within
#: ``BOUNDS``. Among many thousands of problems, some results with few elements exceed ``BOUNDS`` by chance.
SLACK = 2.0
#: An error bound is proportional to the larger of two numbers: the norm of the result, and a fraction of the norm of
#: the summed magnitudes of its terms. The fraction is CANCELLATION_OF_SCALED_INPUTS if the inputs are multiplied by a
#: factor, otherwise at least CANCELLATION. With large logits, most terms of a gradient cancel, but their rounding
#: errors do not, because kernels round the output before they subtract the product of output and cotangent.
CANCELLATION, CANCELLATION_OF_SCALED_INPUTS = 0.05, 0.5
#: This fraction replaces CANCELLATION for half-precision results that are merged from two passes, or from a pass and
#: a sink. Merging rounds outputs and cotangents a second time. With SLACK and the float16 bound, the error bound is
#: half a unit in the last place of every term. Without merging, output elements have independent rounding errors, which
#: average out in wide heads. The fraction is then divided by the square root of the head dimension, but is at least
#: CANCELLATION.
CANCELLATION_OF_HALVES = 0.25
#: Number of roundings of a logit. Each has an error of at most one epsilon times the summed magnitudes of the terms.
LOGIT_ROUNDINGS = 8
SMALLEST_FLOAT16, LARGEST_FLOAT16 = 2.0**-24, 6e4
#: Compilers and kernels flush float32 and bfloat16 numbers with smaller magnitudes to zero.
SMALLEST_FLOAT32 = 2.0**-126
SMALLEST = {"float16": SMALLEST_FLOAT16, "float64": 0.0}
#: Relative errors of matrix units with 8-bit inputs. The first is for a weight in e4m3, the second for a sum.
E4M3_WEIGHT_BOUND, FLOAT8_SUM_BOUND = 2.0**-4, 2.0**-12
#: With per-head scales, kernels multiply float16 query gradients by the scale's magnitude or by this factor, whichever
#: is larger.
SMALLEST_FACTOR = 2.0**-10
#: GPU kernels clip the magnitudes of biases to LARGEST_LOGIT times the scale. Key biases in columns are also clipped.
#: For float16 columns, the limit is LARGEST_LOGIT_OF_FLOAT16_COLUMNS. If a call has columns, the limit of its relative
#: biases is RELATIVE_BIAS_SHARE times the limit of its key biases.
LARGEST_LOGIT, LARGEST_LOGIT_OF_FLOAT16_COLUMNS, RELATIVE_BIAS_SHARE = 1e38, 1e6, 0.2
SMALLEST_SCALE_OF_CLIPPING = 2.0**-10
#: If the magnitude of a bias or sink is LARGE_LOGIT or more, GPU kernels round the weights in backward passes. The
#: relative error of a weight is then at most LARGE_LOGIT_WEIGHT_BOUND.
LARGE_LOGIT, LARGE_LOGIT_WEIGHT_BOUND = 2.0**40, 0.003


#: Names of the results whose element type is the type of the logsumexp or of a logit operand, not the output's type.
LOGIT_NAMES = ("lse", *(f"d_{name}" for name in LOGIT_OPERANDS))


class Excess(NamedTuple):
    """A result that is too far from the oracle's result.

    Attributes:
        name: Name of the result.
        size: Norm of the oracle's result.
        distance: Norm of the difference.
        allowed: Largest allowed norm of the difference.
    """

    name: str
    size: float
    distance: float
    allowed: float

    def __str__(self) -> str:
        return f"{self.name}: off by {self.distance:.3g}, allowed {self.allowed:.3g}, norm {self.size:.3g}"


class Expectation(NamedTuple):
    """The operands of a problem and the oracle's results."""

    operands: oracle.Tensors
    results: oracle.Reference


def expectation(problem: Fuzzed) -> Expectation:
    """Return the operands and the oracle's results for one copy of a problem's batch.

    Problems with equal inputs share the results, even if they are run with different tiles or options.
    """
    operands, cotangents = problem.inputs_of_case()
    operands = _as_columns_of_float16(problem, operands)
    if problem.factors is not None:
        operands = scaled(problem.case, operands, factors_for(problem.factors, problem.case, problem.seed))
    if problem.case.is_padded:
        return Expectation(problem.case.padded_with(0, operands), expected_of(problem.case, operands, cotangents))
    results = oracle.reference(
        operands, problem.mask(), problem.case.actual_scale, *cotangents, entries=problem.entries()
    )
    return Expectation(operands, results)


def excesses(
    problem: Fuzzed, expectation: Expectation, outputs: tuple[Any, Any], gradients: oracle.Tensors
) -> list[Excess]:
    """Return the results that are NaN or too far from the oracle's."""
    operands, expected = expectation
    scale = problem.case.actual_scale if operands.scale is None else operands.scale
    logit_bound = float(np.abs(scale).max()) * _largest_product(operands) + sum(
        _largest(each, oracle.TIED) for each in operands[6:8]
    )
    found = []
    for name, result, reference, magnitude in (
        ("out", outputs[0], expected.forward.out, expected.forward_magnitude.out),
        ("lse", outputs[1], expected.forward.lse, expected.forward_magnitude.lse),
        *(
            (f"d_{name}", *each)
            for name, *each in zip(
                gradients._fields, gradients, expected.gradients, expected.gradient_magnitude, strict=True
            )
            if each[1] is not None and not problem.is_float8
        ),
    ):
        result = np.asarray(result)
        each_once, reference, magnitude = _without_copies(problem, name, result, reference, magnitude)
        excess = _excess(problem, name, each_once, reference, magnitude, logit_bound, operands)
        if excess is not None:
            found.append(excess)
    return found


def _without_copies(
    problem: Fuzzed, name: str, result: np.ndarray, reference: np.ndarray, magnitude: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drop the copies of a batch whose results equal the results of the first copy bitwise.

    Returns the result, reference and magnitude to compare. A result without a batch dimension is a sum over all copies:
    its reference and magnitude are multiplied by the number of copies.
    """
    copies = problem.copies
    if copies == 1:
        return result, reference, magnitude
    if name not in ("out", "lse", *(f"d_{each}" for each in PER_ENTRY_OPERANDS)):
        return result, copies * reference, copies * magnitude
    if result.shape != (copies * reference.shape[0], *reference.shape[1:]):
        return result, reference, magnitude
    by_copy = result.reshape(copies, *reference.shape)
    bits = np.ascontiguousarray(by_copy).reshape(copies, -1).view(np.uint8)
    is_other = [i == 0 or not np.array_equal(bits[i], bits[0]) for i in range(copies)]
    others = by_copy[is_other]
    return others, np.broadcast_to(reference, others.shape), np.broadcast_to(magnitude, others.shape)


def _excess(
    problem: Fuzzed,
    name: str,
    result: np.ndarray,
    reference: np.ndarray,
    magnitude: np.ndarray,
    logit_bound: float,
    operands: oracle.Tensors,
) -> Excess | None:
    if result.shape != reference.shape:
        return Excess(f"{name} of shape {result.shape} instead of {reference.shape}", 0, np.inf, 0)
    logit_operand = getattr(operands, name.removeprefix("d_"), None)
    expected_dtype = lse_dtype(problem.dtype) if logit_operand is None else logit_operand.dtype.name
    if result.dtype.name != (expected_dtype if name in LOGIT_NAMES else problem.out_dtype):
        return Excess(f"{name} of type {result.dtype}", 0, np.inf, 0)
    result = result.astype(np.float64)
    needs_gpu = Family.for_backend(backends.find(problem.backend, problem.operator)).needs_gpu
    if name == "lse" and (needs_gpu or problem.has_columns):
        limit = _largest_logit(problem, operands)
        result, reference = (np.where(np.isfinite(a), np.clip(a, -limit, limit), a) for a in (result, reference))
    comparable = np.isfinite(reference)
    if problem.dtype == "float16" and name != "lse":
        comparable &= np.abs(reference) < LARGEST_FLOAT16
    # An infinite logsumexp must equal the reference. For example, it is -inf for a query without keys.
    is_same = (result == reference) | comparable
    if not is_same.all() and name == "lse":
        return Excess(name, np.inf, np.inf, 0)
    result, reference, magnitude = (np.where(comparable, a, 0) for a in (result, reference, magnitude))
    if problem.query_factor != 1 or problem.value_factor != 1:
        share = CANCELLATION_OF_SCALED_INPUTS
    elif problem.out_dtype in ("float16", "bfloat16"):
        is_rounded_again = problem.is_merged or problem.case.sinks
        elements = 1 if is_rounded_again else problem.case.head_dim_v or problem.case.head_dim
        share = max(CANCELLATION_OF_HALVES / math.sqrt(elements), CANCELLATION)
    else:
        share = CANCELLATION
    size, terms = float(np.linalg.norm(reference)), float(np.linalg.norm(magnitude))
    epsilon = float(np.finfo(np.float64 if problem.dtype == "float64" else np.float32).eps)
    allowed = (
        SLACK * BOUNDS[problem.out_dtype] * max(size, share * terms) + LOGIT_ROUNDINGS * epsilon * logit_bound * terms
    )
    if problem.is_float8 and family_named(problem.family).rounds_weights:
        allowed += FLOAT8_SUM_BOUND * logit_bound * terms
        if name == "out":
            spread = oracle.spread(operands, problem.mask(), problem.case.actual_scale)
            allowed += E4M3_WEIGHT_BOUND * float(np.linalg.norm(spread))
    if needs_gpu and name.startswith("d_") and max(map(_largest, operands[6:])) >= LARGE_LOGIT:
        allowed += SLACK * LARGE_LOGIT_WEIGHT_BOUND * terms
    # In results, weights and gradients, magnitudes below the type's smallest number are flushed to zero.
    largest = max(*map(_largest, operands[:6]), *(_largest(each, oracle.TIED) for each in operands[6:]))
    tokens = max(operands.query[0, ..., 0, 0].size, operands.key[0, ..., 0, 0].size)
    smallest = SMALLEST.get(problem.dtype, SMALLEST_FLOAT32)
    allowed += smallest * result.size**0.5 * (1 + largest * tokens**0.5)
    scales = operands.scale if name == "d_scale" and problem.dtype == "float16" else None
    if scales is not None and np.abs(scales).min() < SMALLEST_FACTOR:
        # The scale's gradient is computed from float16 query gradients that were multiplied by SMALLEST_FACTOR or more.
        allowed += SMALLEST_FLOAT16 / SMALLEST_FACTOR * float(np.linalg.norm(operands.query.astype(np.float64)))
    distance = float(np.linalg.norm(result - reference))
    return None if distance <= allowed else Excess(name, size, distance, float(allowed))


def _largest_logit(problem: Fuzzed, operands: oracle.Tensors) -> float:
    """Return the magnitude to which kernels may clip biases."""
    share = RELATIVE_BIAS_SHARE if problem.has_columns and operands.relative_bias is not None else 1
    if problem.has_columns and problem.dtype == "float16":
        return LARGEST_LOGIT_OF_FLOAT16_COLUMNS * share
    scale = problem.case.actual_scale if operands.scale is None else operands.scale
    return LARGEST_LOGIT * share * float(np.clip(np.abs(scale).min(), SMALLEST_SCALE_OF_CLIPPING, 1))


def _as_columns_of_float16(problem: Fuzzed, operands: oracle.Tensors) -> oracle.Tensors:
    """Clip biases and sinks to the limits of float16 columns, if the call has such columns."""
    if not (problem.has_columns and problem.dtype == "float16"):
        return operands

    def clipped(added: np.ndarray | None, limit: float) -> np.ndarray | None:
        if added is None:
            return None
        is_clipped = np.isfinite(oracle.with_hidden(added)) & (np.abs(added.astype(np.float64)) > limit)
        return np.where(is_clipped, np.sign(added) * np.asarray(limit, added.dtype), added)

    limit = LARGEST_LOGIT_OF_FLOAT16_COLUMNS
    return operands._replace(
        relative_bias=clipped(operands.relative_bias, RELATIVE_BIAS_SHARE * limit),
        key_bias=clipped(operands.key_bias, limit),
        sinks=clipped(operands.sinks, limit),
    )


def _largest(array: np.ndarray | None, below: float = math.inf) -> float:
    """Return the largest magnitude in an array that is less than ``below``. Ignore numbers that mask out keys."""
    if array is None:
        return 0.0
    magnitudes = np.abs(oracle.with_hidden(array))
    return float(magnitudes[magnitudes < below].max(initial=0))


def _largest_product(operands: oracle.Tensors) -> float:
    """Return an upper bound, for all query/key pairs, of ``|query * key|`` summed over the head dimension."""
    largest = [
        np.linalg.norm(array.astype(np.float64), axis=-1).max(initial=0)
        for array in (operands.query, operands.key, operands.additional_keys)
        if array is not None
    ]
    return float(largest[0] * max(largest[1:]))
