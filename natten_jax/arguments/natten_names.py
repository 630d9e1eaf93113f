"""Keyword arguments by the names that users know: NATTEN's that change nothing are taken, others are explained."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from natten_jax.arguments.other_names import explanation
from natten_jax.arguments.static import shown

Function = TypeVar("Function", bound=Callable[..., Any])


class Neutral(NamedTuple):
    """An argument of NATTEN that has no meaning here, or another name.

    Attributes:
        values: Those that change nothing.
        instead: What to do instead of giving another.
    """

    values: tuple[bool, ...]
    instead: str


#: NATTEN's arguments of the operators and of ``attention_kwargs`` that change nothing here.
OF_OPERATORS: Mapping[str, Neutral] = MappingProxyType(
    {
        "torch_compile": Neutral((False,), "jax.jit compiles every call"),
        "backward_use_pt_reduction": Neutral((False,), "here it is called backward_use_xla_reduction"),
    }
)
#: Those of ``merge_attentions``, which NATTEN compiles by default.
OF_MERGE: Mapping[str, Neutral] = MappingProxyType(
    {
        "torch_compile": Neutral((True, False), "every merge is compiled"),
        "use_autograd_fix": Neutral((True,), "gradients are always those of attention over all keys"),
    }
)


def explained(
    names: Iterable[str] = (), of_natten: Mapping[str, Neutral] = OF_OPERATORS
) -> Callable[[Function], Function]:
    """A decorator of a function, or of a method: before it is called, unknown keyword arguments are explained.

    Python would speak of an argument that is missing, as ``kernel_size`` where ``window_size`` is given, first.

    Args:
        names: What the function knows besides its parameters.
        of_natten: Arguments of NATTEN that it takes if it takes any others.
    """

    def decorate(function: Function) -> Function:
        parameters = inspect.signature(function).parameters.values()
        takes_others = any(each.kind is each.VAR_KEYWORD for each in parameters)
        known = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        known |= set(names)
        accepted = frozenset(known | set(of_natten) if takes_others else known)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.keys() <= accepted:
                name = next(each for each in kwargs if each not in accepted)
                raise TypeError(unexpected(_label(function, args), name, known))
            return function(*args, **kwargs)

        return cast(Function, call)

    return decorate


def known_arguments(
    function: str, arguments: Mapping[str, Any], names: Iterable[str], of_natten: Mapping[str, Neutral] = OF_OPERATORS
) -> dict[str, Any]:
    """The keyword arguments that a function knows, without those of NATTEN that change nothing.

    Args:
        function: Name of the function, for messages.
        arguments: What it was given.
        names: What it knows.
        of_natten: Arguments of NATTEN that it takes.

    Raises:
        TypeError: It was given something else.
    """
    known = set(names)
    for name, value in arguments.items():
        if name in known:
            continue
        if name not in of_natten:
            raise TypeError(unexpected(function, name, known))
        check_neutral(f"{function}() takes {name}", of_natten[name], value)
    return {name: value for name, value in arguments.items() if name in known}


def check_neutral(what: str, neutral: Neutral, value: Any) -> None:
    """Check that an argument of NATTEN asks for nothing.

    Args:
        what: How the message begins, up to the argument.
        neutral: The argument.
        value: What was given.

    Raises:
        TypeError: It asks for something.
    """
    if not isinstance(value, (bool, np.bool_)) or bool(value) not in neutral.values:
        values = " or ".join(map(str, neutral.values))
        raise TypeError(f"{what}={values} only, got {shown(value)}: {neutral.instead}")


def unexpected(function: str, name: str, known: Iterable[str]) -> str:
    """The message that a function has no such argument."""
    return f"{function}() got an unexpected keyword argument {name!r}{explanation(name, set(known))}"


def _label(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """What users call a function; of a constructor, its class."""
    name = function.__name__
    return type(args[0]).__name__ if name in ("__init__", "__call__") and args else name
