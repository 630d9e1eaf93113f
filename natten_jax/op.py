"""One differentiable, batchable operator over every backend: ``custom_vjp(custom_vmap(run a pass))``.

Which backend runs a pass is decided when the program is lowered, per pass and platform: one traced function serves CPU
and GPU, and nothing is traced for platforms that a program is not lowered for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

from natten_jax import mesh, run
from natten_jax.backends.base import Gradients, Operands, Output, Saved
from natten_jax.devices import local_devices
from natten_jax.differentiation import in_reverse_only
from natten_jax.resolve import Request, resolve
from natten_jax.symbolic_batch import planned_batch

#: Names of the saved residuals, for ``jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)``: a
#: rematerialised function that keeps them does not run the forward kernel a second time.
CHECKPOINT_NAMES = ("natten_jax_output", "natten_jax_logsumexp")


def attend(request: Request, operands: Operands) -> Output:
    """Run the operator; differentiable in every floating-point operand.

    Raises:
        ValueError: No backend can run the request on any device of this process.
    """
    check_runs_somewhere(request)
    arrays = Operands._make(mesh.local_operands(operands))
    if run.is_inline(request):
        # Plain JAX differentiates itself: forward mode and higher orders included.
        return run.forward(request, arrays)
    differentiable = [None if array is None else in_reverse_only(array) for array in arrays[:5]]
    return _attend(request, Operands._make([*differentiable, arrays.origins]))


def check_runs_somewhere(request: Request) -> None:
    """Check that some device of this process can run the request.

    Raises:
        ValueError: None can; the message speaks of the default device.
    """
    errors = []
    for device in local_devices():
        try:
            resolve(request, device, "forward")
            if request.performance.tiles("backward") is not None:
                resolve(request, device, "backward")
        except ValueError as error:
            errors.append(error)
        else:
            return
    raise errors[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(request: Request, operands: Operands) -> Output:
    return _forward_op(request)(operands)


def _attend_forward(request: Request, operands: Operands) -> tuple[Output, tuple[Operands, Saved]]:
    result = _saving_forward_op(request)(operands)
    of_output, of_logsumexp = CHECKPOINT_NAMES
    names = of_output, of_logsumexp, of_logsumexp  # the last for the remainder
    saved = Saved(*(checkpoint_name(array, name) for array, name in zip(result, names, strict=True)))
    return Output(saved.out, saved.logsumexp), (operands, saved)


def _attend_backward(request: Request, residuals: tuple[Operands, Saved], cotangents: Output) -> tuple[Operands]:
    gradients = _backward_op(request)(*residuals, cotangents)
    return (Operands._make([*gradients, None]),)  # origins are integers and have no gradient


_attend.defvjp(_attend_forward, _attend_backward)


@functools.lru_cache(maxsize=4096)
def _forward_op(request: Request) -> Callable[[Operands], Output]:
    return _batchable(_forward_op, request, run.forward)


@functools.lru_cache(maxsize=4096)
def _saving_forward_op(request: Request) -> Callable[[Operands], Saved]:
    return _batchable(_saving_forward_op, request, run.forward_saving)


@functools.lru_cache(maxsize=4096)
def _backward_op(request: Request) -> Callable[[Operands, Saved, Output], Gradients]:
    return _batchable(_backward_op, request, run.backward)


def _batchable(op_of: Callable[[Request], Any], request: Request, run_pass: Callable[..., Any]) -> Any:
    """One pass of ``request`` as a function of arrays; ``jax.vmap`` folds the mapped axis into the batch."""

    @custom_vmap
    def op(*arguments: Any) -> Any:
        return run_pass(request, *arguments)

    @op.def_vmap
    def _(axis_size: int, in_batched: Sequence[Any], *arguments: Any) -> Any:
        operands_batched, operands = in_batched[0], arguments[0]

        def spread(array: jax.Array, batched: bool) -> jax.Array:
            return array if batched else jnp.broadcast_to(array, (axis_size, *array.shape))

        if operands_batched.origins:
            results = jax.lax.map(lambda each: op(*each), jax.tree.map(spread, tuple(arguments), tuple(in_batched)))
            return results, jax.tree.map(lambda _: True, results)

        def fold(array: jax.Array, batched: bool) -> jax.Array:
            array = spread(array, batched)
            return array.reshape(axis_size * array.shape[1], *array.shape[2:])

        folded = list(jax.tree.map(fold, tuple(arguments[1:]), tuple(in_batched[1:])))
        arrays = [
            None if array is None else fold(array, batched)
            for array, batched in zip(operands[:-1], operands_batched[:-1], strict=True)
        ]
        batch = planned_batch(axis_size) * request.problem.batch
        folded_request = dataclasses.replace(request, problem=dataclasses.replace(request.problem, batch=batch))
        results = op_of(folded_request)(Operands._make([*arrays, operands.origins]), *folded)
        own_batch = operands.query.shape[1 if operands_batched.query else 0]
        results = jax.tree.map(lambda array: array.reshape(axis_size, own_batch, *array.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return op
