"""Argument names: positional order, names from other libraries, misspellings, and the names of window arguments."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax import plot, problem
from natten_jax.arguments.names import explanation
from natten_jax.performance import ATTENTION_NAMES, KernelSchedule
from natten_jax.profiler.options import profiler_parser
from natten_jax.windows import Axis, WindowArguments
from tests.support.problems import OPERATORS

# Positional arguments have NATTEN's order. docs/coming-from-natten.md names the last positional argument.


WINDOWS = "query key value kernel_size stride dilation is_causal scale additional_keys additional_values"


@pytest.mark.parametrize(
    ("name", "order"),
    [
        *((f"na{rank}d", f"{WINDOWS} attention_kwargs backend") for rank in (1, 2, 3)),
        ("attention", "query key value scale"),
    ],
)
def test_positional_order(name: str, order: str) -> None:
    parameters = inspect.signature(getattr(natten_jax, name)).parameters.values()
    assert [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD] == order.split()


def test_more_arguments_by_position_than_there_are() -> None:
    layers = pytest.importorskip("tests.support.flax_layers")
    message = r"^NeighborhoodAttention2D\(\) takes in_features by position, and .*: write num_heads=4, kernel_size=7$"
    for module in (layers.NNX[2], layers.LINEN[2]):
        with pytest.raises(TypeError, match=message):
            module(64, 4, 7)  # NATTEN's order
    with pytest.raises(TypeError, match=r"^attention\(\) takes query, key, value, scale by position"):
        operator: Any = natten_jax.attention
        operator(*(ARRAY,) * 3, 0.5, False)


# If a keyword is misspelled or comes from another library, the error suggests the intended name or a replacement.


ARRAY = jnp.zeros((1, 8, 2, 8))


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(TypeError) as caught:
        call()
    return str(caught.value)


#: Each row contains an unknown keyword, and the names that three errors suggest instead: the errors of ``na1d`` to
#: ``na3d``, of ``attention``, and of the modules. ``None`` if an error suggests no name.
NAMES = [
    ("window_size", "kernel_size", None, "kernel_size"),
    ("kernal_size", "kernel_size", None, "kernel_size"),
    ("causal", "is_causal", "is_causal", "is_causal"),
    ("softmax_scale", "scale", "scale", "qk_scale"),
    ("dropout", None, None, "attn_drop"),
    ("periodic", "edges", None, "edges"),
    ("key_padding_mask", "key_bias", "key_bias", None),
    ("deterministic_backward", None, None, None),
    ("kernel_schedul", "kernel_schedule", "kernel_schedule", "kernel_schedule"),
    ("kv_tile_size", "kv_tile_shape", None, "kv_tile_shape"),
    ("bakend", "backend", "backend", "backend"),
    ("memory_usage_preferance", *["memory_usage_preference"] * 3),
    ("mask", None, None, None),
    ("rel_pos_bias", "relative_bias", None, "relative_bias"),
    ("attention_sinks", "sinks", "sinks", "sinks"),
    ("softcap", None, None, None),
    ("heads", None, None, "num_heads"),
    ("additional_key", "additional_keys", None, None),
]

#: For some unknown keywords, a text that their error messages contain if the messages suggest no name.
EXPLAINED = {
    "window_size": "attention sees all keys",
    "mask": "key_bias masks keys: a bool array",
    "rel_pos_bias": "only na1d, na2d and na3d have offsets",
    "dropout": "use attn_drop or proj_drop of the modules",
    "softcap": "soft caps of logits are not supported",
    "heads": "the shapes of the arrays determine the heads",
}


def check(message: str, function: str, name: str, meant: str | None) -> None:
    assert message.startswith(f"{function}() got an unexpected keyword argument {name!r}"), message
    found = re.search(r": did you mean '(\w+)'\?", message)
    assert (found and found[1]) == meant, message
    if meant is None:
        assert EXPLAINED.get(name, "") in message
    assert not re.search(r"\b_\w", message)


@pytest.mark.parametrize(("name", "operators", "attention_name", "module_name"), NAMES)
def test_operators(name: str, operators: str | None, attention_name: str | None, module_name: str | None) -> None:
    for rank, operator in OPERATORS.items():
        array: Any = jnp.zeros((1, *(4,) * rank, 2, 8))
        for window in ({}, {"kernel_size": 3}):  # the error reports the unknown name even if kernel_size is missing
            message = refusal(lambda: operator(array, array, array, **window, **{name: 3}))  # noqa: B023
            check(message, f"na{rank}d", name, operators)
    if name != "kv_tile_size":
        attention: Any = natten_jax.attention
        check(refusal(lambda: attention(ARRAY, ARRAY, ARRAY, **{name: 3})), "attention", name, attention_name)


@pytest.mark.parametrize(("name", "operators", "attention_name", "module_name"), NAMES)
def test_modules(name: str, operators: str | None, attention_name: str | None, module_name: str | None) -> None:
    pytest.importorskip("flax")
    from flax import nnx
    from natten_jax.flax_modules import linen
    from natten_jax.flax_modules import nnx as modules
    from natten_jax.flax_modules.attention_fn import neighborhood_attention_fn

    rngs = nnx.Rngs(0)
    for window in ({}, {"kernel_size": 3}):
        given: dict[str, Any] = {**window, name: 3}
        for rank in (1, 2, 3):
            label = f"NeighborhoodAttention{rank}D"
            nnx_module, linen_module = getattr(modules, label), getattr(linen, label)
            check(refusal(lambda: nnx_module(16, num_heads=2, rngs=rngs, **given)), label, name, module_name)  # noqa: B023
            check(refusal(lambda: linen_module(num_heads=2, **given)), label, name, module_name)  # noqa: B023
        message = refusal(lambda: neighborhood_attention_fn(**given))  # noqa: B023
        assert message.startswith(f"neighborhood_attention_fn() got an unexpected keyword argument {name!r}")


def test_calls_of_modules() -> None:
    pytest.importorskip("flax")
    from flax import nnx
    from natten_jax.flax_modules import linen
    from natten_jax.flax_modules import nnx as modules

    layer: Any = modules.NeighborhoodAttention1D(16, num_heads=2, kernel_size=3, rngs=nnx.Rngs(0))
    module: Any = linen.NeighborhoodAttention1D(num_heads=2, kernel_size=3)
    inputs = jnp.zeros((1, 8, 16))
    for call in (lambda **more: layer(inputs, **more), lambda **more: module.init(jax.random.key(0), inputs, **more)):
        check(refusal(lambda: call(mask=None)), "NeighborhoodAttention1D", "mask", None)  # noqa: B023
    nnx_module: Any = modules.NeighborhoodAttention1D
    linen_module: Any = linen.NeighborhoodAttention1D
    for missing in (lambda: nnx_module(16), linen_module, layer):
        assert not re.search(r"\b_[A-Za-z]", refusal(missing))


def test_unknown_arguments_of_linen_subclasses_and_configuration_queries() -> None:
    query: Any = natten_jax.get_configs_for_cpu_fna
    check(refusal(lambda: query(ARRAY, window_size=3)), "get_configs_for_cpu_fna", "window_size", "kernel_size")
    pytest.importorskip("flax")
    from natten_jax.flax_modules import linen

    class Mine(linen.NeighborhoodAttention1D):
        blur: int = 0

    assert Mine(num_heads=2, kernel_size=3, blur=1).blur == 1
    make: Any = Mine
    check(refusal(lambda: make(num_heads=2, window_size=3)), "Mine", "window_size", "kernel_size")


@pytest.mark.parametrize("name", ["", "x" * 10**6, "zzz", "a b", "é"])
def test_names_without_a_similar_argument(name: str) -> None:
    message = refusal(lambda: natten_jax.na1d(ARRAY, ARRAY, ARRAY, 3, **{name: 1}))  # type: ignore[call-overload]
    assert message == f"na1d() got an unexpected keyword argument {name!r}"


def test_known_names_mean_themselves() -> None:
    """The name of a valid argument is not reported as a misspelling of another argument."""
    for function, own in ((natten_jax.na2d, ATTENTION_NAMES.values()), (natten_jax.attention, ATTENTION_NAMES.keys())):
        known = {*inspect.signature(function).parameters, *own} - {"performance"}
        for name in known:
            found = re.search(r"did you mean '(\w+)'", explanation(name, known))
            assert found is None or found[1] == name


def test_schedules_have_natten_s_names() -> None:
    for ours, theirs, value in (
        ("NON_PERSISTENT", "NonPersistent", "non"),
        ("COOPERATIVE", "WarpSpecializedCooperative", "coop"),
        ("PING_PONG", "WarpSpecializedPingpong", "pp"),
    ):
        member = KernelSchedule[theirs]
        assert member is KernelSchedule[ours] is KernelSchedule(value) is getattr(KernelSchedule, theirs)
        assert member.natten_name == theirs
        assert member == value
    assert len(KernelSchedule) == 3
    with pytest.raises(ValueError, match="got 'WarpSpecializedPingpong': did you mean 'pp'"):
        natten_jax.na1d(ARRAY, ARRAY, ARRAY, 3, kernel_schedule="WarpSpecializedPingpong")


@pytest.mark.parametrize("value", [[], np.ones(3), object(), 7, "fast"], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", ["kernel_schedule", "memory_usage_preference", "backend"])
def test_values_that_are_no_choice(name: str, value: Any) -> None:
    operator: Any = natten_jax.na1d
    with pytest.raises(ValueError, match=rf"^{name}.* one of "):
        operator(ARRAY, ARRAY, ARRAY, 3, **{name: value})


def test_merge_accepts_natten_arguments_and_rejects_others() -> None:
    merge: Any = functools.partial(natten_jax.merge_attentions, [ARRAY, 3 * ARRAY + 1], [ARRAY[..., 0]] * 2)
    for given in ({"torch_compile": True}, {"torch_compile": np.bool_(False), "use_autograd_fix": True}):
        jax.tree.map(np.testing.assert_array_equal, merge(**given), merge())
    refused: list[tuple[dict[str, Any], str]] = [
        ({"torch_compile": 1}, "takes torch_compile=True or False only, got 1"),
        ({"use_autograd_fix": False}, "takes use_autograd_fix=True only, got False: gradients"),
        ({"backward_use_pt_reduction": False}, "got an unexpected keyword argument"),
        ({"scale": 1.0}, "got an unexpected keyword argument 'scale'"),
    ]
    for given, message in refused:
        assert refusal(functools.partial(merge, **given)).startswith(f"merge_attentions() {message}")


# Every function with window arguments has all window arguments.


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


def test_axes_have_the_window_arguments() -> None:
    assert tuple(Axis.__dataclass_fields__)[2:] == WindowArguments._fields


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
def test_whatever_takes_windows_takes_all_of_their_arguments(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert set(WindowArguments._fields) <= parameters.keys()
    assert parameters["edges"].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["edges"].default == "shift"
    assert "    edges: " in (function.__doc__ or "")
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument 'edge'"):
        function(edge="wrap")


def test_modules_have_them() -> None:
    pytest.importorskip("flax")
    from natten_jax.flax_modules import attention_fn, linen, nnx

    modules = (nnx.NeighborhoodAttention2D.__init__, linen.NeighborhoodAttention2D)
    for function in (*modules, attention_fn.neighborhood_attention_fn):
        parameters = inspect.signature(function).parameters
        assert set(WindowArguments._fields) <= parameters.keys()
        assert parameters["edges"].default == "shift"


def test_the_profiler_has_flags_for_them() -> None:
    arguments = vars(profiler_parser().parse_args(["-i", "8"]))
    assert set(WindowArguments._fields) <= arguments.keys()
