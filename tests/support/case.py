"""Descriptions of test problems, and random inputs for them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import natten_jax
from tests.support import oracle
from tests.support.families import Family

Shape = tuple[int, ...]

OPERATORS: Mapping[int, Callable[..., Any]] = {1: natten_jax.na1d, 2: natten_jax.na2d, 3: natten_jax.na3d}


@dataclasses.dataclass(frozen=True)
class Case:
    """Description of one neighborhood attention problem or, if ``queries`` is given, of one plain attention problem.

    Attributes:
        layout: Token layout of key and value, and of the query unless ``queries``, ``box`` or ``upsample`` is given.
        kernel_size: Window size. ``None`` is the whole layout.
        stride: Number of queries that share a window, per dimension.
        dilation: Distance between neighbors, per dimension.
        is_causal: One bool per dimension, True for causal attention.
        edges: Boundary mode of each dimension: ``"shift"``, ``"cut"`` or ``"wrap"``.
        batch: Batch size.
        heads: Number of query heads.
        heads_kv: Number of key/value heads.
        head_dim: Head dimension of query and key.
        head_dim_v: Head dimension of value. ``None`` is ``head_dim``.
        scale: Scale of the logits. ``None`` is the default.
        scales: Scales of the logits, passed as an array operand instead of ``scale``. One value per query head, or a
            single value, which becomes a scalar array.
        additional: Number of additional key/value tokens.
        fused: Value of ``try_fuse_additional_kv``: True to process additional tokens in the same kernel.
        queries: Number of query tokens. If it is given, the problem is plain attention, and ``layout`` contains the
            number of keys.
        box: Extents of the query box within the layout.
        origins: Origins of the query box: one for all batch entries, or one per batch entry.
        extents: Valid extents of the layout, per batch entry. Tokens beyond these extents are padding, filled with NaN.
            In plain attention, the extent is the number of valid keys.
        query_lengths: Number of valid queries of plain attention, per batch entry.
        upsample: Number of queries per key in each dimension.
        relative_bias: True to add a relative bias to the logits.
        table_size: Window size for which the relative bias table is made. Needed if the window is clamped to a smaller
            size. ``None`` is ``kernel_size``.
        key_bias: Key bias: ``"tokens"`` shares it among heads, ``"heads"`` has one per head, ``None`` adds no key bias.
        hidden: Fraction of the key biases that are ``-inf``, which masks out these keys.
        sinks: True to add an attention sink per head.
    """

    layout: Shape
    kernel_size: Shape | None = None
    stride: Shape | None = None
    dilation: Shape | None = None
    is_causal: tuple[bool, ...] | None = None
    edges: tuple[str, ...] | None = None
    batch: int = 1
    heads: int = 1
    heads_kv: int = 1
    head_dim: int = 8
    head_dim_v: int | None = None
    scale: float | None = None
    scales: tuple[float, ...] | None = None
    additional: int = 0
    fused: bool = False
    queries: int | None = None
    box: Shape | None = None
    origins: tuple[Shape, ...] | None = None
    extents: tuple[Shape, ...] | None = None
    query_lengths: tuple[int, ...] | None = None
    upsample: Shape | None = None
    relative_bias: bool = False
    table_size: Shape | None = None
    key_bias: str | None = None
    hidden: float = 0.0
    sinks: bool = False

    @property
    def query_layout(self) -> Shape:
        if self.queries is not None:
            return (self.queries,)
        finer = self.upsample or (1,) * self.rank
        return tuple(n * factor for n, factor in zip(self.box or self.layout, finer, strict=True))

    @property
    def is_placed(self) -> bool:
        """True if the problem has query origins, valid extents, query lengths or upsampling."""
        return any(each is not None for each in (self.origins, self.extents, self.query_lengths, self.upsample))

    @property
    def is_padded(self) -> bool:
        return self.extents is not None or self.query_lengths is not None

    def entry_boxes(self) -> list[tuple[Shape, Shape]]:
        """Return the query origin and the valid extents of each batch entry, with defaults filled in."""
        origins = self.origins or ((0,) * self.rank,)
        origins = origins if len(origins) == self.batch else origins * self.batch
        return list(zip(origins, self.extents or (self.layout,) * self.batch, strict=True))

    def real_keys(self) -> np.ndarray:
        """Return a mask of the keys that are not padding, ``[batch, *layout]``."""
        indices = np.indices(self.layout)
        return np.stack(
            [np.all([i < n for i, n in zip(indices, real, strict=True)], axis=0) for _, real in self.entry_boxes()]
        )

    def real_queries(self) -> np.ndarray:
        """Return a mask of the queries that are not padding, ``[batch, *query_layout]``."""
        if self.queries is not None:
            lengths = self.query_lengths or (self.queries,) * self.batch
            return np.stack([np.arange(self.queries) < length for length in lengths])
        indices, finer = np.indices(self.query_layout), self.upsample or (1,) * self.rank
        return np.stack(
            [
                np.all(
                    [first + i // f < n for i, f, first, n in zip(indices, finer, origin, real, strict=True)], axis=0
                )
                for origin, real in self.entry_boxes()
            ]
        )

    @property
    def rank(self) -> int:
        """Number of token dimensions."""
        return len(self.layout)

    @property
    def causal(self) -> tuple[bool, ...]:
        """Causal dimensions, with the default filled in."""
        return self.is_causal or (False,) * self.rank

    @property
    def window_arguments(self) -> dict[str, Any]:
        """``kernel_size``, ``stride``, ``dilation``, ``is_causal`` and ``edges``, with defaults filled in."""
        ones = (1,) * self.rank
        return {
            "kernel_size": self.kernel_size or self.layout,
            "stride": self.stride or ones,
            "dilation": self.dilation or ones,
            "is_causal": self.causal,
            "edges": self.edges or ("shift",) * self.rank,
        }

    def with_heads(self, heads: int, heads_kv: int) -> Case:
        """Return the problem with other head counts. Scales per head are repeated cyclically."""
        scales = self.scales if self.scales is None or len(self.scales) == 1 else (self.scales * heads)[:heads]
        return dataclasses.replace(self, heads=heads, heads_kv=heads_kv, scales=scales)

    def fitted(self, family: Family) -> Case:
        """Return the problem with each head dimension rounded up to a multiple that the family supports."""
        step = family.head_dim_step

        def fit(width: int) -> int:
            return -(-width // step) * step

        head_dim_v = None if self.head_dim_v is None else fit(self.head_dim_v)
        return dataclasses.replace(self, head_dim=fit(self.head_dim), head_dim_v=head_dim_v)

    def with_edges_of(self, family: Family, *, is_direct: bool = False) -> Case:
        """Return the problem with edge modes that the family supports.

        Args:
            family: The family that runs the problem.
            is_direct: True for direct calls of the backend. Some backends support ``"wrap"`` only through an operator,
                which computes wrapped keys in separate calls.
        """
        if self.edges is None:
            return self
        backend = family.backend
        edges = [edge if edge in backend.capabilities.edges else "shift" for edge in self.edges]
        for i, (edge, extent) in enumerate(zip(edges, self.layout, strict=True)):
            tokens = extent // self.window_arguments["dilation"][i]
            is_ragged = tokens % self.window_arguments["stride"][i] != 0
            if edge == "wrap" and backend.capabilities.wraps_by_strips and (is_direct or is_ragged):
                edges[i] = "cut"
        return dataclasses.replace(self, edges=tuple(edges))

    def mask(self) -> np.ndarray:
        """Return the oracle's visibility ``[query tokens, key tokens]``, with a batch axis if masks can differ."""
        if self.is_placed:
            return np.stack([self._mask_of_entry(i, *facts) for i, facts in enumerate(self.entry_boxes())])
        if self.queries is not None:
            return oracle.attention_mask(self.queries, self.layout[0], self.causal[0])
        return oracle.neighborhood_mask(self.layout, **self.window_arguments)

    def _mask_of_entry(self, number: int, origin: Shape, extents: Shape) -> np.ndarray:
        if self.queries is None:
            return oracle.neighborhood_mask(
                self.layout,
                **self.window_arguments,
                queries=self.query_layout,
                origin=origin,
                upsample=self.upsample,
                extents=extents,
            )
        mask = oracle.attention_mask(origin[0] + self.queries, self.layout[0], self.causal[0])[origin[0] :]
        mask[:, extents[0] :] = False
        if self.query_lengths is not None:
            mask[self.query_lengths[number] :] = False
        return mask

    def place_arguments(self) -> dict[str, Any]:
        """Return the operator arguments for positions of tokens: origins, lengths, extents and upsampling."""
        given: dict[str, Any] = {}
        if self.origins is not None:
            per_entry = len(self.origins) > 1
            given["query_origin"] = jnp.asarray(self.origins if per_entry else self.origins[0], jnp.int32)
        if self.queries is not None:
            lengths = {"kv_lengths": self.extents and [n for (n,) in self.extents], "query_lengths": self.query_lengths}
            return given | {name: jnp.asarray(each, jnp.int32) for name, each in lengths.items() if each is not None}
        if self.extents is not None:
            given["extents"] = jnp.asarray(self.extents, jnp.int32)
        return given if self.upsample is None else given | {"upsample": self.upsample}

    @property
    def actual_scale(self) -> float:
        """The scale, with the default filled in."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def operands(self, dtype: str, seed: int) -> oracle.Tensors:
        """Return random normal operands as JAX arrays."""
        return jax.tree.map(jax.device_put, self.host_operands(dtype, seed))

    def host_operands(self, dtype: str, seed: int) -> oracle.Tensors:
        """Return random normal operands as NumPy arrays."""
        rng = np.random.default_rng(seed)
        width_v = self.head_dim_v or self.head_dim
        queries = self.query_layout

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(jnp.dtype(dtype))

        drawn = oracle.Tensors(
            draw(self.batch, *queries, self.heads, self.head_dim),
            draw(self.batch, *self.layout, self.heads_kv, self.head_dim),
            draw(self.batch, *self.layout, self.heads_kv, width_v),
            draw(self.batch, self.additional, self.heads_kv, self.head_dim) if self.additional else None,
            draw(self.batch, self.additional, self.heads_kv, width_v) if self.additional else None,
            None
            if self.scales is None
            else np.asarray(self.scales if self.scales[1:] else self.scales[0], lse_dtype(dtype)),
            *self._logit_terms(lse_dtype(dtype), seed),
        )
        return self.padded_with(math.nan, drawn)

    def padded_with(self, number: float, operands: oracle.Tensors) -> oracle.Tensors:
        """Return the operands with all elements of padding tokens set to a number."""
        if not self.is_padded:
            return operands
        real_queries, real_keys = (each[..., None, None] for each in (self.real_queries(), self.real_keys()))

        def padded(array: np.ndarray, is_real: np.ndarray) -> np.ndarray:
            return np.where(is_real, array, np.asarray(number, array.dtype))

        query, key, value, *others = operands
        found = oracle.Tensors(padded(query, real_queries), padded(key, real_keys), padded(value, real_keys), *others)
        if found.key_bias is None:
            return found
        is_real = self.real_keys() if self.key_bias == "tokens" else self.real_keys()[:, None]
        return found._replace(key_bias=padded(found.key_bias, is_real))

    def _logit_terms(self, dtype: str, seed: int) -> tuple[np.ndarray | None, ...]:
        """Return relative bias, key bias and sinks."""
        rng = np.random.default_rng([seed, 4])
        window = self.table_size or self.kernel_size or self.layout
        heads = (self.heads,) if self.key_bias == "heads" else ()
        table = rng.standard_normal((self.heads, *(2 * size - 1 for size in window)))
        key_bias = rng.standard_normal((self.batch, *heads, *self.layout))
        key_bias[rng.random(key_bias.shape) < self.hidden] = -np.inf
        sinks = rng.standard_normal(self.heads)
        asked = (table, self.relative_bias), (key_bias, self.key_bias is not None), (sinks, self.sinks)
        return tuple([array.astype(dtype) if is_asked else None for array, is_asked in asked])

    def entries(self) -> np.ndarray | None:
        """Return indices into the relative bias table for each query and key, computed by the oracle."""
        if not self.relative_bias:
            return None
        found = oracle.relative_entries(self.layout, **self.window_arguments, table_size=self.table_size)
        if not self.is_placed:
            return found
        by_query = found.reshape(*self.layout, -1)
        boxes = [
            by_query[tuple(slice(a, a + n) for a, n in zip(origin, self.query_layout, strict=True))]
            for origin, _ in self.entry_boxes()
        ]
        return np.stack(boxes).reshape(self.batch, -1, found.shape[1])

    def cotangents(self, dtype: str, seed: int) -> tuple[jax.Array, jax.Array]:
        """Return random cotangents of output and logsumexp."""
        out, lse = self.host_cotangents(dtype, seed)
        return jax.device_put(out), jax.device_put(lse)

    def host_cotangents(self, dtype: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return random cotangents of output and logsumexp as NumPy arrays."""
        rng = np.random.default_rng([seed, 1])
        shape = (self.batch, *self.query_layout, self.heads)
        out = 0.05 * rng.standard_normal((*shape, self.head_dim_v or self.head_dim))
        lse = 0.05 * rng.standard_normal(shape)
        if self.is_padded:
            is_real = self.real_queries()[..., None]
            out, lse = np.where(is_real[..., None], out, math.nan), np.where(is_real, lse, math.nan)
        return out.astype(jnp.dtype(dtype)), lse.astype(lse_dtype(dtype))

    def operator(self, backend: str | None = None, **arguments: Any) -> Callable[[oracle.Tensors], tuple[Any, Any]]:
        """Return a function that calls the public operator: it maps operands to output and logsumexp."""

        def run(operands: oracle.Tensors) -> tuple[Any, Any]:
            query, key, value, additional_keys, additional_values, scale, *terms = operands
            given = zip(("relative_bias", "key_bias", "sinks"), terms, strict=True)
            common = {
                "scale": self.scale if scale is None else scale,
                "backend": backend,
                "return_lse": True,
                **self.place_arguments(),
                **{name: array for name, array in given if array is not None},
                **arguments,
            }
            if self.queries is not None:
                return natten_jax.attention(query, key, value, is_causal=self.causal[0], **common)
            return OPERATORS[self.rank](
                query,
                key,
                value,
                additional_keys=additional_keys,
                additional_values=additional_values,
                try_fuse_additional_kv=self.fused,
                **{**self.window_arguments, **common},
            )

        return run


def lse_dtype(dtype: str) -> str:
    """Return the element type of the logsumexp."""
    return "float64" if dtype == "float64" else "float32"


def element_types(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context that enables 64-bit types in JAX if ``dtype`` is float64."""
    return jax.enable_x64(dtype == "float64")
