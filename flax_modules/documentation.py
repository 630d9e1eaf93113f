"""The documentation of the modules for Flax, which is written once for each rank and both flavours."""

from __future__ import annotations

import inspect
import textwrap

from natten_jax.performance import PerformanceArguments
from natten_jax.windows import DOCUMENTED_ARGUMENTS

from .arguments import LAYOUTS

_TOKENS = {1: "a sequence", 2: "an image", 3: "a video or a volume"}

_DOCUMENT = """Multi-head neighborhood attention over {tokens}, with projections, for :mod:`{flavour}`.

{summary}

The parameters are named and shaped like those of Flax's ``MultiHeadAttention``: ``query``, ``key`` and ``value``
have kernels ``[in_features, heads, head_dim]`` and biases ``[heads, head_dim]``, ``out`` has
``[num_heads, head_dim, out_features]`` and ``[out_features]``; with ``normalize_qk``, ``query_ln`` and ``key_ln`` have
scales ``[head_dim]``; with ``relative_bias``, ``rpb`` is ``[heads, 2 * kernel_size - 1, ...]``. {annotations}
Window arguments take {per_dimension}.

Example:
    >>> {imports}
    >>> from natten_jax.flax_modules.{module} import NeighborhoodAttention{rank}D
    >>> inputs = jnp.ones({shape})  # [batch, {layout}, in_features]
    >>> {make}
    >>> {call}
    {shape}

Args:
    in_features: Features per token of the input{in_features}.
    num_heads: Query heads.
    {window_arguments}
    clamp_window: Whether windows that are larger than the layout become the largest that fit.
    qkv_bias: Whether the query, key and value projections have a bias; the output projection always has.
    qk_scale: Factor of the logits; ``None`` is ``head_dim ** -0.5``.
    attn_drop: Rate of a dropout of attention weights. While it is on, weights are formed as an array, at a warning:
        slower than the operators, which run where it is off.
    proj_drop: Rate of the dropout after the output projection.
    num_kv_heads: Key and value heads, a divisor of ``num_heads`` (GQA, MQA); ``None`` is ``num_heads``.
    qkv_features: Features of all query heads together; ``None`` is ``in_features``.
    out_features: Features per token of the output; ``None`` is ``in_features``.
    relative_bias: Whether logits have a learned bias for each offset of a key within a window, as ``relative_bias`` of
        the operators: ``rpb``.
    normalize_qk: Whether the features of each query and key head are normalized, with a learned scale.
    deterministic: Whether dropout is off; the argument of the same name in a call takes precedence. With an
        ``attn_drop`` or ``proj_drop`` above 0 one of the two has to be given.
    dtype: Type to compute in; ``None`` takes what inputs and parameters promote to.
    param_dtype: Type of the parameters.
    precision: Precision of the projections.
    kernel_init: Initializer of the kernels.
    kv_kernel_init: Initializer of the kernels of key and value; ``None`` is ``kernel_init``.
    out_kernel_init: Initializer of the output projection's kernel; ``None`` is ``kernel_init``.
    bias_init: Initializer of the biases.
    kv_bias_init: Initializer of the biases of key and value; ``None`` is ``bias_init``.
    out_bias_init: Initializer of the output projection's bias; ``None`` is ``bias_init``.{metadata}
    attention_kwargs: As in :func:`natten_jax.na{rank}d`, and so are ``backend``, ``fp8``,
        {performance}.{rngs}

Raises:
    ValueError: A value breaks a rule above, or ``backend`` is unknown.
    TypeError: An argument is of the wrong type.
"""

_METADATA = """
    kernel_metadata: What is set beside the kernels, such as ``{"out_sharding": (None, "model", None)}``.
    kv_kernel_metadata: That of the kernels of key and value; ``None`` is ``kernel_metadata``.
    out_kernel_metadata: That of the output projection's kernel; ``None`` is ``kernel_metadata``.
    bias_metadata: What is set beside the biases, such as ``{"out_sharding": ("model", None)}``.
    kv_bias_metadata: That of the biases of key and value; ``None`` is ``bias_metadata``.
    out_bias_metadata: That of the output projection's bias; ``None`` is ``bias_metadata``."""
_ANNOTATIONS = {
    "flax.nnx": "Metadata, or initializers made with\n``nnx.with_partitioning``, split them over a device mesh.",
    "flax.linen": "Initializers made with\n``linen.with_partitioning`` split them over a device mesh.",
}
#: For each flavour: imports, how a module is made, and how it is called.
_EXAMPLES = {
    "flax.nnx": (
        "import jax.numpy as jnp; from flax import nnx",
        "layer = NeighborhoodAttention{rank}D(32, num_heads=2, kernel_size=3, rngs=nnx.Rngs(0))",
        "layer(inputs).shape",
    ),
    "flax.linen": (
        "import jax, jax.numpy as jnp",
        "module = NeighborhoodAttention{rank}D(num_heads=2, kernel_size=3)",
        "module.init_with_output(jax.random.key(0), inputs)[0].shape",
    ),
}
_RNGS = "\n    rngs: Random streams: ``params``, and ``dropout`` where ``proj_drop`` is above 0."
_SUMMARY = (
    "Maps ``[*batch, {layout}, in_features]`` to ``[*batch, {layout}, out_features]``, with any number of batch\n"
    "dimensions, none included{flattened}."
)


def document(rank: int, flavour: str) -> str:
    """The docstring of a module of this rank for ``"flax.nnx"`` or ``"flax.linen"``."""
    is_nnx = flavour == "flax.nnx"
    *names, last = (f"``{name}``" for name in PerformanceArguments.__annotations__)
    imports, make, call = _EXAMPLES[flavour]
    return inspect.cleandoc(_DOCUMENT).format(
        rank=rank,
        window_arguments=DOCUMENTED_ARGUMENTS,
        module=flavour.removeprefix("flax."),
        imports=imports,
        make=make.format(rank=rank),
        call=call,
        shape=(1, *(4,) * rank, 32),
        layout=LAYOUTS[rank],
        performance=textwrap.fill(f"{', '.join(names)} and {last}", 110, subsequent_indent=" " * 8),
        flavour=flavour,
        summary=_SUMMARY.format(
            layout=LAYOUTS[rank],
            flattened=": flattened tokens ``[batch, tokens, in_features]`` need their layout back" if rank > 1 else "",
        ),
        tokens=_TOKENS[rank],
        per_dimension="one value" if rank == 1 else f"{rank} values, or one for all dimensions",
        in_features="" if is_nnx else "; ``None`` takes what the inputs have",
        annotations=_ANNOTATIONS[flavour],
        metadata=_METADATA if is_nnx else "",
        rngs=_RNGS if is_nnx else "",
    )
