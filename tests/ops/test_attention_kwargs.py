"""Operators check ``attention_kwargs`` even if the call ignores this argument."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.arguments.test_static_arguments import refused
from tests.ops.test_errors import ATTENTION_ROWS
from tests.support.problems import OPERATORS

ARRAYS = {"query", "key", "value"}
WRONG = [
    ({"causal": True}, TypeError, ("'causal'", "did you mean 'is_causal'?", "q_tile_size")),
    ({3: True}, TypeError, ("has 3", "q_tile_size")),
    ({"return_lse": None}, TypeError, ("return_lse must be a bool", "None")),
    ({"torch_compile": True}, TypeError, ("torch_compile=False only", "True", "jax.jit")),
    ({"torch_compile": 0}, TypeError, ("torch_compile=False only", "0")),
    ({"backward_use_pt_reduction": True}, TypeError, ("backward_use_pt_reduction=False", "backward_use_xla_reduction")),
    ({"window_size": 3}, TypeError, ("'window_size'", "attention sees all keys")),
    ({"q_tile_shape": (4,), "kv_tile_shape": (4,)}, TypeError, ("'q_tile_shape'", "did you mean 'q_tile_size'?")),
    ([("backend", "cpu-fmha")], TypeError, ("mapping",)),
    ("backend", TypeError, ("mapping", "'backend'")),
    # Arguments that ``attention`` itself rejects, except arrays.
    *((row.changes, row.error, row.message) for row in ATTENTION_ROWS if row.changes.keys().isdisjoint(ARRAYS)),
]


USES: dict[str, dict[str, Any]] = {
    "unused": {"kernel_size": 3},
    "whole layout": {"kernel_size": 9},
    "additional": {"kernel_size": 3, "additional_keys": True, "additional_values": True},
    "fused": {"kernel_size": 3, "additional_keys": True, "additional_values": True, "try_fuse_additional_kv": True},
}


def run(use: str, attention_kwargs: Any, **more: Any) -> Any:
    """Run ``na1d`` with a head dimension of 16, for which the default scale is 0.25."""
    array, extra = (jax.random.normal(jax.random.key(seed), (1, n, 2, 16)) for seed, n in ((0, 9), (1, 3)))
    arguments = {name: extra if name.startswith("additional") else value for name, value in USES[use].items()}
    return OPERATORS[1](array, array, array, **arguments, **more, attention_kwargs=attention_kwargs)


@pytest.mark.parametrize(("wrong", "error", "parts"), WRONG)
@pytest.mark.parametrize("use", USES)
def test_wrong_values_are_refused(wrong: Any, error: type[Exception], parts: tuple[str, ...], use: str) -> None:
    refused(error, ("attention_kwargs", *parts), lambda: jax.eval_shape(lambda: run(use, wrong)))


@pytest.mark.parametrize(("wrong", "error", "parts"), WRONG)
def test_flax_modules_refuse_wrong_values_at_construction(
    wrong: Any, error: type[Exception], parts: tuple[str, ...]
) -> None:
    flax_layers = pytest.importorskip("tests.support.flax_layers")
    from natten_jax.flax_modules.attention_fn import neighborhood_attention_fn

    for make in (
        lambda: flax_layers.nnx_module(2, attention_kwargs=wrong),
        lambda: flax_layers.LINEN[2](num_heads=flax_layers.HEADS, kernel_size=3, attention_kwargs=wrong),
        lambda: neighborhood_attention_fn(3, attention_kwargs=wrong),
    ):
        refused(error, ("attention_kwargs", *parts), make)


def test_one_tile_overrides_that_of_the_whole_layout() -> None:
    """``q_tile_size`` without ``kv_tile_size`` is valid only if the window is the whole layout.

    The key/value tile then comes from the call's ``kv_tile_shape``.
    """
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


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "same",
    [
        {"scale": None, "is_causal": False},
        {"scale": 0.25, "return_lse": False},
        {"scale": np.float32(0.25), "is_causal": np.bool_(False)},
        {"scale": jnp.float32(0.25), "torch_compile": False, "backward_use_pt_reduction": False},
    ],
)
def test_values_of_the_call_may_be_repeated(use: str, same: dict[str, Any]) -> None:
    np.testing.assert_allclose(run(use, same), run(use, None), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("own", "call"),
    [
        ({"scale": 1.0}, {}),
        ({"scale": 0.25}, {"scale": 1.0}),
        ({"scale": np.ones(2)}, {}),
        ({"scale": 0.5}, {"scale": jnp.float32(0.25)}),
        ({"is_causal": True}, {}),
        ({"return_lse": True}, {}),
        ({"return_lse": False}, {"return_lse": True}),
    ],
)
def test_contradictions_are_refused(use: str, own: dict[str, Any], call: dict[str, Any]) -> None:
    (name,) = own
    with pytest.raises(ValueError, match=rf"^attention_kwargs: {name}=.* contradicts "):
        run(use, own, **call)


def test_causal_attention_of_a_whole_sequence() -> None:
    expected = run("whole layout", None, is_causal=True)
    np.testing.assert_array_equal(run("whole layout", {"is_causal": True}, is_causal=True), expected)
    with pytest.raises(ValueError, match=r"^attention_kwargs: is_causal=False contradicts .*is_causal=True"):
        run("whole layout", {"is_causal": False}, is_causal=True)
    # Attention to additional tokens is never causal, so False agrees with the call.
    run("additional", {"is_causal": False}, is_causal=True)
    with pytest.raises(ValueError, match=r"^attention_kwargs: is_causal=True contradicts .*is_causal=False"):
        run("additional", {"is_causal": True}, is_causal=True)


def test_a_traced_scale_must_be_the_scale_of_the_call() -> None:
    jax.jit(lambda scale: run("whole layout", {"scale": scale}, scale=scale))(0.5)
    with pytest.raises(ValueError, match=r"^attention_kwargs: scale=0.5 contradicts the call's scale"):
        jax.jit(lambda scale: run("whole layout", {"scale": 0.5}, scale=scale))(0.5)
    assert jnp.isfinite(run("whole layout", {"return_lse": True}, return_lse=True)[1]).all()


def test_flax_modules_accept_repeated_values() -> None:
    flax_layers = pytest.importorskip("tests.support.flax_layers")
    inputs = jnp.ones((1, 5, 6, 16))
    for own, is_same in (({"scale": 0.5, "is_causal": False}, True), ({"scale": 0.25}, False)):
        module = flax_layers.LINEN[2](num_heads=2, kernel_size=(5, 6), qk_scale=0.5, attention_kwargs=own)
        if is_same:
            module.init_with_output(jax.random.key(0), inputs)
            continue
        with pytest.raises(ValueError, match=r"^attention_kwargs: scale=0.25 contradicts the call's scale, 0.5"):
            module.init_with_output(jax.random.key(0), inputs)
