"""What a backend is: the protocol between the differentiable operator and a family of kernels."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax

from natten_jax.devices import Device
from natten_jax.passes import Pass, TilePair
from natten_jax.problem import Problem, TileConfig


def requested_pair(tiles: TileConfig, pass_: Pass) -> TilePair | None:
    """The tile shapes that the user asked for in a pass."""
    if pass_ == "forward":
        pair = tiles.q_tile_shape, tiles.kv_tile_shape
    else:
        pair = tiles.backward_q_tile_shape, tiles.backward_kv_tile_shape
    return None if pair[0] is None or pair[1] is None else (pair[0], pair[1])


class Operands(NamedTuple):
    """The arrays of one call, heads last, in the caller's rank.

    Attributes:
        query: ``[batch, *query_layout, heads, head_dim]``.
        key: ``[batch, *kv_layout, heads_kv, head_dim]``.
        value: ``[batch, *kv_layout, heads_kv, head_dim_v]``.
        additional_keys: ``[batch, additional_kv, heads_kv, head_dim]``, or ``None``.
        additional_values: ``[batch, additional_kv, heads_kv, head_dim_v]``, or ``None``.
        origins: int32 ``[2, 3]``: where the local query and key/value tokens start in the global layout,
            last dimension last; ``None`` where nothing is sharded.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    additional_keys: jax.Array | None
    additional_values: jax.Array | None
    origins: jax.Array | None


class Gradients(NamedTuple):
    """Cotangents of the differentiable operands, in their shapes and dtypes."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    additional_keys: jax.Array | None
    additional_values: jax.Array | None


class Output(NamedTuple):
    """Output ``[batch, *query_layout, heads, head_dim_v]`` and logsumexp ``[batch, *query_layout, heads]``."""

    out: jax.Array
    logsumexp: jax.Array


class Saved(NamedTuple):
    """What the backward pass reads of the forward pass: its output, and what float32 leaves out of the logsumexp.

    Attributes:
        out: As in :class:`Output`.
        logsumexp: As in :class:`Output`.
        remainder: ``[batch, *query_layout, heads]``, float32, in whatever unit the backend computes logits. Where these
            are large the rounding of the logsumexp alone would change weights by any factor. ``None`` where another
            backend computed the output: logits differ from backend to backend, by as much as this corrects.
    """

    out: jax.Array
    logsumexp: jax.Array
    remainder: jax.Array | None


class Backend(Protocol):
    """A family of kernels, addressed as ``<family>-fna`` and ``<family>-fmha``."""

    family: str
    #: What the names of its configuration queries call it: ``get_configs_for_<query_family>_fna``.
    query_family: str
    #: Whether ``forward`` is plain JAX that JAX itself can differentiate to any order.
    is_pure_jax: bool
    #: Whether ``forward`` takes additional key/value tokens.
    fuses_additional_kv: bool

    def rejection(self, problem: Problem, device: Device, pass_: Pass) -> str | None:
        """Why this backend cannot run a pass of the problem on the device; ``None`` where it can."""

    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        """Query and key/value tile shapes of a pass, the recommended pair first."""

    def offers(self, problem: Problem, device: Device, pass_: Pass, pair: TilePair) -> bool:
        """Whether the kernels accept this pair of tile shapes, listed or not."""

    def forward(self, problem: Problem, tiles: TileConfig, operands: Operands) -> Output:
        """Compute output and logsumexp."""

    def forward_saving(self, problem: Problem, tiles: TileConfig, operands: Operands) -> Saved:
        """Compute them for a backward pass."""

    def backward(
        self,
        problem: Problem,
        tiles: TileConfig,
        operands: Operands,
        saved: Saved,
        out_cotangent: jax.Array,
        logsumexp_cotangent: jax.Array,
    ) -> Gradients:
        """Compute the gradients of the differentiable operands."""
