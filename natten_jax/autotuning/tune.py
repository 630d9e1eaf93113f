"""Autotuning: measure configurations for each operator call in a function."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from natten_jax.autotuning.configurations import Tuned


def tune(
    function: Callable[..., Any], *arguments: Any, save: str | os.PathLike[str] | None = None, **keywords: Any
) -> Tuned:
    """Measure configurations for each operator call in a function, and select the fastest for each call.

    The function is traced but not run. Each distinct *problem* (the shapes, element types and arguments of a call) is
    measured once. The measurement uses random arrays on the default device. First, the configurations that
    the backends rank highest are measured briefly. Then the fastest of these is measured in alternation with the
    default configuration. The default is kept unless the other configuration is at least 2% faster, so that tuning does
    not make a program slower. On a GPU, tuning takes some seconds per problem and pass. Progress is printed on standard
    error.

    Example:
        >>> import jax, jax.numpy as jnp, natten_jax
        >>> def attend(tokens):
        ...     return natten_jax.na1d(tokens, tokens, tokens, kernel_size=3)
        >>> tokens = jnp.ones((1, 16, 1, 8))
        >>> tuned = natten_jax.tune(attend, tokens)
        >>> with tuned:
        ...     output = jax.jit(attend)(tokens)

    Args:
        function: A function that ``jax.jit`` accepts, or the result of ``jax.jit``. The function can be a forward
            pass or a whole training step.
        *arguments: Arguments of ``function``. For an array, its shape and type (``jax.ShapeDtypeStruct``) are
            sufficient.
        save: Path of a file to write the results to. :func:`natten_jax.load_tuned` reads the file.
        **keywords: Keyword arguments of ``function``.

    Returns:
        The selected configurations, as a context manager. Operators in its ``with`` block use them. There, problems
        that were not measured use their default configurations. If the function has a single problem, the result is
        also a mapping of performance arguments.

    Raises:
        ValueError: The function does not call an operator of this package.
        TypeError: ``function`` cannot be called, or ``jax.jit`` cannot trace it.
        OSError: The file ``save`` cannot be written.
    """
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")
    # Import the profiler only here, because importing it is slow.
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
