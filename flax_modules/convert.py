"""Weights of NATTEN's PyTorch modules for the modules of this package.

NATTEN's ``NeighborhoodAttention1D``, ``2D`` and ``3D`` hold ``qkv.weight`` ``[3 * features, features]``, ``qkv.bias``
(with ``qkv_bias``), ``proj.weight`` ``[features, features]`` and ``proj.bias``. Rows of ``qkv`` are ordered query, key,
value, then head, then head dimension. Tensors may be PyTorch's or NumPy's; PyTorch itself is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from natten_jax.arguments.static import shown

from .arguments import check_positive
from .nnx import NeighborhoodAttention1D, NeighborhoodAttention2D, NeighborhoodAttention3D

__all__ = ["linen_params", "load_nnx"]

FloatArray = npt.NDArray[np.floating[Any]]


def linen_params(
    state_dict: Mapping[str, Any], num_heads: int, *, prefix: str = "", param_dtype: Any = None
) -> dict[str, dict[str, jax.Array]]:
    """The parameters of a module for ``flax.linen`` from those of a NATTEN module.

    Example:
        >>> import numpy as np
        >>> from natten_jax.flax_modules import convert
        >>> shapes = {"qkv.weight": (96, 32), "qkv.bias": 96}
        >>> shapes |= {"proj.weight": (32, 32), "proj.bias": 32}
        >>> weights = {f"attn.{name}": np.ones(shape) for name, shape in shapes.items()}
        >>> convert.linen_params(weights, num_heads=2, prefix="attn.")["query"]["kernel"].shape
        (32, 2, 16)

    Args:
        state_dict: The NATTEN module's, or a whole model's, ``state_dict()``.
        num_heads: Heads of the module, which its weights do not tell.
        prefix: What stands before ``qkv.weight``, such as ``"blocks.0.attn."``.
        param_dtype: Type of the parameters; ``None`` keeps that of the weights.

    Returns:
        ``{"query": {"kernel", "bias"}, "key": ..., "value": ..., "out": ...}``, to be used as
        ``module.apply({"params": params}, inputs)``.

    Raises:
        ValueError: A weight is missing or has an unexpected shape, or ``num_heads`` does not suit them.
        TypeError: A weight is no array of floats, or another argument is of the wrong type.
    """
    if param_dtype is not None and not _is_float(param_dtype):
        raise TypeError(f"param_dtype must be None or a float type, got {shown(param_dtype)}")
    params = _split(state_dict, num_heads, prefix)
    return {
        name: {kind: jnp.asarray(array, param_dtype) for kind, array in group.items()} for name, group in params.items()
    }


def load_nnx(
    module: NeighborhoodAttention1D | NeighborhoodAttention2D | NeighborhoodAttention3D,
    state_dict: Mapping[str, Any],
    *,
    prefix: str = "",
) -> None:
    """Load the weights of a NATTEN module into a module for ``flax.nnx``, in place and in its ``param_dtype``.

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
        module: The module; it must have as many key/value heads as heads. One that ``nnx.eval_shape`` made, whose
            parameters are abstract, gets parameters that are arrays; its random streams stay as they are.
        state_dict: The NATTEN module's, or a whole model's, ``state_dict()``.
        prefix: What stands before ``qkv.weight``, such as ``"blocks.0.attn."``.

    Raises:
        ValueError: A weight is missing, has an unexpected shape, or does not suit the module. The module is unchanged.
        TypeError: A weight is no array of floats. The module is unchanged.
    """
    if module.num_kv_heads != module.num_heads:
        raise ValueError(
            f"module has num_kv_heads {module.num_kv_heads} and num_heads {module.num_heads}: NATTEN has as many "
            "key/value heads as query heads"
        )
    if module.query_ln is not None:
        raise ValueError("module has normalize_qk=True: NATTEN's modules do not normalize queries and keys")
    params = _split(state_dict, module.num_heads, prefix)
    loads: list[tuple[nnx.Param[jax.Array], FloatArray]] = []
    for name, group in params.items():
        projection = getattr(module, name)
        for kind in ("kernel", "bias"):
            variable, array = getattr(projection, kind), group.get(kind)
            if variable is None and array is None:
                continue
            if variable is None or array is None:
                has, lacks = ("the module", prefix + "*") if array is None else (prefix + "*", "the module")
                raise ValueError(f"{has} has a {kind} for {name} and {lacks} has none: qkv_bias must agree")
            if variable.shape != array.shape:
                raise ValueError(
                    f"{prefix}* gives {name}.{kind} the shape {array.shape}, but the module's is {variable.shape}"
                )
            loads.append((variable, array))
    for variable, array in loads:
        placed = _placed_like(variable, array)
        if isinstance(variable.get_value(), jax.ShapeDtypeStruct):
            variable.set_value(placed)
        else:
            variable[...] = placed


def _placed_like(variable: nnx.Param[jax.Array], array: FloatArray) -> jax.Array:
    """The array in the variable's type, split over a mesh as its value is."""
    sharding = getattr(variable.get_value(), "sharding", None)
    array = array.astype(variable.dtype)
    # The sharding of a value that is being traced has no devices.
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return jax.device_put(array, sharding)
    return jnp.asarray(array)


def _split(state_dict: Mapping[str, Any], num_heads: int, prefix: str) -> dict[str, dict[str, FloatArray]]:
    """Checked weights by projection, in Flax's shapes."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a mapping of names to weights, got {type(state_dict).__name__}")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a str, got {shown(prefix)}")
    check_positive(num_heads=num_heads)
    if f"{prefix}rpb" in state_dict:
        raise ValueError(f"state_dict has {prefix}rpb: modules with relative position biases cannot be converted")
    qkv_weight = _tensor(state_dict, prefix, "qkv.weight")
    if qkv_weight.ndim != 2 or qkv_weight.shape[0] != 3 * qkv_weight.shape[1]:
        raise ValueError(f"{prefix}qkv.weight has shape {qkv_weight.shape}, but NATTEN's is [3 * features, features]")
    features = qkv_weight.shape[1]
    if features % num_heads:
        raise ValueError(f"num_heads {num_heads} does not divide the {features} features of {prefix}qkv.weight")
    head = num_heads, features // num_heads
    proj_weight = _tensor(state_dict, prefix, "proj.weight", (features, features))
    params = {
        # PyTorch's kernels are [out, in].
        name: {"kernel": np.moveaxis(weight, -1, 0)}
        for name, weight in zip(("query", "key", "value"), qkv_weight.reshape(3, *head, features), strict=True)
    }
    if f"{prefix}qkv.bias" in state_dict:
        qkv_bias = _tensor(state_dict, prefix, "qkv.bias", (3 * features,)).reshape(3, *head)
        for name, bias in zip(params, qkv_bias, strict=True):
            params[name]["bias"] = bias
    params["out"] = {
        "kernel": proj_weight.T.reshape(*head, features),
        "bias": _tensor(state_dict, prefix, "proj.bias", (features,)),
    }
    return params


def _tensor(state_dict: Mapping[str, Any], prefix: str, name: str, shape: tuple[int, ...] | None = None) -> FloatArray:
    """The checked weight called ``prefix + name``."""
    if prefix + name not in state_dict:
        names = [key for key in state_dict if isinstance(key, str) and key.endswith("qkv.weight")]
        prefixes = sorted(repr(key.removesuffix("qkv.weight")) for key in names)
        known = f"prefixes of NATTEN modules in it are {', '.join(prefixes)}" if prefixes else "it has no qkv.weight"
        raise ValueError(f"state_dict has no {prefix + name!r} (prefix={prefix!r}); {known}")
    array = _float_array(prefix + name, state_dict[prefix + name])
    if shape is not None and array.shape != shape:
        raise ValueError(f"{prefix}{name} has shape {array.shape}, but {prefix}qkv.weight asks for {shape}")
    return array


def _float_array(name: str, tensor: Any) -> FloatArray:
    """A weight as an array of NumPy."""
    rule = f"state_dict[{name!r}] must be an array of floats"
    if hasattr(tensor, "detach"):
        # PyTorch's: NumPy takes none that wants a gradient, is on a GPU, or is of a type that NumPy lacks.
        tensor = tensor.detach().cpu()
        tensor = tensor.float() if "bfloat16" in str(tensor.dtype) else tensor
    try:
        array: FloatArray = np.asarray(tensor)
    except (TypeError, ValueError) as error:  # lists of several lengths, or a type that NumPy lacks
        raise TypeError(f"{rule}, got {type(tensor).__name__}: {error}") from None
    if not _is_float(array.dtype):
        raise TypeError(f"{rule}, got {type(tensor).__name__} of dtype {array.dtype}")
    return array.astype(array.dtype.newbyteorder("="), copy=False)  # files may have the other order


def _is_float(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:  # no dtype at all
        return False
