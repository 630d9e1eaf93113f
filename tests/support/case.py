"""Test problems: their description and their inputs."""

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
    """One neighborhood attention problem, or, with ``queries``, one attention problem.

    Attributes:
        layout: Token layout of key and value, and of the query unless ``queries`` says otherwise.
        kernel_size: Window; ``None`` is the whole layout.
        stride: Queries that share a window.
        dilation: Distance of neighbors.
        is_causal: Causal dimensions.
        edges: What becomes of windows at the ends of each dimension.
        batch: Batch size.
        heads: Query heads.
        heads_kv: Key/value heads.
        head_dim: Width of query and key.
        head_dim_v: Width of value; ``None`` is ``head_dim``.
        scale: Scale; ``None`` is the default.
        scales: An operand in its place: an array of one scale for each query head, or of one without dimensions.
        additional: Additional key/value tokens.
        fused: Whether they are to be processed by the same kernel.
        queries: Query tokens of plain attention, whose layout is that of the keys.
        box: Extents of the box of the layout that the queries are.
        origins: Where it begins: once, or for each entry of the batch.
        extents: How much of the layout is real, for each entry of the batch. Padding is NaN. Of plain attention, keys.
        query_lengths: How many queries of plain attention are real.
        upsample: Queries for each token, along each dimension.
        relative_bias: Whether logits have one.
        table_size: The ``kernel_size`` of its table, if windows are clamped to a smaller one.
        key_bias: Whether keys have biases: ``"tokens"`` the same for every head, ``"heads"`` one for each; ``None``.
        hidden: Share of these that are ``-inf``.
        sinks: Whether heads have sinks.
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
        """Token layout of the query."""
        if self.queries is not None:
            return (self.queries,)
        finer = self.upsample or (1,) * self.rank
        return tuple(n * factor for n, factor in zip(self.box or self.layout, finer, strict=True))

    @property
    def is_placed(self) -> bool:
        """Whether the queries are not simply those of the layout."""
        return any(each is not None for each in (self.origins, self.extents, self.query_lengths, self.upsample))

    @property
    def is_padded(self) -> bool:
        """Whether there is padding."""
        return self.extents is not None or self.query_lengths is not None

    def entry_facts(self) -> list[tuple[Shape, Shape]]:
        """Origin and extents of each entry of the batch, written out."""
        origins = self.origins or ((0,) * self.rank,)
        origins = origins if len(origins) == self.batch else origins * self.batch
        return list(zip(origins, self.extents or (self.layout,) * self.batch, strict=True))

    def real_keys(self) -> np.ndarray:
        """Which keys are none of the padding, ``[batch, *layout]``."""
        indices = np.indices(self.layout)
        return np.stack(
            [np.all([i < n for i, n in zip(indices, real, strict=True)], axis=0) for _, real in self.entry_facts()]
        )

    def real_queries(self) -> np.ndarray:
        """Which queries are none of the padding, ``[batch, *query_layout]``."""
        if self.queries is not None:
            lengths = self.query_lengths or (self.queries,) * self.batch
            return np.stack([np.arange(self.queries) < length for length in lengths])
        indices, finer = np.indices(self.query_layout), self.upsample or (1,) * self.rank
        return np.stack(
            [
                np.all(
                    [first + i // f < n for i, f, first, n in zip(indices, finer, origin, real, strict=True)], axis=0
                )
                for origin, real in self.entry_facts()
            ]
        )

    @property
    def rank(self) -> int:
        """Number of token dimensions."""
        return len(self.layout)

    @property
    def causal(self) -> tuple[bool, ...]:
        """Causal dimensions, written out."""
        return self.is_causal or (False,) * self.rank

    @property
    def window_arguments(self) -> dict[str, Any]:
        """``kernel_size``, ``stride``, ``dilation``, ``is_causal`` and ``edges``, written out."""
        ones = (1,) * self.rank
        return {
            "kernel_size": self.kernel_size or self.layout,
            "stride": self.stride or ones,
            "dilation": self.dilation or ones,
            "is_causal": self.causal,
            "edges": self.edges or ("shift",) * self.rank,
        }

    def with_heads(self, heads: int, heads_kv: int) -> Case:
        """The problem with other heads, whose scales are these in turn."""
        scales = self.scales if self.scales is None or len(self.scales) == 1 else (self.scales * heads)[:heads]
        return dataclasses.replace(self, heads=heads, heads_kv=heads_kv, scales=scales)

    def fitted(self, family: Family) -> Case:
        """The problem with head dimensions that the family has."""
        step = family.head_dim_step

        def fit(width: int) -> int:
            return -(-width // step) * step

        head_dim_v = None if self.head_dim_v is None else fit(self.head_dim_v)
        return dataclasses.replace(self, head_dim=fit(self.head_dim), head_dim_v=head_dim_v)

    def with_edges_of(self, family: Family, *, is_direct: bool = False) -> Case:
        """The problem with edges of windows that the family has: through the operators, or in its own passes."""
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
        """Visibility ``[query tokens, key tokens]`` by the oracle; of each entry of the batch where they differ."""
        if self.is_placed:
            return np.stack([self._mask_of_entry(i, *facts) for i, facts in enumerate(self.entry_facts())])
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
        """Arguments that say where tokens lie, as the operators take them."""
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
        """The scale, written out."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def operands(self, dtype: str, seed: int) -> oracle.Tensors:
        """Random normal operands as JAX arrays."""
        return jax.tree.map(jax.device_put, self.host_operands(dtype, seed))

    def host_operands(self, dtype: str, seed: int) -> oracle.Tensors:
        """The same as NumPy arrays."""
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
        """The operands, with a number in all that is padding."""
        if not self.is_padded:
            return operands
        real_queries, real_keys = (each[..., None, None] for each in (self.real_queries(), self.real_keys()))

        def padded(array: np.ndarray, is_real: np.ndarray) -> np.ndarray:
            return np.where(is_real, array, np.asarray(number, array.dtype))

        query, key, value, *others = operands
        found = oracle.Tensors(padded(query, real_queries), padded(key, real_keys), padded(value, real_keys), *others)
        if found.key_bias is None:
            return found
        of_keys = self.real_keys() if self.key_bias == "tokens" else self.real_keys()[:, None]
        return found._replace(key_bias=padded(found.key_bias, of_keys))

    def _logit_terms(self, dtype: str, seed: int) -> tuple[np.ndarray | None, ...]:
        """Relative bias, bias of keys and sinks."""
        rng = np.random.default_rng([seed, 4])
        window = self.table_size or self.kernel_size or self.layout
        heads = (self.heads,) if self.key_bias == "heads" else ()
        table = rng.standard_normal((self.heads, *(2 * size - 1 for size in window)))
        of_keys = rng.standard_normal((self.batch, *heads, *self.layout))
        of_keys[rng.random(of_keys.shape) < self.hidden] = -np.inf
        sinks = rng.standard_normal(self.heads)
        asked = (table, self.relative_bias), (of_keys, self.key_bias is not None), (sinks, self.sinks)
        return tuple([array.astype(dtype) if is_asked else None for array, is_asked in asked])

    def entries(self) -> np.ndarray | None:
        """Entries of the relative bias, by the oracle: of each query for each key."""
        if not self.relative_bias:
            return None
        found = oracle.relative_entries(self.layout, **self.window_arguments, table_size=self.table_size)
        if not self.is_placed:
            return found
        by_query = found.reshape(*self.layout, -1)
        boxes = [
            by_query[tuple(slice(a, a + n) for a, n in zip(origin, self.query_layout, strict=True))]
            for origin, _ in self.entry_facts()
        ]
        return np.stack(boxes).reshape(self.batch, -1, found.shape[1])

    def cotangents(self, dtype: str, seed: int) -> tuple[jax.Array, jax.Array]:
        """Random cotangents of output and logsumexp."""
        out, lse = self.host_cotangents(dtype, seed)
        return jax.device_put(out), jax.device_put(lse)

    def host_cotangents(self, dtype: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """The same as NumPy arrays."""
        rng = np.random.default_rng([seed, 1])
        shape = (self.batch, *self.query_layout, self.heads)
        out = 0.05 * rng.standard_normal((*shape, self.head_dim_v or self.head_dim))
        lse = 0.05 * rng.standard_normal(shape)
        if self.is_padded:
            is_real = self.real_queries()[..., None]
            out, lse = np.where(is_real[..., None], out, math.nan), np.where(is_real, lse, math.nan)
        return out.astype(jnp.dtype(dtype)), lse.astype(lse_dtype(dtype))

    def operator(self, backend: str | None = None, **arguments: Any) -> Callable[[oracle.Tensors], tuple[Any, Any]]:
        """The public function on this problem: operands to output and logsumexp."""

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
    """Element type of the logsumexp."""
    return "float64" if dtype == "float64" else "float32"


def element_types(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which JAX has the element type: 64-bit ones are off otherwise."""
    return jax.enable_x64(dtype == "float64")
