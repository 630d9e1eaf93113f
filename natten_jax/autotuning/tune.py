"""Measure the configurations of every operator that a function calls."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from natten_jax.autotuning.configurations import Tuned


def tune(
    function: Callable[..., Any], *arguments: Any, save: str | os.PathLike[str] | None = None, **keywords: Any
) -> Tuned:
    """Measure the configurations of every operator that a function calls, and keep those that are clearly faster.

    The function is traced but not run. Each problem that it passes to an operator is measured separately, on random
    arrays of its shapes, on the default device: first the best-ranked configurations, then the fastest of them in
    alternation with the default choice. A configuration that is not at least 2% faster is discarded, so that tuning
    does not make a program slower. This takes some seconds for each problem and pass on a GPU; progress is printed on
    standard error.

    Example:
        >>> import jax, jax.numpy as jnp, natten_jax
        >>> def attend(tokens):
        ...     return natten_jax.na1d(tokens, tokens, tokens, kernel_size=3)
        >>> tokens = jnp.ones((1, 16, 1, 8))
        >>> tuned = natten_jax.tune(attend, tokens)
        >>> with tuned:
        ...     output = jax.jit(attend)(tokens)

    Args:
        function: A function that ``jax.jit`` accepts or returned: a forward pass, or a whole training step.
        *arguments: Its arguments: arrays, or their shapes and types (``jax.ShapeDtypeStruct``).
        save: File for the results, which :func:`natten_jax.load_tuned` reads.
        **keywords: Its keyword arguments.

    Returns:
        The measured configurations. In a ``with`` block the operators use them; problems without measurements use their
        defaults. If the function calls a single operator, the result is also a mapping of that operator's performance
        arguments.

    Raises:
        ValueError: The function does not call an operator of this package.
        TypeError: ``function`` cannot be called, or ``jax.jit`` cannot trace it.
        OSError: The file cannot be written.
    """
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")
    # Import the profiler only where it is needed, because importing it is slow.
    from natten_jax.profiler.cli import print_message
    from natten_jax.profiler.search import THOROUGH, plans_of, tune_plans

    plans = plans_of(function, *arguments, **keywords)
    if not plans:
        raise ValueError(f"function={getattr(function, '__name__', function)!r} calls no operator of natten_jax")
    table, skipped = tune_plans(plans, THOROUGH, print_message)
    tuned = Tuned(table, skipped=skipped)
    if save is not None:
        tuned.save(save)
    return tuned
