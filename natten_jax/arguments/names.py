"""Error messages for unknown keyword arguments and for arguments of wrong types.

The message for an unknown argument suggests the intended argument. Names of arguments of NATTEN
and other libraries are also recognized.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import starmap, zip_longest
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from natten_jax.arguments.static import int_tuple, shown

Function = TypeVar("Function", bound=Callable[..., Any])


class Neutral(NamedTuple):
    """An argument of NATTEN that is accepted here, but has no effect.

    Attributes:
        values: Accepted values.
        instead: End of the error message for other values: an explanation, or the argument to use instead.
    """

    values: tuple[bool, ...]
    instead: str


#: Arguments of NATTEN's operators, and of their ``attention_kwargs``, that are accepted here without effect.
NEUTRAL_OPERATOR_ARGUMENTS: Mapping[str, Neutral] = MappingProxyType(
    {
        "torch_compile": Neutral((False,), "jax.jit compiles every call"),
        "backward_use_pt_reduction": Neutral((False,), "use backward_use_xla_reduction instead"),
    }
)
#: Arguments of NATTEN's ``merge_attentions`` that are accepted here without effect. NATTEN compiles merges by
#: default, so ``torch_compile=True`` is accepted.
NEUTRAL_MERGE_ARGUMENTS: Mapping[str, Neutral] = MappingProxyType(
    {
        "torch_compile": Neutral((True, False), "every merge is compiled"),
        "use_autograd_fix": Neutral((True,), "gradients are always the gradients of attention over all keys"),
    }
)


def reject_unknown_kwargs(
    names: Iterable[str] = (), natten_arguments: Mapping[str, Neutral] = NEUTRAL_OPERATOR_ARGUMENTS
) -> Callable[[Function], Function]:
    """Return a decorator that rejects unknown keyword arguments before the call, and suggests the intended argument.

    Without the decorator, Python could report a missing argument instead. For example, it would report that
    ``kernel_size`` is missing if the caller gives ``window_size``.

    Args:
        names: Names that the function accepts in addition to its parameters.
        natten_arguments: Arguments of NATTEN that the function also accepts if it has ``**kwargs``.
    """

    def decorate(function: Function) -> Function:
        parameters = inspect.signature(function).parameters.values()
        takes_others = any(each.kind is each.VAR_KEYWORD for each in parameters)
        known = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        known |= set(names)
        accepted = frozenset(known | set(natten_arguments) if takes_others else known)
        positional = (each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)
        by_position = [each for each in positional if each not in ("parent", "name")]  # flax.linen's arguments
        by_name = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        max_positional = math.inf if any(each.kind is each.VAR_POSITIONAL for each in parameters) else len(by_position)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > max_positional:
                names = ", ".join(each for each in by_position if each != "self")
                given = ", ".join(map("{}={}".format, by_name, map(shown, args[len(by_position) :])))
                message = f"{_label(function, args)}() takes {names} by position, and all other arguments by name"
                # NATTEN's constructors accept these arguments by position, in the order of `by_name`. The message
                # shows how to write them with names.
                raise TypeError(f"{message}: write {given}" if function.__name__ == "__init__" else message)
            if not kwargs.keys() <= accepted:
                name = next(each for each in kwargs if each not in accepted)
                raise TypeError(unexpected(_label(function, args), name, known))
            return function(*args, **kwargs)

        return cast(Function, call)

    return decorate


#: Annotations that are not checked. Functions convert arguments with these annotations, and also accept arrays, lists
#: and other types of numbers for them.
_UNCHECKED = (Any, bool, float, tuple, Sequence)


def check_types(function: Function) -> Function:
    """Decorate a function or a method so that it checks arguments against annotations before the call.

    The checked annotations are a class, ``int``, ``Literal`` and ``Iterable``, each optionally with ``| None``.
    Arguments with other annotations are passed on unchecked. An ``int`` argument is converted to a Python int, which
    must be at least 1, or at least 0 if the default is 0.
    """
    parameters = inspect.signature(function).parameters
    # Read the annotations at the first call, because they may contain names that are defined after the function.
    hints = functools.cache(lambda: get_type_hints(inspect.unwrap(function)))

    def checked(name: str, value: Any) -> Any:
        hint = hints().get(name)
        kind, *alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if alternatives and (value is None or alternatives != [NoneType]):
            return value
        origin = get_origin(kind) or kind
        if origin is int:
            return int_tuple(name, value, 1, minimum=int(parameters[name].default != 0))[0]
        if origin is Literal and not (isinstance(value, str) and value in get_args(kind)):
            raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(kind)))}, got {shown(value)}")
        if isinstance(origin, type) and origin not in _UNCHECKED and not isinstance(value, origin):
            raise TypeError(f"{name} must be of type {origin.__name__}, got {shown(value)}")
        return value

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = starmap(checked, zip_longest([*parameters][: len(args)], args))
        return function(*given, **{name: checked(name, value) for name, value in kwargs.items()})

    return cast(Function, call)


def checked_pair(pair: Any, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Convert a query tile and a key/value tile, of ``rank`` token dimensions, to tuples of ints.

    Raises:
        ValueError: There are not two tiles, or a tile does not have one positive extent per token dimension.
        TypeError: A tile is not a sequence of ints.
    """
    try:
        q_tile, kv_tile = pair
    except (TypeError, ValueError):  # not iterable, or not two elements
        raise ValueError(f"pair must be a query tile and a key/value tile, got {shown(pair)}") from None
    q_extents = int_tuple("the query tile of pair", q_tile, rank, repeat=False)
    return q_extents, int_tuple("the key/value tile of pair", kv_tile, rank, repeat=False)


def without_neutral(
    function: str, arguments: Mapping[str, Any], natten_arguments: Mapping[str, Neutral] = NEUTRAL_OPERATOR_ARGUMENTS
) -> dict[str, Any]:
    """Check the arguments of NATTEN that have no effect here, and return the other arguments.

    Args:
        function: Name of the function, for error messages.
        arguments: The arguments of a call.
        natten_arguments: Arguments of NATTEN that the function accepts without effect.

    Raises:
        TypeError: An argument of NATTEN has a value that would have an effect in NATTEN.
    """
    for name in natten_arguments.keys() & arguments.keys():
        check_neutral(f"{function}() takes {name}", natten_arguments[name], arguments[name])
    return {name: value for name, value in arguments.items() if name not in natten_arguments}


def check_neutral(what: str, neutral: Neutral, value: Any) -> None:
    """Check that an argument of NATTEN has one of its accepted values.

    Args:
        what: Start of the error message, up to the name of the argument.
        neutral: The argument.
        value: The given value.

    Raises:
        TypeError: The value is not accepted.
    """
    if not isinstance(value, (bool, np.bool_)) or bool(value) not in neutral.values:
        values = " or ".join(map(str, neutral.values))
        raise TypeError(f"{what}={values} only, got {shown(value)}: {neutral.instead}")


def unexpected(function: str, name: str, known: Iterable[str]) -> str:
    """Return the error message for an unknown argument."""
    return f"{function}() got an unexpected keyword argument {name!r}{explanation(name, set(known))}"


def _label(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return a function's name for error messages. For ``__init__`` and ``__call__``, return the class name."""
    name = function.__name__
    return type(args[0]).__name__ if name in ("__init__", "__call__") and args else name


_LONGEST = 64  # number of leading characters of a name that are compared with known names


class Meaning(NamedTuple):
    """Error message for an argument of another library.

    Attributes:
        here: Names of the corresponding arguments in this package, separated by spaces. The message suggests the first
            one that the function has.
        remark: Explanation of the suggested argument.
        instead: Message if the function has none of these arguments. The default is ``remark``.
    """

    here: str
    remark: str
    instead: str = ""


_HAVE_WINDOWS = "attention sees all keys; na1d, na2d and na3d have windows of kernel_size tokens"
_NO_MASK = "key_bias masks keys: a bool array [batch, *layout], True for keys to keep"
_NO_OFFSETS = "only na1d, na2d and na3d have offsets within windows; key_bias is added to all logits of a key"
_NO_WEIGHTS = (
    "the operators form no attention weights to drop; use attn_drop or proj_drop of the modules, or drop the weights "
    "between neighborhood_weights and neighborhood_apply"
)
_PAD = "pad sequences to one length; extents, or query_lengths and kv_lengths of attention, hide the padding"
_FROM_ARRAYS = "the shapes of the arrays determine it"
_FEWER_HEADS = "key and value may have fewer heads (GQA, MQA)"
_HEADS = "the shapes of the arrays determine the heads; key and value may have fewer than query (GQA, MQA)"

#: Messages for argument names of other libraries. Each key lists several names, separated by spaces.
_MEANINGS = {
    "window_size window window_shape window_sizes win_size kernel kernel_shape kernel_sizes ksize "
    "neighborhood_size neighbourhood_size": Meaning(
        "kernel_size", "it counts all tokens of a window; give one number, or one per dimension", _HAVE_WINDOWS
    ),
    "local_window_size sliding_window sliding_window_size left_window_size right_window_size window_left "
    "window_right": Meaning(
        "kernel_size",
        'it counts all tokens of a window, left + 1 + right; edges="cut" cuts windows at edges instead of shifting',
        _HAVE_WINDOWS,
    ),
    "kernel_size stride dilation": Meaning("", _HAVE_WINDOWS),
    "strides": Meaning("stride", "it counts queries that share a window"),
    "dilations dilation_rate dilate": Meaning("dilation", "it is the distance between neighbors in a window"),
    "causal is_causal_mask causal_mask use_causal_mask use_causal causality": Meaning(
        "is_causal", "it hides later keys", "use is_causal of the operator"
    ),
    "mask masks attn_mask attention_mask block_mask mask_mod score_mod segment_ids q_segment_ids "
    "kv_segment_ids": Meaning("", _NO_MASK),
    "padding_mask key_padding_mask key_mask": Meaning("key_bias", "True keeps a key", _NO_MASK),
    "rel_pos_bias relative_position_bias relative_pos_bias rpb rel_pos rel_bias position_bias pos_bias": Meaning(
        "relative_bias", "it is added to the scaled logits, with an entry per offset", _NO_OFFSETS
    ),
    "attn_bias attention_bias logits_bias alibi alibi_slopes": Meaning(
        "", "only two biases are added to logits: relative_bias, by the offset of a key, and key_bias, by the key"
    ),
    "bias use_bias": Meaning(
        "qkv_bias", "it adds biases to the projections", "relative_bias and key_bias are added to logits"
    ),
    "scale softmax_scale sm_scale qk_scale scaling scale_factor scale_qk attn_scale attention_scale logit_scale "
    "logits_scale": Meaning("scale qk_scale", "it is the factor of the logits, head_dim ** -0.5 by default"),
    "dropout dropout_p dropout_rate dropout_prob attn_drop attn_dropout attention_dropout attn_pdrop drop drop_rate "
    "attn_drop_rate attention_dropout_rate": Meaning(
        "attn_drop", "it drops attention weights, and proj_drop outputs", _NO_WEIGHTS
    ),
    "periodic is_periodic boundary boundaries boundary_condition boundary_conditions padding padding_mode pad_mode "
    "wrap circular edge edge_mode": Meaning(
        "edges", 'it takes "shift", "cut" or "wrap" (periodic); give one, or one per dimension'
    ),
    "dropout_rng dropout_key dropout_seed broadcast_dropout": Meaning("", _NO_WEIGHTS),
    "return_weights return_attn_weights need_weights return_attention return_attn_probs output_attentions": Meaning(
        "", "attention weights are never formed; neighborhood_weights forms them, return_lse is the logsumexp"
    ),
    "return_logsumexp return_softmax_lse return_residual return_residuals need_lse lse": Meaning(
        "return_lse", "the logsumexp is returned as well", "modules return only outputs"
    ),
    "softcap soft_cap logit_cap logit_soft_cap logits_soft_cap attn_logits_soft_cap": Meaning(
        "", "soft caps of logits are not supported"
    ),
    "sink sinks attention_sink attention_sinks": Meaning(
        "sinks",
        "one per head: an extra logit in the softmax denominator, without a value",
        "modules that are constructed with sinks=True learn a sink for each head",
    ),
    "registers extra_keys": Meaning("additional_keys", "with additional_values they are tokens that every query sees"),
    "seqlens_Q seqlens_KV cumulative_seqlen_Q cumulative_seqlen_KV max_seqlen_Q max_seqlen_KV cu_seqlens cu_seqlens_q "
    "cu_seqlens_k max_seqlen_k query_seq_lengths key_value_seq_lengths seq_lens seqlens lengths": Meaning("", _PAD),
    "num_heads n_heads heads nhead num_attention_heads": Meaning("num_heads", _FEWER_HEADS, _HEADS),
    "num_kv_heads kv_heads n_kv_heads num_key_value_heads": Meaning("num_kv_heads", _FEWER_HEADS, _HEADS),
    "enable_gqa num_groups num_query_groups": Meaning("", _HEADS),
    "dim embed_dim d_model features hidden_size in_channels channels input_dim": Meaning(
        "in_features", "it counts the features of a token", _FROM_ARRAYS
    ),
    "out_dim dim_out out_channels output_dim": Meaning(
        "out_features", "it counts the features of a token", _FROM_ARRAYS
    ),
    "head_dim dim_head head_size": Meaning(
        "qkv_features", "it is the width of all query heads together, num_heads * head_dim", _FROM_ARRAYS
    ),
    "qk_norm qk_layernorm normalize_query_key": Meaning("normalize_qk", "it normalizes queries and keys"),
    "decode use_cache cache": Meaning("", "key/value caches are not supported"),
    "rng key_rng seed": Meaning("rngs", "it takes flax.nnx.Rngs"),
    "q queries": Meaning("query", "it is the first argument"),
    "k keys": Meaning("key", "it is the second argument"),
    "v values": Meaning("value", "it is the third argument"),
    "implementation impl kernel_backend attn_implementation": Meaning("backend", "None selects the best backend"),
    "deterministic use_deterministic_algorithms": Meaning(
        "backward_deterministic", "it makes gradients bitwise reproducible"
    ),
    "schedule kernel_type": Meaning("kernel_schedule", 'it takes "non", "coop" or "pp"'),
    "persistent use_persistent_kernel persistent_kernel": Meaning("run_persistent_kernel", "it is True by default"),
    "kv_splits num_splits num_kv_splits": Meaning("backward_kv_splits", "it applies to the backward pass"),
    "memory_preference": Meaning("memory_usage_preference", "it applies to the backward pass"),
    "q_tile q_tile_shape q_tile_size block_q block_size_q block_m": Meaning(
        "q_tile_shape q_tile_size", "give the query tile and the key/value tile together"
    ),
    "kv_tile kv_tile_shape kv_tile_size block_k block_kv block_size_k block_size_kv block_n": Meaning(
        "kv_tile_shape kv_tile_size", "give the query tile and the key/value tile together"
    ),
    "compile": Meaning("", "jax.jit compiles every call"),
    "precision": Meaning("", "use jax.default_matmul_precision, which applies to the operators"),
    "attention_kwargs": Meaning("", "pass its entries directly, as arguments of this function"),
    "token_axes axis_name": Meaning("token_axes", "only na1d, na2d and na3d exchange tokens between devices"),
}

_BY_NAME = {name.lower(): meaning for names, meaning in _MEANINGS.items() for name in names.split()}


def explanation(name: str, known: Collection[str]) -> str:
    """Suggest the intended argument, or an alternative, for an unknown argument.

    Args:
        name: Name of the unknown argument.
        known: Names that the function accepts.

    Returns:
        The end of the error message, beginning with a colon; an empty string if there is no suggestion.
    """
    meaning = _BY_NAME.get(name.lower()) if isinstance(name, str) else None
    if meaning is None:
        meant = next(_nearest(name, known), None) if isinstance(name, str) else None
        return "" if meant is None else f": did you mean {meant!r}?"
    meant = next((each for each in meaning.here.split() if each in known), None)
    if meant is None:
        return f": {meaning.instead or meaning.remark}"
    return f": did you mean {meant!r}? {meaning.remark[0].upper()}{meaning.remark[1:]}"


def _nearest(name: str, known: Collection[str]) -> Iterator[str]:
    """Yield known names similar to ``name``, most similar first."""
    written = name[:_LONGEST].lower()
    yield from difflib.get_close_matches(written, sorted(known), 1, cutoff=0.75)
    # `name` may also be a misspelling of another library's argument. Then yield the known names that correspond to this
    # argument.
    for other in difflib.get_close_matches(written, sorted(_BY_NAME), 1, cutoff=0.85):
        yield from (each for each in _BY_NAME[other].here.split() if each in known)
