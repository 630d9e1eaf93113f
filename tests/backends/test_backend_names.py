"""Names of backends: where one that nobody has is refused, and who may speak of a family."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import natten_jax
from natten_jax import backends

ARRAY = jnp.zeros((1, 16, 2, 8))


def messages(name: Any) -> list[str]:
    """What ``na1d``, ``attention`` and the attention of ``na1d`` say."""
    found = []
    for call in (
        lambda: natten_jax.na1d(ARRAY, ARRAY, ARRAY, 3, backend=name),
        lambda: natten_jax.attention(ARRAY, ARRAY, ARRAY, backend=name),
        lambda: natten_jax.na1d(ARRAY, ARRAY, ARRAY, 3, attention_kwargs={"backend": name}),
    ):
        with pytest.raises(ValueError, match="backend") as caught:
            call()
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("hoper-fna", "hopper"),
        ("Hopper_FNA", "hopper"),
        ("cutlas", "cutlass"),
        (" cutlass fmha", "cutlass"),
        ("flex", "flex"),
        ("flexx-fmha", "flex"),
        ("CPU", "cpu"),
    ],
)
def test_a_misspelt_name_finds_the_backend_of_the_operator(name: str, meant: str) -> None:
    for message, operator in zip(messages(name), ("fna", "fmha", "fmha"), strict=True):
        assert f"{name!r} is unknown: did you mean '{meant}-{operator}'? Choose None or one of" in message


@pytest.mark.parametrize("name", ["", "-", "torch-fna", "none", "gpu", "x" * 10**6, 3, ["cpu-fna"], None.__class__])
def test_other_names_have_no_suggestion(name: Any) -> None:
    for message in messages(name):
        assert "is unknown; choose None or one of" in message
        assert all(each in message for each in backends.names("fna" if "cpu-fna," in message else "fmha"))


@pytest.mark.parametrize(("name", "whose"), [("cudnn", "JAX"), ("xformers", "PyTorch"), ("fav2", "PyTorch")])
def test_other_implementations_are_explained(name: str, whose: str) -> None:
    for message in messages(name):
        assert f"{name} is an implementation of" in message
        assert whose in message


def test_a_backend_of_the_other_operator_names_its_counterpart() -> None:
    with pytest.raises(ValueError, match=r"'cpu-fmha' is a backend of attention, and this is .*did you mean 'cpu-fna'"):
        natten_jax.na1d(ARRAY, ARRAY, ARRAY, 3, backend="cpu-fmha")
    with pytest.raises(ValueError, match=r"'cpu-fna' is a backend of neighborhood attention, .* mean 'cpu-fmha'"):
        natten_jax.attention(ARRAY, ARRAY, ARRAY, backend="cpu-fna")


def test_costs_and_native_calls_know_no_family() -> None:
    """What is true of one family's kernels is asked of it, or of its calibration."""
    platforms = {"cpu", "tpu"}  # are called as the families for them
    root, families = Path(natten_jax.__file__).parent, {each.family for each in backends.registered()} - platforms
    named = {}
    for folder in ("arrays", "plan", "native", "cost", "sharding", "execution", "ops"):
        for path in (root / folder).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
            if found := {word for word in words if word in families or word.rpartition("-")[0] in families}:
                named[path.name] = found
    assert not named
