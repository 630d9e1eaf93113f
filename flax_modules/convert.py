"""Convert weights from the PyTorch modules of NATTEN and Hugging Face to parameters of the Flax modules.

NATTEN's ``NeighborhoodAttention1D``, ``2D`` and ``3D`` have ``qkv.weight`` ``[3 * features, features]``, ``qkv.bias``
(if ``qkv_bias`` is set), ``proj.weight`` ``[features, features]`` and ``proj.bias``. The rows of ``qkv.weight`` belong
to query, key and value, in this order. Within each of the three, the rows are ordered by head, then by head dimension.
Modules of NATTEN releases before 0.20 may also have a relative bias ``rpb`` ``[heads, 2 * kernel_size - 1, ...]``.

The attention of NAT and DiNAT in Hugging Face's transformers has two submodules. The submodule ``self`` has ``query``,
``key`` and ``value`` instead of ``qkv``, and also has ``rpb``. The submodule ``output`` has ``dense`` instead of
``proj``.

Weights may be PyTorch tensors or NumPy arrays; PyTorch need not be installed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from natten_jax.arguments.static import shown

from .attention_fn import check_positive
from .nnx import NeighborhoodAttention, NeighborhoodAttention1D, NeighborhoodAttention2D, NeighborhoodAttention3D

__all__ = ["linen_params", "load_nnx"]

FloatArray = npt.NDArray[np.floating[Any]]


def linen_params(
    state_dict: Mapping[str, Any], num_heads: int, *, prefix: str = "", param_dtype: Any = None
) -> dict[str, Any]:
    """Convert the weights of a NATTEN module to parameters for ``flax.linen``.

    Example:
        >>> import numpy as np
        >>> from natten_jax.flax_modules import convert
        >>> shapes = {"qkv.weight": (96, 32), "qkv.bias": 96}
        >>> shapes |= {"proj.weight": (32, 32), "proj.bias": 32}
        >>> weights = {f"attn.{name}": np.ones(shape) for name, shape in shapes.items()}
        >>> convert.linen_params(weights, num_heads=2, prefix="attn.")["query"]["kernel"].shape
        (32, 2, 16)

    Args:
        state_dict: The ``state_dict()`` of the NATTEN module or of a whole model.
        num_heads: Number of heads of the module.
        prefix: Prefix of the module's names in ``state_dict``. For NATTEN, the prefix precedes ``qkv.weight``; an
            example is ``"blocks.0.attn."``. For Hugging Face's NAT and DiNAT, the prefix precedes
            ``self.query.weight``; an example is ``"dinat.encoder.levels.0.layers.0.attention."``.
        param_dtype: Type of the parameters; ``None`` keeps the type of the weights.

    Returns:
        ``{"query": {"kernel", "bias"}, "key": ..., "value": ..., "out": ...}``, and ``"rpb"`` if ``state_dict`` has a
        relative bias. Use the result as ``module.apply({"params": params}, inputs)``.

    Raises:
        ValueError: A weight is missing or has an unexpected shape, or ``num_heads`` does not match the weights.
        TypeError: A weight is not an array of floats, or another argument is of the wrong type.
    """
    if param_dtype is not None and not _is_float(param_dtype):
        raise TypeError(f"param_dtype must be None or a float type, got {shown(param_dtype)}")
    projections, rpb = _split(state_dict, num_heads, prefix)
    params: dict[str, Any] = jax.tree.map(lambda array: jnp.asarray(array, param_dtype), projections)
    return params if rpb is None else params | {"rpb": jnp.asarray(rpb, param_dtype)}


def load_nnx(
    module: NeighborhoodAttention1D | NeighborhoodAttention2D | NeighborhoodAttention3D,
    state_dict: Mapping[str, Any],
    *,
    prefix: str = "",
) -> None:
    """Load the weights of a NATTEN module into a module for ``flax.nnx``, in place.

    The weights are converted to the ``param_dtype`` of the module.

    Example:
        >>> import numpy as np
        >>> from flax import nnx
        >>> from natten_jax.flax_modules import convert
        >>> from natten_jax.flax_modules.nnx import NeighborhoodAttention2D
        >>> shapes = {"qkv.weight": (96, 32), "qkv.bias": 96}
        >>> shapes |= {"proj.weight": (32, 32), "proj.bias": 32}
        >>> weights = {f"attn.{name}": np.ones(shape) for name, shape in shapes.items()}
        >>> layer = NeighborhoodAttention2D(32, num_heads=2, kernel_size=3, rngs=nnx.Rngs(0))
        >>> convert.load_nnx(layer, weights, prefix="attn.")

    Args:
        module: The module. It must have as many key/value heads as query heads, and ``normalize_qk=False``. If the
            module is from ``nnx.eval_shape``, arrays replace its abstract parameters; its random streams do not change.
        state_dict: The ``state_dict()`` of the NATTEN module or of a whole model.
        prefix: Prefix of the module's names in ``state_dict``. For NATTEN, the prefix precedes ``qkv.weight``; an
            example is ``"blocks.0.attn."``. For Hugging Face's NAT and DiNAT, the prefix precedes
            ``self.query.weight``; an example is ``"dinat.encoder.levels.0.layers.0.attention."``.

    Raises:
        ValueError: A weight is missing, has an unexpected shape, or does not match the module. The module is then
            unchanged.
        TypeError: A weight is not an array of floats. The module is then unchanged.
    """
    if not isinstance(module, NeighborhoodAttention):
        raise TypeError(f"module must be a NeighborhoodAttention module for flax.nnx, got {shown(module)}")
    if module.num_kv_heads != module.num_heads:
        raise ValueError(
            f"module has num_kv_heads {module.num_kv_heads} and num_heads {module.num_heads}: NATTEN requires "
            "equal numbers of key/value heads and query heads"
        )
    if module.query_ln is not None:
        raise ValueError("module has normalize_qk=True: NATTEN's modules do not normalize queries and keys")
    projections, rpb = _split(state_dict, module.num_heads, prefix)
    wanted = [("a relative bias, rpb,", f"{prefix}rpb has", "relative_bias", module.rpb, rpb)]
    for name, group in projections.items():
        for kind in ("kernel", "bias"):
            variable = getattr(getattr(module, name), kind)
            shape = f"{prefix}* gives {name}.{kind} the"
            wanted.append((f"a {kind} for {name}", shape, "qkv_bias", variable, group.get(kind)))
    loads: list[tuple[nnx.Param[jax.Array], FloatArray]] = []
    for parameter, shape, argument, variable, array in wanted:
        if variable is None and array is None:
            continue
        if variable is None or array is None:
            has, lacks = ("the module", prefix + "*") if array is None else (prefix + "*", "the module")
            raise ValueError(f"{has} has {parameter} but {lacks} does not: {argument} must agree")
        if variable.shape != array.shape:
            raise ValueError(f"{shape} shape {array.shape}, but the module's is {variable.shape}")
        loads.append((variable, array))
    for variable, array in loads:
        placed = _placed_like(variable, array)
        if isinstance(variable.get_value(), jax.ShapeDtypeStruct):
            variable.set_value(placed)
        else:
            variable[...] = placed


def _placed_like(variable: nnx.Param[jax.Array], array: FloatArray) -> jax.Array:
    """Convert the array to the dtype and the sharding of the variable."""
    sharding = getattr(variable.get_value(), "sharding", None)
    array = array.astype(variable.dtype)
    # The sharding of a traced value has an abstract mesh, which has no devices.
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return jax.device_put(array, sharding)
    return jnp.asarray(array)


_Weights = tuple[dict[str, dict[str, FloatArray]], FloatArray | None]


def _split(state_dict: Mapping[str, Any], num_heads: int, prefix: str) -> _Weights:
    """Check the weights. Return the projections by name, in Flax's shapes, and the relative bias or ``None``."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a mapping of names to weights, got {type(state_dict).__name__}")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a str, got {shown(prefix)}")
    check_positive(num_heads=num_heads)
    # Hugging Face's attention has the submodules `self` (query, key and value) and `output` (the output projection).
    inner = next((own for own in (prefix, f"{prefix}self.") if f"{own}query.weight" in state_dict), None)
    if inner is None:
        inner, source, weights = prefix, f"{prefix}qkv.weight", _joint(state_dict, prefix)
    elif f"{prefix}qkv.weight" in state_dict:
        raise ValueError(f"state_dict has {prefix}qkv.weight and {inner}query.weight: it is ambiguous which to load")
    else:
        source = f"{inner}query.weight"
        weights = [_pair(state_dict, inner, name) for name in ("query", "key", "value")]
    features = weights[0][0].shape[-1]
    if features % num_heads:
        raise ValueError(f"num_heads {num_heads} does not divide the {features} features of {source}")
    head = num_heads, features // num_heads
    projections: dict[str, dict[str, FloatArray]] = {}
    for name, (weight, bias) in zip(("query", "key", "value"), weights, strict=True):
        # PyTorch's weights have shape [out, in], Flax's kernels [in, out].
        projections[name] = {"kernel": weight.T.reshape(features, *head)}
        if bias is not None:
            projections[name]["bias"] = bias.reshape(head)
    outer = inner.removesuffix("self.")
    is_dense = f"{outer}output.dense.weight" in state_dict or (
        inner != prefix and f"{prefix}proj.weight" not in state_dict
    )
    at, out = (outer, "output.dense") if is_dense else (prefix, "proj")
    kernel = _tensor(state_dict, at, f"{out}.weight", (features, features), source).T.reshape(*head, features)
    projections["out"] = {"kernel": kernel, "bias": _tensor(state_dict, at, f"{out}.bias", (features,), source)}
    rpb = _tensor(state_dict, inner, "rpb") if f"{inner}rpb" in state_dict else None
    if rpb is not None and (
        rpb.ndim not in (2, 3, 4) or rpb.shape[0] != num_heads or not all(n % 2 for n in rpb.shape[1:])
    ):
        raise ValueError(
            f"{inner}rpb has shape {rpb.shape}, but NATTEN's is [heads, 2 * kernel_size - 1, ...] of {num_heads} heads"
        )
    return projections, rpb


_Pair = tuple[FloatArray, FloatArray | None]


def _joint(state_dict: Mapping[str, Any], prefix: str) -> list[_Pair]:
    """Split NATTEN's ``qkv`` projection into the weight and bias of query, key and value."""
    weight = _tensor(state_dict, prefix, "qkv.weight")
    if weight.ndim != 2 or weight.shape[0] != 3 * weight.shape[1]:
        raise ValueError(f"{prefix}qkv.weight has shape {weight.shape}, but NATTEN's is [3 * features, features]")
    features = weight.shape[1]
    biases: Sequence[FloatArray | None] = (None, None, None)
    if f"{prefix}qkv.bias" in state_dict:
        biases = [*_tensor(state_dict, prefix, "qkv.bias", (3 * features,), f"{prefix}qkv.weight").reshape(3, features)]
    return [*zip(weight.reshape(3, features, features), biases, strict=True)]


def _pair(state_dict: Mapping[str, Any], prefix: str, name: str) -> _Pair:
    """Return the weight and bias of one of Hugging Face's projections ``query``, ``key`` and ``value``."""
    weight = _tensor(state_dict, prefix, f"{name}.weight")
    features = _tensor(state_dict, prefix, "query.weight").shape[-1:]
    if weight.shape != features * 2:
        raise ValueError(
            f"{prefix}{name}.weight has shape {weight.shape}, but {prefix}query.weight requires {features * 2}"
        )
    bias = None
    if f"{prefix}{name}.bias" in state_dict:
        bias = _tensor(state_dict, prefix, f"{name}.bias", features, f"{prefix}query.weight")
    if (bias is None) != (f"{prefix}query.bias" not in state_dict):
        raise ValueError(f"{prefix}query.bias and {prefix}{name}.bias: all projections have a bias, or none")
    return weight, bias


def _tensor(
    state_dict: Mapping[str, Any], prefix: str, name: str, shape: tuple[int, ...] | None = None, source: str = ""
) -> FloatArray:
    """Return the weight ``prefix + name``.

    If ``shape`` is given, the weight must have this shape. The error message for a different shape says that the weight
    ``source`` requires ``shape``.
    """
    if prefix + name not in state_dict:
        matches = [re.match(r"(.*?)(qkv|(self\.)?query)\.weight$", key) for key in state_dict if isinstance(key, str)]
        prefixes = ", ".join(sorted(repr(match[1]) for match in matches if match))
        known = (
            f"prefixes of NATTEN modules in it are {prefixes}" if prefixes else "it has no qkv.weight or query.weight"
        )
        raise ValueError(f"state_dict has no {prefix + name!r} (prefix={prefix!r}); {known}")
    array = _float_array(prefix + name, state_dict[prefix + name])
    if shape is not None and array.shape != shape:
        raise ValueError(f"{prefix}{name} has shape {array.shape}, but {source} requires {shape}")
    return array


def _float_array(name: str, tensor: Any) -> FloatArray:
    """Convert a weight to a NumPy array."""
    rule = f"state_dict[{name!r}] must be an array of floats"
    if hasattr(tensor, "detach"):
        # NumPy rejects PyTorch tensors that require gradients, that are on a GPU, or whose dtype NumPy lacks.
        tensor = tensor.detach().cpu()
        tensor = tensor.float() if "bfloat16" in str(tensor.dtype) else tensor
    try:
        array: FloatArray = np.asarray(tensor)
    except (TypeError, ValueError) as error:  # ragged lists, or a dtype that NumPy lacks
        raise TypeError(f"{rule}, got {type(tensor).__name__}: {error}") from None
    if not _is_float(array.dtype):
        raise TypeError(f"{rule}, got {type(tensor).__name__} of dtype {array.dtype}")
    return array.astype(array.dtype.newbyteorder("="), copy=False)  # weights from files may have the other byte order


def _is_float(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:  # not a dtype
        return False
