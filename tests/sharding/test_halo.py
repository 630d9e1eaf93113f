"""Token dimensions that are split over devices: neighbors exchange halos, and results are those of one device."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from natten_jax import na1d, na2d
from natten_jax.halo import Halo, bytes_received, halo_of
from natten_jax.problem import problem_of
from natten_jax.windows import EDGES, Axis, group_length, window_bounds
from tests.support.programs import output_of, run_python


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
    """The keys that a query sees, by coordinate; those behind an end are the other end's."""
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
        # One device needs nothing of others; in a ring each receives all of its halos.
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
        """Keys so far away or farther, in any part."""
        rows = [(start, seen(axis, start + query)) for start in range(0, axis.kv_extent, part)]
        return any(
            min(keys) < start - distance if is_front else max(keys) >= start + part + distance for start, keys in rows
        )

    for slab in slabs:
        sides = [True, False] if slab.is_front is None else [slab.is_front]
        most = 0
        for is_front in sides:
            ordered = range(part) if is_front else range(part - 1, -1, -1)  # from the part's end on this side
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
    video = problem_of((30, 48, 80), (18, 24, 24), heads=24, head_dim=128)
    assert bytes_received(video, (1, 1, 2)) == 30 * 48 * 12 * 24 * 2 * 128 * 2
    assert bytes_received(video, (1, 1, 1)) == 0


def test_parts_that_are_not_equal_are_refused_with_what_would_be() -> None:
    with pytest.raises(ValueError, match=r"30 tokens, which 4 devices cannot share.* over 3, or make it 28 or 32"):
        halo_of(Axis(30, 30, 3), 4)


MODES = ("Auto", "Explicit", "Manual")


@pytest.mark.parametrize(
    ("mode", "backend", "count"),
    [(mode, "cpu-fna", 4) for mode in MODES] + [("Auto", "flex-fna", 2), ("Explicit", "flex-fna", 2)],
)
def test_tokens_stay_split(mode: str, backend: str, count: int) -> None:
    program = "from tests.support import halos; halos.main()"
    output = output_of(run_python(program, mode, backend, str(len(mode)), str(count), devices=8, timeout=900))
    rows = list(map(json.loads, output.splitlines()))
    assert len(rows) == count
    for row in rows:
        check_row(row)


RING = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from natten_jax import na2d
from tests.support.problems import QUICK_COMPILATION

inputs = [jax.random.normal(jax.random.key(i), (1, 6, 32, 2, 8)) for i in range(3)]

def loss(*inputs):
    out = na2d(*inputs, (3, 5), dilation=(1, 2), edges=("cut", "wrap"), backend="cpu-fna")
    return jnp.sum(jnp.sin(out)), out

gradients = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True), compiler_options=QUICK_COMPILATION)
expected = gradients(*inputs)
for devices in (2, 4, 8):
    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])
    split = [jax.device_put(each, NamedSharding(mesh, P(None, None, "x"))) for each in inputs]
    compiled = gradients.lower(*split).compile()
    assert "collective-permute" in compiled.as_text() and "all-gather" not in compiled.as_text(), devices
    for found, reference in zip(*map(jax.tree.leaves, (compiled(*split), expected)), strict=True):
        assert len(found.sharding.device_set) == devices
        np.testing.assert_allclose(found, reference, atol=2e-6)
"""


def test_windows_that_wrap_are_the_same_over_two_four_and_eight_devices() -> None:
    assert output_of(run_python(RING, devices=8)) == ""


def check_row(row: dict[str, Any]) -> None:
    assert row["error"] <= 2e-6, row
    if row["calls"]:  # plain JAX has none
        assert row["calls"] == row["expected calls"], row
        assert not row["scatters"], row  # XLA of JAX 0.11 ends the process where their indices are empty
    assert row["is split"], row
    allowed = {"collective-permute", "all-gather"} if row["is_gathered"] else {"collective-permute"}
    assert set(row["forward"]) <= allowed, row
    # Gradients of additional tokens, which all devices have, are summed; those of what was gathered are scattered.
    assert set(row["all"]) <= allowed | {"all-reduce"}, row
    if not row["is_gathered"]:
        assert row["sent"] <= row["expected to be sent"], row


def test_token_axes_that_make_no_sense_are_refused() -> None:
    tokens = jnp.zeros((1, 8, 8, 1, 8))
    with pytest.raises(ValueError, match=r"token_axes names 'x', which is no manual mesh axis here"):
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


def test_one_device_along_an_axis_exchanges_nothing() -> None:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    tokens = jnp.asarray(np.random.default_rng(0).standard_normal((1, 12, 2, 8)), "float32")
    split = jax.shard_map(
        lambda array: na1d(array, array, array, 5, token_axes=("x",)),
        mesh=mesh,
        in_specs=P(None, "x"),
        out_specs=P(None, "x"),
    )
    compiled = jax.jit(split).lower(tokens).compile()
    assert "collective" not in (compiled.as_text() or "")
    np.testing.assert_array_equal(compiled(tokens), jax.jit(lambda array: na1d(array, array, array, 5))(tokens))


SEPARATE_ADDITIONAL = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from natten_jax import na1d

generator = np.random.default_rng(0)
tokens, more = (jnp.asarray(generator.standard_normal((1, extent, 2, 8)), "float32") for extent in (16, 3))

def attend(tokens, more, token_axes=None):
    return na1d(
        tokens, tokens, tokens, 3, additional_keys=more, additional_values=more, backend="cpu-fna",
        try_fuse_additional_kv=False, token_axes=token_axes,
    )

expected = attend(tokens, more)
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    split = jax.device_put(tokens, NamedSharding(mesh, P(None, "x")))
    np.testing.assert_allclose(jax.jit(attend)(split, more), expected, atol=1e-6)
mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
manual = jax.shard_map(
    lambda *arrays: attend(*arrays, token_axes=("x",)), mesh=mesh, in_specs=(P(None, "x"), P()), out_specs=P(None, "x")
)
np.testing.assert_allclose(jax.jit(manual)(tokens, more), expected, atol=1e-6)
"""


def test_additional_tokens_in_a_call_of_their_own() -> None:
    output_of(run_python(SEPARATE_ADDITIONAL, devices=4))
