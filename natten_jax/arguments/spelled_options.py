"""Keyword arguments that many functions take alike: declared once, and shown by name where each function is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, get_type_hints

Function = TypeVar("Function", bound=Callable[..., Any])


class SpelledOptions(NamedTuple):
    """Options that functions take as ``**options``.

    Attributes:
        declared: A ``TypedDict`` of them.
        defaults: What each is where it is left out.
        documentation: What each means; what else is in there does not matter.
        behind: The parameter that they stand behind where that is given by keyword; else they are the first that are.
    """

    declared: type[Any]
    defaults: Mapping[str, Any]
    documentation: Mapping[str, str]
    behind: str

    @property
    def marker(self) -> str:
        """The line of a docstring that their documentation replaces."""
        return f"{{{self.declared.__name__}}}"

    def shown(self, **others: type[Any]) -> Callable[[Function], Function]:
        """A decorator: the function's signature and documentation have the options by name.

        Args:
            **others: What is left of the function's ``**options``, as its signature has it: a name and a ``TypedDict``.
        """

        def decorate(function: Function) -> Function:
            function.__signature__ = self._signature(function, others)  # type: ignore[attr-defined]
            lines = (function.__doc__ or "").split("\n")  # none with python -OO
            function.__doc__ = "\n".join(line for each in lines for line in self._documented(each)) or None
            return function

        return decorate

    def _signature(self, function: Callable[..., Any], others: Mapping[str, type[Any]]) -> inspect.Signature:
        signature, kind = inspect.signature(function), inspect.Parameter
        *given, _ = signature.parameters.values()
        by_keyword = [i for i, each in enumerate(given) if each.kind is kind.KEYWORD_ONLY]
        after = [i + 1 for i in by_keyword if given[i].name == self.behind]
        place = (after or by_keyword or [len(given)])[0]
        own = [
            kind(name, kind.KEYWORD_ONLY, default=self.defaults[name], annotation=annotation)
            for name, annotation in get_type_hints(self.declared).items()
        ]
        rest = [kind(name, kind.VAR_KEYWORD, annotation=f"Unpack[{each.__name__}]") for name, each in others.items()]
        return signature.replace(parameters=[*given[:place], *own, *given[place:], *rest])

    def _documented(self, line: str) -> list[str]:
        if line.strip() != self.marker:
            return [line]
        indent = line[: len(line) - len(line.lstrip())]
        texts = (f"{name}: {self.documentation.get(name, '')}" for name in self.declared.__annotations__)
        return [indent + each for text in texts for each in text.split("\n")]
