"""Measured configurations, for use as operator arguments or in a ``with`` block."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from natten_jax import backends
from natten_jax.arguments.static import hashable, shown, warn_of_line
from natten_jax.autotuning.tables import TunedPass, TunedTable, active_table, tuned_problem
from natten_jax.ops.sub_calls import checked_attention_kwargs
from natten_jax.performance import ATTENTION_NAMES, PASSES, performance_of, tile_names
from natten_jax.plan.devices import local_devices
from natten_jax.plan.plan import Plan

_TILES = tuple(name for pass_ in PASSES for name in tile_names(pass_))
_ARGUMENTS = {"attention_kwargs", "backend", *ATTENTION_NAMES.values()}
_KEY, _TABLE_KEY = "best_configuration", "tuned"


class Tuned(Mapping[str, Any]):
    """Measured configurations of the operator calls in a program.

    The object is a context manager. Operator calls that are traced in its ``with`` block use these configurations
    instead of the package's tables. If ``jax.jit`` compiled a function before the block, it compiles the function again
    inside the block. If all configurations are for the same problem, the object is also a mapping from the names to the
    values of the operator's performance arguments.

    Attributes:
        table: The measured passes of each problem; ``None`` if the object was loaded from a file that does not name a
            problem.
        skipped: Problems that could not be measured, each followed by the reason.
    """

    def __init__(
        self, table: TunedTable | None, arguments: Mapping[str, Any] | None = None, skipped: tuple[str, ...] = ()
    ) -> None:
        self.table = table
        self.skipped = skipped
        self._arguments = arguments
        self._entered: list[contextlib.ExitStack] = []

    @property
    def passes(self) -> tuple[TunedPass, ...]:
        """Measured passes of all problems, with the times of the selected and the default configuration."""
        return () if self.table is None else self.table.passes

    def __enter__(self) -> Tuned:
        if self.table is None:
            raise ValueError("this file names no problem: pass what load_tuned returns as arguments of an operator")
        here = [device.kind for device in local_devices()]
        if self.table.device not in here:
            warn_of_line(
                f"these configurations were measured on {self.table.device}, and this process has "
                f"{', '.join(here)}: none of them applies"
            )
        stack = contextlib.ExitStack()
        stack.enter_context(active_table(self.table))
        self._entered.append(stack)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.pop().close()

    def __getitem__(self, name: str) -> Any:
        return self._single_operator_arguments()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._single_operator_arguments())

    def __len__(self) -> int:
        return len(self._single_operator_arguments())

    def __repr__(self) -> str:
        if self._arguments is not None:
            return repr(dict(self._arguments))
        lines = [f"Tuned on {'no device' if self.table is None else self.table.device}:"]
        lines += [f"  {_described(each)}" for each in self.passes]
        return "\n".join([*lines, *(f"  not measured: {each}" for each in self.skipped)])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that :func:`natten_jax.load_tuned` reads.

        Raises:
            ValueError: There is no table, because the object was loaded from a file that does not name a problem.
            OSError: The file cannot be written.
        """
        if self.table is None:
            raise ValueError("cannot save: this was loaded from a file that does not name a problem")
        Path(path).write_text(json.dumps(self.table.to_json(), indent=1) + "\n", encoding="utf-8")

    def _single_operator_arguments(self) -> Mapping[str, Any]:
        if self._arguments is not None:
            return self._arguments
        problems = {tuned_problem(each.plan.problem) for each in self.passes}
        if len(problems) > 1:
            raise ValueError(
                f"these configurations are for {len(problems)} problems, but arguments are for one: use them in a "
                "block, with natten_jax.load_tuned(path): ..."
            )
        return _arguments_of([each.plan for each in self.passes if not each.is_default])


def _described(tuned: TunedPass) -> str:
    plan = tuned.plan
    gain = "the default" if tuned.is_default else f"{tuned.default_seconds / tuned.seconds:.2f} times as fast"
    q_tile, kv_tile = plan.tiles
    return f"{plan.problem.describe()}, {plan.pass_}: {plan.backend}, tiles {q_tile} and {kv_tile}, {gain}"


def _arguments_of(plans: list[Plan]) -> dict[str, Any]:
    """Return the performance arguments that make an operator call use the given plans, at most one per pass."""
    arguments: dict[str, Any] = {}
    for plan in plans:
        arguments |= zip(tile_names(plan.pass_), plan.tiles, strict=True)
        if plan.pass_ == "forward":
            arguments["backend"] = str(plan.backend)
            if plan.performance.kernel_schedule is not None:
                arguments["kernel_schedule"] = plan.performance.kernel_schedule
    if not plans or plans[0].problem.operator == "fna":
        return arguments
    by_field = {field: name for name, field in ATTENTION_NAMES.items()}
    return {
        by_field.get(name, name): value[0] if isinstance(value, tuple) else value for name, value in arguments.items()
    }


def load_tuned(path: str | os.PathLike[str]) -> Tuned:
    """Load configurations from a file that :func:`natten_jax.tune` or the profiler wrote.

    Example:
        Pass the result as keyword arguments to an operator, or to a module in ``natten_jax.flax_modules``.

        >>> import json, pathlib, tempfile
        >>> import natten_jax
        >>> path = pathlib.Path(tempfile.mkdtemp(), "tuned.json")  # the profiler writes it
        >>> tiles = {"q_tile_shape": [2, 8, 8], "kv_tile_shape": [2, 8, 8]}
        >>> _ = path.write_text(json.dumps({"best_configuration": tiles}))
        >>> natten_jax.load_tuned(path)
        {'q_tile_shape': (2, 8, 8), 'kv_tile_shape': (2, 8, 8)}

    Args:
        path: A file that :func:`natten_jax.tune` wrote, or that the profiler wrote with ``--optimize --json``.

    Returns:
        For a file of the profiler, a mapping of performance arguments for the profiled operator (``na1d``, ``na2d`` or
        ``na3d``). For a file of :func:`natten_jax.tune`, a context manager: operators in its ``with`` block use the
        configurations. If the tuned program has a single problem, this object is also a mapping of performance
        arguments.

    Raises:
        ValueError: Neither :func:`natten_jax.tune` nor the profiler wrote the file, or a field is malformed.
        TypeError: ``path`` is not a path.
        OSError: The file cannot be read.
    """
    content = _content(path)
    where = f"path={os.fspath(path)!r}"
    if isinstance(content, dict) and _TABLE_KEY in content and _KEY not in content:
        try:
            return Tuned(TunedTable.from_text(json.dumps(content)))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    best = _best_configuration(content, where)
    unknown = sorted(best.keys() - _ARGUMENTS)
    if unknown:
        raise ValueError(f"{where} has unknown arguments {', '.join(unknown)} ({_KEY}.{unknown[0]})")
    arguments = {name: value for name, value in best.items() if value is not None}
    try:
        _check(arguments)
    except (TypeError, ValueError) as error:  # the message starts with the field's name
        raise ValueError(f"{where}: {_KEY}.{error}") from None
    return Tuned(None, {name: hashable(value) for name, value in arguments.items()})


def _content(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or a path, got {shown(path)}")
    where = os.fspath(path)
    if "\0" in where:
        raise ValueError(f"path must hold no null character, got {where!r}")
    content = Path(path).read_bytes()
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, an overlong integer, or nested too deeply
        raise ValueError(f"path={where!r} is not valid JSON: {error}") from None


def _best_configuration(content: Any, where: str) -> dict[str, Any]:
    """Return the value of the ``best_configuration`` field of a profiler's file."""
    best = content.get(_KEY) if isinstance(content, dict) else None
    if not isinstance(best, dict):
        has = f"its {_KEY} is {shown(best)}" if isinstance(content, dict) and _KEY in content else f"it has no {_KEY}"
        raise ValueError(
            f"{where} does not hold a tuned configuration ({has}): write one with natten_jax.tune, or with "
            "python -m natten_jax.profiler ... --optimize --json PATH"
        )
    return best


def _check(arguments: dict[str, Any]) -> None:
    """Check performance arguments, but not the rules that depend on the problem.

    Error messages start with the name of the wrong argument.
    """
    for name in _TILES:
        if name in arguments and not (isinstance(arguments[name], list) and 1 <= len(arguments[name]) <= 3):
            raise TypeError(f"{name} must be a list of 1 to 3 ints, got {shown(arguments[name])}")
    rank = next((len(arguments[name]) for name in _TILES if name in arguments), 1)
    excluded = {"backend", "attention_kwargs"}
    performance = performance_of(rank, **{name: value for name, value in arguments.items() if name not in excluded})
    if "backend" in arguments:
        backends.find(arguments["backend"], "fna")
    attention_kwargs = arguments.get("attention_kwargs")
    checked_attention_kwargs(attention_kwargs, performance.flattened())
    for name in attention_kwargs or {}:
        if name not in (*ATTENTION_NAMES, "backend"):  # arguments that affect the result are not tuned
            raise TypeError(f"attention_kwargs has {shown(name)}, which is not a performance argument")
