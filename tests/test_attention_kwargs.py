"""``attention_kwargs`` is checked whether or not a call comes to use it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import OPERATORS

LAYOUT = (4, 5, 6)
WRONG = [
    ({"causal": True}, TypeError, ("'causal'", "q_tile_size")),
    ({3: True}, TypeError, ("has 3", "q_tile_size")),
    ({"scale": 1.0}, TypeError, ("'scale'",)),
    ({"return_lse": True}, TypeError, ("'return_lse'",)),
    ({"q_tile_shape": (4,), "kv_tile_shape": (4,)}, TypeError, ("'q_tile_shape'", "q_tile_size")),
    ({"backend": "cpu-fna"}, ValueError, ("backend", "'cpu-fna'", "cpu-fmha")),
    ({"backend": 3}, ValueError, ("backend", "3", "cpu-fmha")),
    ({"q_tile_size": 64}, ValueError, ("q_tile_size", "64", "kv_tile_size")),
    ({"backward_kv_tile_size": 64}, ValueError, ("backward_kv_tile_size", "64", "backward_q_tile_size")),
    ({"q_tile_size": 6.0, "kv_tile_size": 64}, TypeError, ("q_tile_size", "6.0")),
    ({"q_tile_size": 0, "kv_tile_size": 64}, ValueError, ("q_tile_size", "at least 1", "0")),
    ({"q_tile_size": (4, 4), "kv_tile_size": 64}, ValueError, ("q_tile_size", "(4, 4)")),
    ({"q_tile_size": b"\x40", "kv_tile_size": 64}, TypeError, ("q_tile_size", "b'@'")),
    ({"backward_kv_splits": -1}, ValueError, ("backward_kv_splits", "-1")),
    ({"backward_use_xla_reduction": 1}, TypeError, ("backward_use_xla_reduction", "bool", "1")),
    ({"backward_deterministic": None}, TypeError, ("backward_deterministic", "bool", "None")),
    ({"run_persistent_kernel": "no"}, TypeError, ("run_persistent_kernel", "bool", "'no'")),
    ({"memory_usage_preference": "lavish"}, ValueError, ("memory_usage_preference", "'lavish'", "strict")),
    ({"kernel_schedule": "fast"}, ValueError, ("kernel_schedule", "'fast'", "coop")),
    ([("backend", "cpu-fmha")], TypeError, ("mapping",)),
    ("backend", TypeError, ("mapping", "'backend'")),
]


def refused(wrong: Any, error: type[Exception], parts: tuple[str, ...], call: Any) -> None:
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    message = str(caught.value)
    assert message.startswith("attention_kwargs")
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(("wrong", "error", "parts"), WRONG)
@pytest.mark.parametrize("use", ["unused", "whole-layout", "additional", "fused"])
@pytest.mark.parametrize("rank", [1, 3])
def test_wrong_values_are_refused(
    wrong: Any, error: type[Exception], parts: tuple[str, ...], use: str, rank: int
) -> None:
    array = jnp.zeros((1, *LAYOUT[:rank], 2, 8))
    extra = jnp.zeros((1, 3, 2, 8))
    arguments: dict[str, Any] = {"kernel_size": LAYOUT[:rank] if use == "whole-layout" else 3}
    if use in ("additional", "fused"):
        arguments |= {"additional_keys": extra, "additional_values": extra, "try_fuse_additional_kv": use == "fused"}
    function = OPERATORS[rank]
    refused(
        wrong, error, parts,
        lambda: jax.eval_shape(lambda: function(array, array, array, **arguments, attention_kwargs=wrong)),
    )  # fmt: skip


@pytest.mark.parametrize(("wrong", "error", "parts"), WRONG)
def test_flax_modules_refuse_wrong_values_at_construction(
    wrong: Any, error: type[Exception], parts: tuple[str, ...]
) -> None:
    flax_layers = pytest.importorskip("flax_layers")
    from natten_jax.flax_modules.attention_fn import neighborhood_attention_fn

    for make in (
        lambda: flax_layers.nnx_module(2, attention_kwargs=wrong),
        lambda: flax_layers.LINEN[2](num_heads=flax_layers.HEADS, kernel_size=3, attention_kwargs=wrong),
        lambda: neighborhood_attention_fn(3, attention_kwargs=wrong),
    ):
        refused(wrong, error, parts, make)


def test_one_tile_overrides_that_of_the_whole_layout() -> None:
    """Both together are a pair, where it is this call that they are for."""
    array = jax.random.normal(jax.random.key(0), (1, 4, 5, 2, 8))
    tiles = {"q_tile_shape": (2, 4), "kv_tile_shape": (2, 2), "backend": "flex-fna"}
    call = lambda window, **more: OPERATORS[2](array, array, array, window, **tiles, **more)  # noqa: E731
    np.testing.assert_allclose(
        call((4, 5), attention_kwargs={"q_tile_size": 16}), call((4, 5)), rtol=1e-5, atol=1e-6
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^attention_kwargs: q_tile_size=16 was given without kv_tile_size"):
        call(3, attention_kwargs={"q_tile_size": 16})


def test_values_may_be_arrays() -> None:
    array = jax.random.normal(jax.random.key(0), (1, 9, 2, 8))
    given = {"backend": "flex-fmha", "q_tile_size": np.array(4), "kv_tile_size": jnp.array([4])}
    found = jax.jit(lambda x: OPERATORS[1](x, x, x, 9, attention_kwargs=given))(array)
    np.testing.assert_allclose(found, OPERATORS[1](array, array, array, 9), rtol=1e-5, atol=1e-6)
    assert isinstance(given["q_tile_size"], np.ndarray)  # not changed
