"""Token dimensions sharded over devices: neighbors exchange halos, and the results equal those of the oracle."""

from __future__ import annotations

import contextlib
import functools
import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from natten_jax import na1d, na2d
from natten_jax.halo import Halo, bytes_received, halo_of, halos_of
from natten_jax.problem import Problem, problem_of
from natten_jax.sharding.halos import overlap
from natten_jax.windows import EDGES, Axis, group_length, window_bounds
from tests.support import oracle
from tests.support.meshes import assert_close, mesh_of, put
from tests.support.problems import BOUNDS, QUICK_COMPILATION, Case, both_passes, errors


@st.composite
def split_axes(draw: Any) -> tuple[Axis, int]:
    parts = draw(st.integers(1, 8))
    extent = parts * draw(st.integers(1, 12))
    dilation = draw(st.integers(1, extent))
    kernel = draw(st.integers(1, extent // dilation))
    is_causal = draw(st.booleans())
    edges = EDGES[: 3 if extent % dilation == 0 else 2] if not is_causal else EDGES[:1]
    stride = draw(st.integers(1, kernel))
    return Axis(extent, extent, kernel, stride, dilation, is_causal, draw(st.sampled_from(edges))), parts


def seen(axis: Axis, query: int) -> range:
    """Return the coordinates of the keys that a query sees. Wrapped keys have coordinates outside the dimension."""
    group = query % axis.dilation
    length = group_length(axis.kv_extent, axis.dilation, group)
    start, end = window_bounds(axis.window, query // axis.dilation, length)
    return range(int(start) * axis.dilation + group, int(end) * axis.dilation + group, axis.dilation)


@hypothesis.given(split_axes())
def test_halos_are_exact(split: tuple[Axis, int]) -> None:
    axis, parts = split
    halo = halo_of(axis, parts)
    part = axis.kv_extent // parts
    before = after = received = 0
    for start in range(0, axis.kv_extent, part):
        keys = [key for query in range(start, start + part) for key in seen(axis, query)]
        before, after = max(before, start - min(keys)), max(after, max(keys) + 1 - start - part)
    if axis.edges == "wrap":
        # A single device receives no halos. In a ring, every device receives a halo on each side.
        before, after = (before, after) if parts > 1 else (0, 0)
        assert (halo.before, halo.after, halo.received) == (before, after, before + after)
        assert halo.is_gathered == (parts > 1 and before + after >= axis.kv_extent - part)
        return
    for start in range(0, axis.kv_extent, part):
        received = max(received, min(before, start) + min(after, axis.kv_extent - start - part))
    assert (halo.before, halo.after, halo.received) == (before, after, received)
    assert sum(halo.slabs(before)) == before and all(0 < slab <= part for slab in halo.slabs(before))
    assert halo.is_gathered == (parts > 1 and received == axis.kv_extent - part)


@hypothesis.given(split_axes())
def test_queries_that_see_a_slab(split: tuple[Axis, int]) -> None:
    axis, parts = split
    halo = halo_of(axis, parts)
    part, slabs = halo.part, halo.seen_slabs(axis)

    def sees(query: int, is_front: bool, distance: int) -> bool:
        """Return True if, in at least one part, the query sees a key more than ``distance`` tokens from the part."""
        rows = [(start, seen(axis, start + query)) for start in range(0, axis.kv_extent, part)]
        return any(
            min(keys) < start - distance if is_front else max(keys) >= start + part + distance for start, keys in rows
        )

    for slab in slabs:
        sides = [True, False] if slab.is_front is None else [slab.is_front]
        most = 0
        for is_front in sides:
            ordered = range(part) if is_front else range(part - 1, -1, -1)  # from this end of the part to the other end
            assert not any(sees(query, is_front, slab.distance) for query in ordered[slab.queries :])
            most = max(most, *(i + 1 for i, query in enumerate(ordered) if sees(query, is_front, slab.distance)))
        assert slab.queries == most
    front, back = ([slab.keys for slab in slabs if slab.is_front is is_front] for is_front in (True, False))
    if halo.changes_places:
        assert [slab.keys for slab in slabs] == [halo.before] * bool(halo.before)
    else:
        assert (sum(front), sum(back)) == (halo.before, halo.after)


def test_halos_of_a_video() -> None:
    assert halo_of(Axis(80, 80, 24), 2) == Halo(extent=80, parts=2, before=12, after=11)
    assert halo_of(Axis(80, 80, 24, 8), 2) == Halo(extent=80, parts=2, before=8, after=8)
    video = problem_of((30, 48, 80), (6, 12, 12), heads=24, head_dim=128)
    token, halo = 24 * 2 * 128 * 2, 6 + 5
    assert bytes_received(video, (1, 1, 1)) == 0
    assert bytes_received(video, (1, 1, 2)) == 30 * 48 * 6 * token  # two devices: each has one neighbor
    # Halos are exchanged dimension by dimension. Each exchange includes the halos of earlier dimensions, and thereby
    # the corners.
    assert bytes_received(video, (1, 4, 4)) == 30 * (halo * 20 + (12 + halo) * halo) * token


def test_unequal_parts_are_rejected_with_valid_sizes() -> None:
    with pytest.raises(ValueError, match=r"30 tokens, which 4 devices cannot share.* over 3, or make it 28 or 32"):
        halo_of(Axis(30, 30, 3), 4)


SetOverlap = Callable[[Callable[..., bool]], None]
NAMES = ("x", "y", "z")
PARTS: dict[int, list[tuple[int, ...]]] = {
    1: [(8,), (4,), (2,)],
    2: [(4, 2), (2, 2), (2, 4), (8, 1), (1, 4)],
    3: [(2, 2, 2), (1, 2, 4), (2, 1, 2), (1, 1, 2)],
}
MAX_TOKENS = {1: 12, 2: 6, 3: 4}  # largest extent of a part, by rank
_MOVED = re.compile(
    r"= (?:\()?\w+\[([\d,]*)\][^=]*? (collective-permute|all-gather|all-to-all|all-reduce)(?:-start)?\("
)


class Split(NamedTuple):
    """A problem, the number of parts of each token dimension, and the shape of all tiles."""

    case: Case
    parts: tuple[int, ...]
    tile: tuple[int, ...]

    @classmethod
    def draw(cls, source: random.Random) -> Split:
        """Draw a neighborhood attention problem (plain attention gathers tokens). Three of four problems have halos."""
        has_halos = source.random() < 0.75
        while True:
            drawn = cls._draw(source)
            if not drawn.problem.is_attention and (drawn.calls > 1 or not has_halos):
                return drawn

    @classmethod
    def _draw(cls, source: random.Random) -> Split:
        rank = source.choice([1, 1, 2, 2, 3])
        parts = source.choice(PARTS[rank])
        layout = tuple(source.randint(1, MAX_TOKENS[rank]) * each for each in parts)
        dilation = tuple(source.randint(1, max(1, min(3, extent // 2))) for extent in layout)
        # Half of the draws limit windows to four keys, so that most halos come from adjacent parts only.
        most = [max(1, extent // d) for extent, d in zip(layout, dilation, strict=True)]
        kernel = tuple(source.randint(1, min(each, source.choice([4, each]))) for each in most)
        stride = tuple(source.randint(1, each) for each in kernel)
        causal = tuple(source.random() < 0.3 for _ in kernel)
        edges = tuple(
            "shift" if each else source.choice(["shift", "shift", "cut", "wrap" if extent % d == 0 else "cut"])
            for each, extent, d in zip(causal, layout, dilation, strict=True)
        )
        heads, heads_kv = source.choice([(1, 1), (2, 2), (2, 1)])
        batch, additional = source.choice([1, 2]), source.choice([0, 0, 3])
        more: Any = {"batch": batch, "heads": heads, "heads_kv": heads_kv, "additional": additional, "fused": True}
        case = Case(layout, kernel, stride, dilation, causal, edges, **more)
        return cls(case, parts, tuple(source.choice([1, 1, 2]) for _ in kernel))

    @property
    def problem(self) -> Problem:
        return problem_of(self.case.layout, **self.case.window_arguments)

    @property
    def halos(self) -> Sequence[Halo]:
        return halos_of(self.problem, self.parts)

    @property
    def is_gathered(self) -> bool:
        """True if a part needs all keys of at least one dimension."""
        return any(halo.is_gathered for halo in self.halos)

    @property
    def calls(self) -> int:
        """Number of kernel calls in an overlapped forward pass: one for the local keys, and one per halo slab."""
        if self.is_gathered:
            return 1
        # If there are two devices, each has one halo, before or after its tokens. All devices run the same program, so
        # one kernel call handles both cases. In a ring of devices, each has two halos, and a call per halo slab.
        return 1 + sum(
            1 if halo.parts == 2 and not halo.wraps else len(halo.slabs(halo.before)) + len(halo.slabs(halo.after))
            for halo in self.halos
            if halo.received
        )

    def elements_sent(self) -> int:
        """Return the minimum number of key and value elements that a device must send."""
        extents = [extent // each for extent, each in zip(self.case.layout, self.parts, strict=True)]
        total = 0
        for i, halo in enumerate(self.halos):
            if halo.parts > 1:
                slabs = [halo.before, halo.after]
                sent, received = sum(slabs), sum(slabs)
                if halo.parts == 2 and all(slabs) and not halo.wraps:
                    # Two devices swap halos of equal length in a single permute, so each sends in one direction only.
                    # The extended key and value arrays have room for a halo on each side.
                    sent, received = max(slabs), 2 * max(slabs)
                total += sent * math.prod(extents[:i] + extents[i + 1 :])
                extents[i] += received
        return total * self.case.batch * self.case.heads_kv * 2 * self.case.head_dim

    def function(self, backend: str, token_axes: Any = None) -> Callable[[oracle.Tensors], Any]:
        names = "q_tile_shape", "kv_tile_shape", "backward_q_tile_shape", "backward_kv_tile_shape"
        return self.case.operator(backend, token_axes=token_axes, **dict.fromkeys(names, self.tile))


MODES = ("Auto", "Explicit", "Manual")


@pytest.mark.parametrize(
    ("mode", "backend", "count"),
    [(mode, "cpu-fna", 4) for mode in MODES] + [("Auto", "flex-fna", 2), ("Explicit", "flex-fna", 2)],
)
def test_tokens_stay_split(
    mode: str, backend: str, count: int, set_overlap: SetOverlap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test random problems over up to eight devices.

    Two of every three problems overlap the halo exchange with compute, unless tokens are gathered. One of these two
    stacks keys and values and sends them as one array, as operators do only for large arrays.
    """
    source = random.Random(len(mode))
    for number in range(count):
        overlaps = number % 3 != 1
        monkeypatch.setattr(overlap, "_COMBINED_BYTES", 0 if number % 3 == 2 else 1 << 40)
        set_overlap(lambda *_, overlaps=overlaps: overlaps)
        check(mode, backend, Split.draw(source), overlaps)


RING = Case((6, 32), (3, 5), dilation=(1, 2), edges=("cut", "wrap"), heads=2, heads_kv=2)
CHOSEN = {
    "ring of two": ("Auto", Split(RING, (1, 2), (1, 1))),
    "ring of eight": ("Auto", Split(RING, (1, 8), (1, 1))),
    "one device": ("Manual", Split(Case((12,), (5,)), (1,), (1,))),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_tokens_of_chosen_problems_stay_split(name: str, set_overlap: SetOverlap) -> None:
    set_overlap(lambda *_: False)
    mode, split = CHOSEN[name]
    check(mode, "cpu-fna", split, overlaps=False)


def check(mode: str, backend: str, split: Split, overlaps: bool) -> None:
    """Compare results on several devices with the oracle, and check transfer sizes and the number of kernel calls."""
    case, names = split.case, NAMES[: len(split.parts)]
    mesh = mesh_of("Explicit" if mode == "Explicit" else "Auto", **dict(zip(names, split.parts, strict=True)))
    tokens = P(None, *names)
    operands, cotangents = case.operands("float32", 0), case.cotangents("float32", 0)
    specs = oracle.Tensors(tokens, tokens, tokens, *(None if each is None else P() for each in operands[3:]))
    placed = jax.tree.map(lambda array, spec: put(array, mesh, *spec), operands, specs)
    function = split.function(backend)
    if mode == "Manual":
        local = split.function(backend, names)
        function = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(tokens, tokens))

    with jax.set_mesh(mesh) if mode == "Explicit" else contextlib.nullcontext():
        lowered = jax.jit(both_passes(function)).lower(placed, put(cotangents, mesh, *tokens))
        compiled = lowered.compile(compiler_options=QUICK_COMPILATION)
        forward = jax.jit(function).lower(placed).compile(compiler_options=QUICK_COMPILATION).as_text() or ""
        outputs, gradients = compiled(placed, put(cotangents, mesh, *tokens))

    assert max(errors(case, outputs, gradients, 0).values()) <= BOUNDS["float32"], split
    if calls := forward.count('custom_call_target="natten_jax'):  # plain JAX has no custom calls
        assert calls == (split.calls if overlaps else 1), split
        # No scatter may occur: the XLA of JAX 0.11 ends the process if a scatter's indices are empty.
        assert "stablehlo.scatter" not in lowered.as_text(), split
    for result in (*outputs, *gradients[:3]):
        assert result.sharding.is_equivalent_to(placed.query.sharding, result.ndim), split
    moved = [(kind, math.prod(map(int, shape.split(",")))) for shape, kind in _MOVED.findall(forward)]
    allowed = {"collective-permute", "all-gather"} if split.is_gathered else {"collective-permute"}
    assert {kind for kind, _ in moved} <= allowed, split
    # Every device has a copy of the additional tokens, so their gradients are summed with an all-reduce.
    assert {kind for _, kind in _MOVED.findall(compiled.as_text() or "")} <= allowed | {"all-reduce"}, split
    if not split.is_gathered:
        sent = sum(elements for kind, elements in moved if kind == "collective-permute")
        assert sent <= split.elements_sent(), split


def test_invalid_token_axes_are_rejected() -> None:
    tokens = jnp.zeros((1, 8, 8, 1, 8))
    with pytest.raises(ValueError, match=r"token_axes names 'x', which is not a manual mesh axis here"):
        na2d(tokens, tokens, tokens, 3, token_axes=("x", None))
    with pytest.raises(ValueError, match=r"token_axes must have 2 value\(s\).*got \('x',\)"):
        na2d(tokens, tokens, tokens, 3, token_axes=("x",))
    with pytest.raises(TypeError, match=r"token_axes must have 2 value\(s\).*got 'xy'"):
        na2d(tokens, tokens, tokens, 3, token_axes="xy")
    with pytest.raises(TypeError, match=r"token_axes must have 2 value\(s\).*got \(1, None\)"):
        na2d(tokens, tokens, tokens, 3, token_axes=(1, None))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"token_axes names a mesh axis twice"):
        na2d(tokens, tokens, tokens, 3, token_axes=("x", "x"))
    out = na2d(tokens, tokens, tokens, 3, token_axes=(None, None))
    assert out.shape == tokens.shape


def test_additional_tokens_in_a_call_of_their_own() -> None:
    generator = np.random.default_rng(0)
    tokens, more = (jnp.asarray(generator.standard_normal((1, extent, 2, 8)), "float32") for extent in (16, 3))

    def attend(tokens: Any, more: Any, token_axes: Any = None) -> Any:
        return na1d(
            tokens, tokens, tokens, 3, additional_keys=more, additional_values=more, backend="cpu-fna",
            try_fuse_additional_kv=False, token_axes=token_axes,
        )  # fmt: skip

    expected = attend(tokens, more)
    for kind in ("Auto", "Explicit"):
        assert_close(jax.jit(attend)(put(tokens, mesh_of(kind, x=4), None, "x"), more), expected, atol=1e-6)
    local = functools.partial(attend, token_axes=("x",))
    spec = P(None, "x")
    manual = jax.shard_map(local, mesh=mesh_of("Auto", x=4), in_specs=(spec, P()), out_specs=spec)
    assert_close(jax.jit(manual)(tokens, more), expected, atol=1e-6)
