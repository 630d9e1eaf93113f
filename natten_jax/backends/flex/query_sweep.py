"""A sweep over query tiles, and what it loads of keys and values."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax

from natten_jax.arrays.operands import Operands
from natten_jax.backends.flex.bias import TileBias
from natten_jax.backends.flex.blocks import TilePositions
from natten_jax.backends.flex.operands import AdditionalTiles, PlacedSweep
from natten_jax.backends.flex.shapes import MaskTiles, Scalar, TokenTiles, ValueTiles
from natten_jax.performance import Pass
from natten_jax.plan.plan import Plan


class QuerySweep(NamedTuple):
    """A sweep whose outer tiles are queries.

    Attributes:
        placed: The sweep, and where its tiles lie.
        biases: What is added to logits.
        keys: The keys, as they are loaded.
        values: The values, likewise.
        additional: Additional keys and values; ``None`` where a call has none.
    """

    placed: PlacedSweep
    biases: TileBias
    keys: Annotated[jax.Array, "batch heads_kv *coordinates head_dim"]
    values: Annotated[jax.Array, "batch heads_kv *coordinates head_dim_v"]
    additional: AdditionalTiles | None

    @classmethod
    def of(cls, plan: Plan, operands: Operands, pass_: Pass) -> QuerySweep:
        """That of a pass."""
        inputs, placed = operands.inputs, PlacedSweep.of(plan, operands, pass_, outer_is_query=True)
        sweep = placed.sweep
        biases = TileBias.of(plan.problem, inputs, sweep)
        keys, values = sweep.split_inner(inputs.key), sweep.split_inner(inputs.value)
        additional = AdditionalTiles.of(inputs.additional_keys, inputs.additional_values, sweep)
        return cls(placed, biases, keys, values, additional)

    def inner_tiles(self, positions: TilePositions, inner_step: Scalar) -> tuple[TokenTiles, ValueTiles, MaskTiles]:
        """Keys and values of a step, and which of them each row sees."""
        problem, sweep = self.placed.plan.problem, self.placed.sweep
        key = sweep.load(self.keys, positions, inner_step, problem.heads_kv)
        value = sweep.load(self.values, positions, inner_step, problem.heads_kv)
        return key, value, sweep.mask(positions, inner_step, problem.heads // problem.heads_kv)
