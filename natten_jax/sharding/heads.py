"""How query heads are split over devices, and which key/value heads each part of them needs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arrays.roles import Role


@dataclasses.dataclass(frozen=True)
class HeadSplit:
    """Equal parts of the query heads.

    Attributes:
        heads: Query heads.
        heads_kv: Key/value heads, which as many query heads each share in turn.
        parts: How many parts; they divide ``heads``.
        kv_parts: Into how many equal parts key/value heads are split. Each part of the query heads reads one of them;
            or, where they are not split, some heads of all (:attr:`needed`).
    """

    heads: int
    heads_kv: int
    parts: int
    kv_parts: int

    @classmethod
    def of(cls, heads: int, heads_kv: int, parts: int, kv_parts: int) -> HeadSplit:
        """How ``parts`` of the query heads go with key/value heads that come in ``kv_parts``."""
        fits = kv_parts == parts or (kv_parts == heads_kv and parts % heads_kv == 0)
        return cls(heads, heads_kv, parts, kv_parts if fits else 1)

    @property
    def takes(self) -> bool:
        """Whether a part of the query heads needs some only of the key/value heads that are there."""
        return self.kv_parts == 1 < min(self.parts, self.heads_kv)

    @functools.cached_property
    def needed(self) -> np.ndarray:
        """The key/value heads that each part reads, ``[parts, heads]``: as groups of equal size, or one per query."""
        groups = self.heads // self.heads_kv
        of_query = (np.arange(self.heads) // groups).reshape(self.parts, -1)
        local = of_query.shape[1]
        if local % groups == 0:
            return of_query[:, ::groups]
        return of_query[:, :1] if groups % local == 0 else of_query

    def run_on_taken(
        self,
        run: Callable[..., Any],
        arrays: Sequence[jax.Array],
        inputs: Sequence[Role],
        outputs: Sequence[Role],
        part: jax.Array,
    ) -> list[jax.Array]:
        """Run a part of the query heads on the key/value heads that it needs, taken from all of them.

        Results for key/value heads have all of them again, zeros where the part does not need them.
        """
        taken = jnp.asarray(self.needed)[part]
        results = run(
            *(
                jnp.take(array, taken, axis=array.ndim - 2) if role.is_key_value else array
                for array, role in zip(arrays, inputs, strict=True)
            )
        )
        return [
            jnp.zeros((*result.shape[:-2], self.heads_kv, result.shape[-1]), result.dtype).at[..., taken, :].add(result)
            if role.is_key_value
            else result
            for result, role in zip(results, outputs, strict=True)
        ]
