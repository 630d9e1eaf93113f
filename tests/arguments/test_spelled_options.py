"""Window options are declared once, and are found wherever windows are described."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import pytest

import natten_jax
from natten_jax import plot, problem
from natten_jax.arguments.names import SpelledOptions
from natten_jax.profiler.options import WINDOW_FLAGS, profiler_parser
from natten_jax.windows import OPTION_DEFAULTS, Axis, WindowArguments

FUNCTIONS: list[Callable[..., Any]] = [
    natten_jax.na1d,
    natten_jax.na2d,
    natten_jax.na3d,
    natten_jax.neighborhood_weights,
    natten_jax.neighborhood_apply,
    plot.plot_window,
    plot.plot_windows,
    plot.window_mask,
    problem.problem_of,
]


class _Colors(TypedDict, total=False):
    hue: str
    depth: int


class _Others(TypedDict, total=False):
    speed: int


class _All(_Colors, _Others, total=False):
    pass


COLORS = SpelledOptions(
    _Colors, {"hue": "red", "depth": 3}, {"hue": "Its name,\n    or none.", "depth": "Bits."}, "size"
)


@COLORS.shown()
def paint(size: int = 1, *, is_wet: bool = False, **options: Unpack[_Colors]) -> tuple[int, bool, dict[str, Any]]:
    """Paint.

    Args:
        size: Of the brush.
        {_Colors}
        is_wet: Whether it is.
    """
    return size, is_wet, dict(options)


@COLORS.shown(speed=_Others)
def print_(*, size: int = 1, is_wet: bool = False, **options: Unpack[_All]) -> dict[str, Any]:
    return dict(options)


def test_options_are_shown_by_name() -> None:
    assert str(inspect.signature(paint)) == (
        "(size: 'int' = 1, *, hue: str = 'red', depth: int = 3, is_wet: 'bool' = False) "
        "-> 'tuple[int, bool, dict[str, Any]]'"
    )
    assert list(inspect.signature(print_).parameters) == ["size", "hue", "depth", "is_wet", "speed"]
    assert inspect.cleandoc(paint.__doc__ or "").split("\n")[2:] == [
        "Args:",
        "    size: Of the brush.",
        "    hue: Its name,",
        "        or none.",
        "    depth: Bits.",
        "    is_wet: Whether it is.",
    ]
    assert paint(2, hue="blue") == (2, False, {"hue": "blue"})


def test_axes_and_arguments_end_with_the_options() -> None:
    names = tuple(OPTION_DEFAULTS)
    assert WindowArguments._fields[-len(names) :] == names
    assert tuple(Axis.__dataclass_fields__)[2:] == WindowArguments._fields


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
def test_whatever_takes_windows_takes_all_of_their_arguments(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert set(WindowArguments._fields) <= parameters.keys()
    for name, default in OPTION_DEFAULTS.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == default
        assert f"    {name}: " in (function.__doc__ or "")
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument 'edge'"):
        function(edge="wrap")


def test_modules_have_them() -> None:
    pytest.importorskip("flax")
    from natten_jax.flax_modules import attention_fn, linen, nnx

    modules = (nnx.NeighborhoodAttention2D.__init__, linen.NeighborhoodAttention2D)
    for function in (*modules, attention_fn.neighborhood_attention_fn):
        parameters = inspect.signature(function).parameters
        assert set(WindowArguments._fields) <= parameters.keys()
        assert all(parameters[name].default == default for name, default in OPTION_DEFAULTS.items())


def test_the_profiler_has_flags_for_them() -> None:
    arguments = vars(profiler_parser().parse_args(["-i", "8"]))
    assert set(WINDOW_FLAGS) <= arguments.keys()
    assert OPTION_DEFAULTS.keys() <= set(WINDOW_FLAGS)
