"""Random problems whose tokens are split over up to eight devices, in a process of its own.

``python -c "from tests.support import halos; halos.main()" MODE FAMILY SEED COUNT`` prints a line of JSON for each:
what is split how, the collectives of the compiled program and the elements that a device sends, the kernels that it
calls, and how far results and gradients are from those of one device. Whether it pays to compute while halos travel is
not asked: two of three do, where no tokens are gathered; in one of these keys and values travel together, as large ones
do.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from natten_jax.cost_model import halos
from natten_jax.halo import halos_of
from natten_jax.problem import problem_of
from natten_jax.sharding.halos import overlap
from natten_jax.windows import WindowArguments
from tests.support.problems import OPERATORS, QUICK_COMPILATION

NAMES = ("x", "y", "z")
PARTS: dict[int, list[tuple[int, ...]]] = {
    1: [(8,), (4,), (2,)],
    2: [(4, 2), (2, 2), (2, 4), (8, 1), (1, 4)],
    3: [(2, 2, 2), (1, 2, 4), (2, 1, 2), (1, 1, 2)],
}
MOST_TOKENS = {1: 12, 2: 6, 3: 4}  # of a part, per dimension
TYPES = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit, "Manual": AxisType.Auto}
HEAD_DIM = 8
_MOVED = re.compile(
    r"= (?:\()?\w+\[([\d,]*)\][^=]*? (collective-permute|all-gather|all-to-all|all-reduce)(?:-start)?\("
)


class Split(NamedTuple):
    """A problem and the parts of its token dimensions."""

    parts: tuple[int, ...]
    layout: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    is_causal: tuple[bool, ...]
    edges: tuple[str, ...]
    batch: int
    heads: int
    heads_kv: int
    additional: int
    tile: tuple[int, ...]

    @classmethod
    def draw(cls, source: random.Random) -> Split:
        """Three of four have halos; windows as large as the layout are attention, whose tokens are gathered."""
        has_halos = source.random() < 0.75
        while True:
            drawn = cls._draw(source)
            if not drawn.problem.is_attention and (drawn.calls > 1 or not has_halos):
                return drawn

    @classmethod
    def _draw(cls, source: random.Random) -> Split:
        rank = source.choice([1, 1, 2, 2, 3])
        parts = source.choice(PARTS[rank])
        layout = [source.randint(1, MOST_TOKENS[rank]) * each for each in parts]
        dilation = [source.randint(1, max(1, min(3, extent // 2))) for extent in layout]
        # Half of all windows are small, whose halos come from the next part alone.
        most = [max(1, extent // d) for extent, d in zip(layout, dilation, strict=True)]
        kernel = [source.randint(1, min(each, source.choice([4, each]))) for each in most]
        stride = [source.randint(1, each) for each in kernel]
        causal = [source.random() < 0.3 for _ in kernel]
        edges = [
            "shift" if each else source.choice(["shift", "shift", "cut", "wrap" if extent % d == 0 else "cut"])
            for each, extent, d in zip(causal, layout, dilation, strict=True)
        ]
        heads, heads_kv = source.choice([(1, 1), (2, 2), (2, 1)])
        batch, additional = source.choice([1, 2]), source.choice([0, 0, 3])
        return cls(
            parts,
            tuple(layout),
            tuple(kernel),
            tuple(stride),
            tuple(dilation),
            tuple(causal),
            tuple(edges),
            batch,
            heads,
            heads_kv,
            additional,
            tuple(source.choice([1, 1, 2]) for _ in kernel),
        )

    @property
    def problem(self) -> Any:
        return problem_of(self.layout, **self._window)

    @property
    def _window(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in WindowArguments._fields}

    @property
    def is_gathered(self) -> bool:
        """Whether some dimension's parts need all keys."""
        return any(halo.is_gathered for halo in halos_of(self.problem, self.parts))

    @property
    def calls(self) -> int:
        """Kernels of a forward pass that computes while halos travel: with a device's own keys, then with each slab."""
        halos = halos_of(self.problem, self.parts)
        if self.is_gathered:
            return 1
        # Each of two devices has one halo, though the program is the same for both; but two in a ring.
        return 1 + sum(
            1 if halo.parts == 2 and not halo.wraps else len(halo.slabs(halo.before)) + len(halo.slabs(halo.after))
            for halo in halos
            if halo.received
        )

    def elements_sent(self) -> int:
        """Elements of keys and values that the slabs of exact halos hold, dimension after dimension."""
        extents = [extent // each for extent, each in zip(self.layout, self.parts, strict=True)]
        total = 0
        for i, halo in enumerate(halos_of(self.problem, self.parts)):
            if halo.parts > 1:
                slabs = [halo.before, halo.after]
                sent, received = sum(slabs), sum(slabs)
                if halo.parts == 2 and all(slabs) and not halo.wraps:
                    # Each of two devices sends in one direction only, and they change places.
                    sent, received = max(slabs), 2 * max(slabs)
                total += sent * math.prod(extents[:i] + extents[i + 1 :])
                extents[i] += received
        return total * self.batch * self.heads_kv * 2 * HEAD_DIM

    def arrays(self) -> list[jax.Array]:
        """Cotangents of output and logsumexp, query, key, value and additional keys and values."""
        generator = np.random.default_rng(0)
        query = (self.batch, *self.layout, self.heads, HEAD_DIM)
        key = (self.batch, *self.layout, self.heads_kv, HEAD_DIM)
        more = [(self.batch, self.additional, self.heads_kv, HEAD_DIM)] * 2 if self.additional else []
        shapes = [query, query[:-1], query, key, key, *more]
        return [jnp.asarray(generator.standard_normal(shape), "float32") for shape in shapes]

    def function(self, backend: str, token_axes: Any = None) -> Callable[..., Any]:
        def attend(query: Any, key: Any, value: Any, *more: Any) -> Any:
            keys, values = more or (None, None)
            return OPERATORS[len(self.layout)](
                query, key, value, **self._window,
                additional_keys=keys, additional_values=values, backend=backend, return_lse=True,
                q_tile_shape=self.tile, kv_tile_shape=self.tile, token_axes=token_axes,
                backward_q_tile_shape=self.tile, backward_kv_tile_shape=self.tile,
            )  # fmt: skip

        return attend


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(out_cotangent: Any, lse_cotangent: Any, *arrays: Any) -> Any:
        results, vjp = jax.vjp(function, *arrays)
        return (*results, *vjp((out_cotangent, lse_cotangent)))

    return run


def check(mode: str, backend: str, split: Split, overlaps: bool, together: bool) -> dict[str, Any]:
    """Run a problem on one device and on several.

    Args:
        mode: One of :data:`TYPES`.
        backend: Its name.
        split: The problem.
        overlaps: Passes compute while halos travel.
        together: Keys and values travel as one then.
    """
    overlap._COMBINED_BYTES = 0 if together else 1 << 40
    halos.gains = lambda *_: overlaps  # type: ignore[assignment]
    halos.overlap_that_pays.cache_clear()
    arrays = split.arrays()
    names = NAMES[: len(split.parts)]
    devices = jax.devices()[: math.prod(split.parts)]
    mesh = jax.make_mesh(split.parts, names, axis_types=(TYPES[mode],) * len(names), devices=devices)
    tokens = P(None, *names)
    specs = [tokens] * 5 + [P()] * (len(arrays) - 5)
    placed = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs, strict=True)]
    function = split.function(backend)
    expected = jax.jit(with_gradients(function), compiler_options=QUICK_COMPILATION)(*arrays)
    if mode == "Manual":
        local = split.function(backend, names)
        function = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs[2:]), out_specs=(tokens, tokens))
    with jax.set_mesh(mesh) if mode == "Explicit" else contextlib.nullcontext():
        lowered = jax.jit(with_gradients(function)).lower(*placed)
        compiled = lowered.compile(compiler_options=QUICK_COMPILATION)
        forward = jax.jit(function).lower(*placed[2:]).compile(compiler_options=QUICK_COMPILATION)
        found = compiled(*placed)
    moved = [(kind, math.prod(map(int, shape.split(",")))) for shape, kind in _MOVED.findall(forward.as_text() or "")]
    return {
        "split": str(split),
        "is_gathered": split.is_gathered,
        "sent": sum(elements for kind, elements in moved if kind == "collective-permute"),
        "expected to be sent": split.elements_sent(),
        "forward": sorted({kind for kind, _ in moved}),
        "all": sorted({kind for _, kind in _MOVED.findall(compiled.as_text() or "")}),
        "scatters": lowered.as_text().count("stablehlo.scatter"),
        "calls": (forward.as_text() or "").count('custom_call_target="natten_jax'),
        "expected calls": split.calls if overlaps else 1,
        "is split": all(
            found[i].sharding.is_equivalent_to(placed[j].sharding, found[i].ndim) for i, j in enumerate((2, 1, 2, 3, 4))
        ),
        "error": max(map(_distance, found, expected)),
    }


def _distance(found: jax.Array, expected: jax.Array) -> float:
    """Relative to the largest value; gradients that are zero but for rounding count by their terms, of order 1."""
    magnitude = max(float(jnp.max(jnp.abs(expected))), 0.1)
    return float(np.max(np.abs(np.asarray(found) - np.asarray(expected)))) / magnitude


def main() -> None:
    """Print what was found."""
    mode, backend, seed, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    source = random.Random(seed)
    for number, split in enumerate(map(Split.draw, [source] * count)):
        print(json.dumps(check(mode, backend, split, overlaps=number % 3 != 1, together=number % 3 == 2)), flush=True)
