"""Shapes of the arrays that the ``flex`` backend works on, in jaxtyping's words: an extent of a name is one in a call.

A *row* of a tile is a query of one of the heads that share a key/value head, which come one after the other. A pass
over key/value tiles loads queries, and has rows and tokens the other way round.
"""

from __future__ import annotations

from typing import Annotated

import jax

#: As users have it: queries, keys, values, and what there is for each of them.
Tokens = Annotated[jax.Array, "batch *layout heads width"]
#: Outer tiles, by the step of a sweep that takes them.
Cut = Annotated[jax.Array, "steps tiles batch heads_kv rows width"]
#: Inner tokens by index and residue of each dimension, so that tiles are cut out anywhere.
Split = Annotated[jax.Array, "batch heads *coordinates width"]

RowTiles = Annotated[jax.Array, "tiles batch heads_kv rows width"]
TokenTiles = Annotated[jax.Array, "tiles batch heads_kv tokens width"]
ValueTiles = Annotated[jax.Array, "tiles batch heads_kv tokens width_v"]
#: A number for each pair: scores, logits, weights and their gradients.
PairTiles = Annotated[jax.Array, "tiles batch heads_kv rows tokens"]
#: Which tokens a row sees; tiles and rows that are alike have one extent of 1.
MaskTiles = Annotated[jax.Array, "_ 1 1 _ tokens"]
#: A number for each row, of tiles or of anything else.
PerRow = Annotated[jax.Array, "... 1"]

#: A number for each head.
PerHead = Annotated[jax.Array, "batch heads"]
Scalar = Annotated[jax.Array, ""]
