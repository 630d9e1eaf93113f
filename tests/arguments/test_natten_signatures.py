"""Positional arguments stand where NATTEN has them: docs/coming-from-natten.md says up to which."""

from __future__ import annotations

import inspect

import pytest

import natten_jax

OPERANDS = "query key value"
WINDOWS = f"{OPERANDS} kernel_size stride dilation is_causal scale additional_keys additional_values"


def positional(name: str) -> list[str]:
    """The arguments that may be given by position."""
    parameters = inspect.signature(getattr(natten_jax, name)).parameters.values()
    return [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize(
    ("name", "order"),
    [
        *((f"na{rank}d", f"{WINDOWS} attention_kwargs backend") for rank in (1, 2, 3)),
        ("attention", f"{OPERANDS} scale"),
    ],
)
def test_positional_order(name: str, order: str) -> None:
    assert positional(name) == order.split()
    parameters = inspect.signature(getattr(natten_jax, name)).parameters.values()
    assert {each.kind for each in parameters} <= {
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    }
