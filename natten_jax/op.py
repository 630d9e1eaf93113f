"""One differentiable, batchable operator over every backend: ``custom_vjp(custom_vmap(dispatch(backend)))``.

Backends are chosen per pass and per platform inside the traced program, so that one traced function serves
CPU and GPU.
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
from jax.extend.core import Primitive
from jax.interpreters import mlir

from natten_jax import backends, native, partition
from natten_jax.backends.base import Backend, Gradients, Operands, Output, Saved, requested_pair
from natten_jax.devices import CPU, Device, cuda_device, local_devices
from natten_jax.passes import Pass
from natten_jax.problem import Problem, TileConfig

#: Names of the saved residuals, for ``jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)``: a
#: rematerialised function that keeps them does not run the forward kernel a second time.
CHECKPOINT_NAMES = ("natten_jax_output", "natten_jax_logsumexp")

_OTHER_PLATFORMS = Device("default")  # the key that jax.lax.platform_dependent uses for "any other"


@dataclasses.dataclass(frozen=True)
class Call:
    """Everything static about one call: the operator's only non-differentiable argument."""

    problem: Problem
    tiles: TileConfig
    backend: str | None = None


def attend(call: Call, operands: Operands) -> Output:
    """Run the operator; differentiable in every floating-point operand.

    Raises:
        ValueError: No backend can run the call on any device of this process.
    """
    check_runs_somewhere(call)
    choices = set(_choices(call, "forward").values())
    if all(isinstance(choice, str) or choice.is_pure_jax for choice in choices):
        # Plain JAX differentiates itself: forward mode and higher orders included.
        return partition.run(lambda *arrays: _dispatch(call, "forward", _run_forward, Operands(*arrays)), *operands)
    return partition.run(lambda *arrays: _attend(call, Operands(*arrays)), *operands)


def check_runs_somewhere(call: Call) -> None:
    """Check that some device of this process can run the call.

    Raises:
        ValueError: None can; the message speaks of the default device.
    """
    errors = []
    for device in local_devices():
        try:
            _choose(call, device, "forward")
            if requested_pair(call.tiles, "backward") is not None:
                _choose(call, device, "backward")
        except ValueError as error:
            errors.append(error)
        else:
            return
    raise errors[0]


def fuses_additional_kv(call: Call) -> bool:
    """Whether the forward pass takes additional key/value tokens on every platform it can run on."""
    return all(isinstance(choice, str) or choice.fuses_additional_kv for choice in _choices(call, "forward").values())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, operands: Operands) -> Output:
    return _forward_op(call)(operands)


def _attend_forward(call: Call, operands: Operands) -> tuple[Output, tuple[Operands, Saved]]:
    result = _saving_forward_op(call)(operands)
    of_output, of_logsumexp = CHECKPOINT_NAMES
    names = of_output, of_logsumexp, of_logsumexp  # the last for the remainder
    saved = Saved(*(checkpoint_name(array, name) for array, name in zip(result, names, strict=True)))
    return Output(saved.out, saved.logsumexp), (operands, saved)


def _attend_backward(call: Call, residuals: tuple[Operands, Saved], cotangents: Output) -> tuple[Operands]:
    gradients = _backward_op(call)(*residuals, cotangents)
    return (Operands._make([*gradients, None]),)  # origins are integers and have no gradient


_attend.defvjp(_attend_forward, _attend_backward)


def _run_forward(backend: Backend, call: Call, operands: Operands) -> Output:
    return backend.forward(call.problem, call.tiles, operands)


def _run_saving_forward(backend: Backend, call: Call, operands: Operands) -> Saved:
    return backend.forward_saving(call.problem, call.tiles, operands)


def _run_backward(backend: Backend, call: Call, operands: Operands, saved: Saved, cotangents: Output) -> Gradients:
    return backend.backward(call.problem, call.tiles, operands, saved, *cotangents)


def _run_other_backward(
    backend: Backend, call: Call, operands: Operands, saved: Saved, cotangents: Output
) -> Gradients:
    """As ``_run_backward`` where another backend ran the forward pass."""
    return _run_backward(backend, call, operands, saved._replace(remainder=None), cotangents)


@functools.lru_cache(maxsize=4096)
def _forward_op(call: Call) -> Callable[[Operands], Output]:
    return _batchable(_forward_op, call, "forward", _run_forward)


@functools.lru_cache(maxsize=4096)
def _saving_forward_op(call: Call) -> Callable[[Operands], Saved]:
    return _batchable(_saving_forward_op, call, "forward", _run_saving_forward)


@functools.lru_cache(maxsize=4096)
def _backward_op(call: Call) -> Callable[[Operands, Saved, Output], Gradients]:
    return _batchable(_backward_op, call, "backward", _run_backward)


def _batchable(op_of: Callable[[Call], Any], call: Call, pass_: Pass, run: Callable[..., Any]) -> Any:
    """One pass of ``call`` as a function of arrays; ``jax.vmap`` folds the mapped axis into the batch."""

    @custom_vmap
    def op(*arguments: Any) -> Any:
        return _dispatch(call, pass_, run, *arguments)

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
        batch = axis_size * call.problem.batch
        folded_call = dataclasses.replace(call, problem=dataclasses.replace(call.problem, batch=batch))
        results = op_of(folded_call)(Operands._make([*arrays, operands.origins]), *folded)
        results = jax.tree.map(lambda array: array.reshape(axis_size, -1, *array.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return op


def _choose(call: Call, device: Device, pass_: Pass) -> Backend:
    return backends.choose_pass(call.problem, call.tiles, device, pass_, call.backend)


def _choices(call: Call, pass_: Pass) -> dict[str, Backend | str]:
    """By platform, the backend that runs a pass, or the reason why none does."""
    choices: dict[str, Backend | str] = {}
    for device in (CPU, cuda_device(), _OTHER_PLATFORMS):
        try:
            choices[device.platform] = _choose(call, device, "forward")
            if pass_ == "backward":  # reached only where the forward pass runs
                choices[device.platform] = _choose(call, device, pass_)
        except ValueError as error:
            choices[device.platform] = str(error)
    return choices


def _dispatch(call: Call, pass_: Pass, run: Callable[..., Any], *arguments: Any) -> Any:
    """Run a pass with the backend of the platform that the program is lowered for."""
    choices = _choices(call, pass_)
    forward_choices = choices if pass_ == "forward" else _choices(call, "forward")
    available = {choice for choice in choices.values() if not isinstance(choice, str)}
    names = sorted(backends.backend_name(backend, call.problem.operator) for backend in available)

    def runner(platform: str) -> Callable[..., Any]:
        return run if choices[platform] is forward_choices[platform] else _run_other_backward

    def branch(choice: Backend | str, runner: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(choice, str):
            return functools.partial(_unavailable, choice, functools.partial(runner, next(iter(available)), call))
        return functools.partial(runner, choice, call)

    cases = {platform: (choice, runner(platform)) for platform, choice in choices.items()}
    other = cases.pop(_OTHER_PLATFORMS.platform)
    branches = {platform: branch(*case) for platform, case in cases.items() if case != other}
    with partition.named(f"{call.problem.describe()} {pass_} backend={'|'.join(names)}"):
        if not branches:
            return branch(*other)(*arguments)
        return jax.lax.platform_dependent(*arguments, **branches, **{_OTHER_PLATFORMS.platform: branch(*other)})


# Stands for a backend on a platform that it does not run on: tracing passes, lowering raises the reason.
_unavailable_p = Primitive("natten_jax_unavailable")
_unavailable_p.multiple_results = True


@_unavailable_p.def_abstract_eval
def _unavailable_types(*_: Any, types: tuple[Any, ...], reason: str) -> tuple[Any, ...]:
    return types


def _raise_unavailable(_: Any, *__: Any, types: tuple[Any, ...], reason: str) -> Any:
    raise ValueError(reason)


mlir.register_lowering(_unavailable_p, _raise_unavailable)


def _unavailable(reason: str, stand_in: Callable[..., Any], *arguments: Any) -> Any:
    leaves, structure = jax.tree.flatten(jax.eval_shape(stand_in, *arguments))
    query = arguments[0].query
    types = tuple(native.type_like(query, native.ResultType(leaf.shape, leaf.dtype)) for leaf in leaves)
    return jax.tree.unflatten(structure, _unavailable_p.bind(*jax.tree.leaves(arguments), types=types, reason=reason))
