"""The simulator: tile counts compared with the dense mask, known results, the time model, and recommendations."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import itertools
import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax import backends, halo, simulator
from natten_jax.arrays.operands import Inputs
from natten_jax.backends.select import resolve
from natten_jax.cost_model import tiles
from natten_jax.native import module as native
from natten_jax.ops.canonicalize import attention_problem, neighborhood_problem
from natten_jax.performance import TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Request
from natten_jax.problem import Problem, problem_of
from natten_jax.profiler.__main__ import main
from natten_jax.profiler.options import parse
from natten_jax.simulator import Calibration, Kernel
from natten_jax.windows import WindowArguments
from tests.support import oracle
from tests.support.cases import random_case
from tests.support.tile_walks import hull_of, inner_tiles, outer_tiles, walk, walked

PROBLEMS = 320

MEASUREMENTS = Path(__file__).parents[2] / "bench" / "results" / "h200" / "calibration"

HOPPER = Device("cuda", (9, 0), is_present=False)
MODEL: Any = simulator.calibration_for("hopper", "9.0")


def a_problem(layout: tuple[int, ...], kernel_size: tuple[int, ...], **others: Any) -> Problem:
    return problem_of(layout, kernel_size, **{"head_dim": 128, "scale": 1.0, **others})


def random_problem(generator: np.random.Generator) -> tuple[Problem, TilePair]:
    """Draw a problem with few tokens, and a pair of tiles."""
    case = random_case(int(generator.integers(2**31)), tokens=140)
    q_tile, kv_tile = (tuple(generator.integers(1, 7, case.rank).tolist()) for _ in range(2))
    window = {**case.window_arguments, "edges": "shift"}
    facts: dict[str, Any] = {"batch": 2, "heads": 6, "heads_kv": 3, "head_dim_v": 24, "additional_kv": case.additional}
    return a_problem(case.layout, **window, **facts), (q_tile, kv_tile)


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the size of chunks, so that small problems have several chunks of tiles, as very large problems have."""
    monkeypatch.setattr(tiles, "_CHUNK", 5)
    tiles.classified_tiles.cache_clear()
    tiles._visible_pairs_of_axis.cache_clear()


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("placement", ["anchored", "aligned"])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_counts_agree_with_walks_over_the_mask(pass_: Any, placement: Any) -> None:
    generator = np.random.default_rng(7)
    for _ in range(PROBLEMS):
        problem, pair = random_problem(generator)
        plain = dataclasses.replace(problem, additional_kv=0)
        counts = simulator.count_tiles(plain, pair, pass_, placement=placement)
        expected = walk(problem, pair, pass_, placement)
        assert {name: getattr(counts, name) for name in expected} == expected, (problem, pair)
        assert counts.executed_pairs == counts.inner * math.prod(pair[0]) * math.prod(pair[1])
        assert counts.visible_pairs <= counts.hull_pairs <= counts.executed_pairs
        pairs = tiles.visible_pairs(problem)
        assert pairs == counts.visible_pairs + problem.additional_kv * math.prod(problem.query_layout)
        widths = problem.head_dim + problem.head_dim_v
        assert tiles.flops(problem, "forward") == 2 * problem.batch * problem.heads * widths * pairs
        assert tiles.flops(problem, "backward") == 2.5 * tiles.flops(problem, "forward")
        shares = counts.masked_share + counts.padding_share + counts.visible_pairs / counts.visited_pairs
        assert shares == pytest.approx(1.0)


def walk_parts(problem: Problem, pair: Any, pass_: str, kernel: Kernel) -> tuple[int, int, int]:
    """Count the work of a kernel with row groups, from the dense mask.

    A row group is a range of rows of an outer tile. A part is a row group together with an inner tile that the outer
    tile visits. A tile needs a mask if some pairs of a part are visible, but not all.

    Returns:
        The number of parts with visible pairs, the number of parts in which all pairs are visible, and the number of
        tiles that need a mask.
    """
    mask, outer_tile, inner_tile = walked(problem, pair, pass_)
    tokens, rows_of_group = math.prod(outer_tile), kernel.outer_tokens // kernel.row_groups
    seen_parts = full_parts = masked = 0
    for group, corner, seen in outer_tiles(problem, mask, outer_tile):
        start = np.array([axis.start for axis in corner])
        inner = inner_tiles(*hull_of(seen), inner_tile)
        is_masked = np.zeros(len(inner), bool)
        for number in range(kernel.row_groups):
            rows = np.arange(rows_of_group * number, rows_of_group * (number + 1))
            rows = rows[rows < tokens] if rows[0] < tokens else np.array([tokens - 1])
            inside = np.stack(np.unravel_index(rows, outer_tile))
            ends = zip(inside.min(axis=1), inside.max(axis=1), strict=True)
            box = [np.arange(low, high + 1) for low, high in ends]
            box = [np.minimum(s + each, n - 1) for s, each, n in zip(start, box, group.shape, strict=True)]
            visible = mask[np.ix_(group[np.ix_(*box)].ravel(), group.ravel())].reshape(-1, *group.shape)
            for i, tile in enumerate(inner):
                part = visible[(slice(None), *tile)]
                seen_parts += bool(part.any())
                is_full = part[0].size == kernel.inner_tokens and bool(part.all())
                full_parts += is_full
                is_masked[i] |= bool(part.any()) and not is_full
        masked += int(is_masked.sum())
    return seen_parts, full_parts, masked


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_parts_agree_with_walks_over_the_mask(pass_: Any) -> None:
    generator = np.random.default_rng(11)
    skipped = split = unmasked = 0
    for _ in range(PROBLEMS):
        problem, pair = random_problem(generator)
        plain = dataclasses.replace(problem, additional_kv=0)
        outer, inner = (math.prod(tile) for tile in (pair if pass_ == "forward" else pair[::-1]))
        row_groups = int(generator.integers(1, 4))
        rows = -(-outer // row_groups) + int(generator.integers(0, 2) * generator.integers(0, 9))
        fill = inner + int(generator.integers(0, 4) == 0)
        kernel = Kernel(128, row_groups * rows, fill, 1e-6, 1e-6, 0.0, row_groups=row_groups)
        counts = simulator.count_tiles(plain, pair, pass_, kernel=kernel)
        found = counts.seen_parts, counts.full_parts, counts.partial
        assert found == walk_parts(plain, pair, pass_, kernel), (problem, pair)
        assert counts.tiles == (counts.outer, counts.inner, counts.seen_parts / row_groups, counts.partial)
        assert counts.seen_parts - counts.full_parts <= row_groups * counts.partial
        assert counts.partial <= counts.inner - counts.full
        assert row_groups * counts.full <= counts.full_parts <= counts.seen_parts <= row_groups * counts.inner
        assert counts.visible_pairs <= counts.executed_pairs <= counts.visited_pairs
        assert 0 <= counts.wasted_share < 1
        skipped += counts.seen_parts < row_groups * counts.inner
        split += counts.full_parts > row_groups * counts.full
        unmasked += counts.partial < counts.inner - counts.full
    assert skipped > 15
    assert split > 15
    assert unmasked > 3


def test_additional_tokens_are_tiles_of_their_own() -> None:
    """19 additional tokens add three tiles of 8, 8 and 3 tokens.

    The added tiles are inner tiles in the forward pass, and outer tiles in the backward pass.
    """
    problem, more = (a_problem((10, 6), (3, 3), dilation=(2, 1), additional_kv=n) for n in (0, 19))
    pair = (4, 3), (4, 2)
    plain, counts = (simulator.count_tiles(each, pair) for each in (problem, more))
    assert counts.inner - plain.inner == 3 * plain.outer
    assert counts.full - plain.full == 2 * plain.outer
    assert counts.most_inner - plain.most_inner == 3
    assert counts.visible_pairs - plain.visible_pairs == counts.hull_pairs - plain.hull_pairs == 60 * 19
    plain, counts = (simulator.count_tiles(each, pair, "backward") for each in (problem, more))
    assert counts.outer - plain.outer == 3
    # Each added tile visits all 3 x 2 query tiles. These tiles divide the 10 rows into 4, 4 and 2, and the 6 columns
    # into 3 and 3.
    assert counts.inner - plain.inner == 3 * 3 * 2
    assert counts.full - plain.full == 2 * 2 * 2
    assert counts.hull_pairs - plain.hull_pairs == 60 * 19


def test_query_heads_that_share_keys_visit_them_in_the_backward_pass() -> None:
    kernels = {"backward": (Kernel(128, 128, 128, 4e-6, 1e-6, 0.0),)}
    problem = a_problem((12800,), (1280,), stride=(1280,), heads=4, heads_kv=1)
    for launch, given in ((2e-6, {}), (7e-6, {"backward_launch": 7e-6})):
        calibration = a_calibration(kernels=kernels, **given)
        found = simulator.simulate(problem, ((128,), (128,)), "backward", calibration=calibration)
        assert found.seconds == pytest.approx(launch + 4e-6 + 4 * 10 * 1e-6)


def test_attention_of_unequal_lengths() -> None:
    problem = problem_of((250,), is_causal=True, operator="fmha", kv_layout=(100,), head_dim=128)
    counts = simulator.count_tiles(problem, ((50,), (25,)))
    # The first query tile (queries 0-49) reads 2 key tiles. Each of the other 4 query tiles reads 4 key tiles. A key
    # tile is full if all its keys precede the first query of the query tile.
    assert (counts.outer, counts.inner, counts.full) == (5, 2 + 4 * 4, 0 + 2 + 3 * 4)


@pytest.mark.parametrize(
    ("layout", "window", "stride", "pair"),
    [
        ((32768,), (2048,), (256,), ((128,), (128,))),
        ((32768,), (2048,), (2048,), ((128,), (128,))),
        ((256, 256), (80, 80), (16, 16), ((16, 8), (16, 8))),
        ((30, 48, 80), (18, 24, 24), (16, 8, 8), ((2, 8, 8), (2, 8, 8))),
    ],
)
@pytest.mark.parametrize("placement", ["anchored", "aligned"])
def test_known_fully_block_sparse_problems(layout: Any, window: Any, stride: Any, pair: Any, placement: Any) -> None:
    problem = a_problem(layout, window, stride=stride)
    counts = simulator.count_tiles(problem, pair, placement=placement)
    assert counts.is_fully_block_sparse
    assert counts.executed_pairs == counts.visible_pairs
    dense = problem.with_axes(stride=(1,) * len(layout))
    assert not simulator.count_tiles(dense, pair, placement=placement).is_fully_block_sparse


@pytest.mark.parametrize("placement", ["anchored", "aligned"])
def test_least_strides_are_the_least(placement: Any) -> None:
    generator = np.random.default_rng(3)
    found = 0
    for _ in range(200):
        problem, pair = random_problem(generator)
        problem = dataclasses.replace(problem, additional_kv=0).with_axes(is_causal=(False,) * problem.rank)
        sparse = [
            stride
            for stride in itertools.product(*(range(1, k + 1) for k in problem.kernel_size))
            if simulator.count_tiles(problem.with_axes(stride=stride), pair, placement=placement).is_fully_block_sparse
        ]
        least = simulator.least_block_sparse_stride(problem, pair, placement=placement)
        assert (least is None) == (not sparse)
        if least is not None:
            found += 1
            assert least == tuple(min(stride[dim] for stride in sparse) for dim in range(problem.rank))
    assert found > 5


def test_recommended_stride() -> None:
    pairs = [((16, 8), (16, 8)), ((8, 8), (8, 8)), ((16, 8), (12, 8))]
    found = simulator.recommend_stride(a_problem((256, 256), (80, 80)), pairs)
    assert found is not None
    assert (found.stride, found.simulation.pair) == ((8, 8), ((8, 8), (8, 8)))
    assert found.simulation.counts.is_fully_block_sparse
    assert simulator.recommend_stride(a_problem((256, 256), (80, 80)), pairs[2:]) is None


def a_calibration(**others: Any) -> Calibration:
    kernels = (Kernel(128, 128, 128, 4e-6, 1e-6, 2e-7), Kernel(128, 128, 96, 4e-6, 8e-7, 2e-7))
    values: dict[str, Any] = {
        "family": "hopper", "device": "a device", "compute_capability": (9, 0), "multiprocessors": 100,
        "launch": 2e-6, "byte": 0.0, "slowdown": 0.0, "onset": 1e-3, "kernels": {"forward": kernels},
        "counted_rounds": 4,
    }  # fmt: skip
    return Calibration(**{**values, **others})


def test_time_model() -> None:
    problem = a_problem((12800,), (1280,), stride=(1280,))  # each of 100 query tiles reads 10 full key tiles

    def seconds(heads: int = 1, calibration: Calibration | None = None, **facts: Any) -> float | None:
        other = dataclasses.replace(problem, heads=heads, **facts)
        return simulator.simulate(other, ((128,), (128,)), calibration=calibration).seconds

    assert seconds() is None
    assert seconds(calibration=a_calibration()) == pytest.approx(2e-6 + 14e-6)
    assert seconds(2, a_calibration()) == pytest.approx(2e-6 + 28e-6)
    least_bytes = simulator.simulate(problem, ((128,), (128,))).least_bytes
    assert seconds(calibration=a_calibration(byte=1e-11)) == pytest.approx(2e-6 + 1e-11 * least_bytes)
    # 600 tiles on 100 SMs take six waves. With at least four waves (``counted_rounds``), tiles are assigned to SMs
    # dynamically, by an atomic counter. The slowest SM then finishes half a wave (``tail``) later than the average SM.
    assert seconds(6, a_calibration(tail=0.5)) == pytest.approx(2e-6 + 6.5 * 14e-6)
    assert seconds(3, a_calibration(tail=0.5)) == pytest.approx(2e-6 + 3 * 14e-6)
    # If an SM runs two tiles at a time, three tiles per SM take two waves.
    (kernel, _) = a_calibration().kernels["forward"]
    paired = a_calibration(kernels={"forward": (dataclasses.replace(kernel, side_by_side=2),)})
    assert seconds(3, paired) == pytest.approx(2e-6 + 2 * 14e-6)
    assert seconds(3, paired, dtype="float32") is None
    assert seconds(calibration=a_calibration(slowdown=0.5, onset=16e-6)) == pytest.approx(16e-6 * 1.25)
    frugal = {"forward": (dataclasses.replace(kernel, power=0.4),)}
    throttled = a_calibration(slowdown=0.5, onset=16e-6, kernels=frugal)
    assert seconds(calibration=throttled) == pytest.approx(16e-6 * 1.1)
    problem = problem.with_axes(kernel_size=(1281,), stride=(1281,))
    masked = seconds(calibration=a_calibration())
    assert masked is not None and masked > 2e-6 + 15e-6


def test_a_smaller_tile_uses_the_smaller_kernel_with_a_mask() -> None:
    problem = a_problem((1280,), (960,), stride=(960,))
    calibration = a_calibration()
    full = simulator.simulate(problem, ((128,), (96,)), calibration=calibration)
    assert full.counts.executed_pairs == full.counts.inner * 128 * 96
    assert full.counts.full > 0
    partial = simulator.simulate(problem, ((128,), (80,)), calibration=calibration)
    assert partial.counts.executed_pairs == partial.counts.inner * 128 * 96
    assert partial.counts.full == 0
    assert simulator.simulate(problem, ((128,), (192,)), calibration=calibration).seconds is None


@pytest.mark.parametrize("additional_kv", [0, 200])
def test_ranking_is_by_the_simulated_time(additional_kv: int) -> None:
    problem = a_problem((14, 20, 30), (5, 9, 7), additional_kv=additional_kv, heads=3, dilation=(2, 1, 1))
    pairs = [((4, 4, 8), (4, 4, 8)), ((2, 8, 8), (4, 4, 6)), ((1, 2, 3), (2, 8, 8)), ((8, 4, 4), (8, 4, 2))]
    ranked = simulator.rank(problem, pairs, "forward", MODEL)
    assert sorted(pair for pair, _ in ranked) == sorted(pairs)
    for pair, seconds in ranked:
        assert simulator.simulate(problem, pair, calibration=MODEL).seconds == seconds
    assert [seconds for _, seconds in ranked] == sorted(seconds for _, seconds in ranked)
    assert simulator.rank(problem, pairs, "forward", None) == []
    backward = a_calibration(kernels={"backward": (Kernel(128, 128, 128, 4e-6, 1e-6, 2e-7),)})
    for pair, seconds in simulator.rank(problem, pairs, "backward", backward):
        assert simulator.simulate(problem, pair, "backward", calibration=backward).seconds == seconds


@pytest.mark.parametrize("calibrated", ["hopper", "cutlass"])
def test_backends_list_their_tiles_in_the_order_of_the_model(calibrated: str) -> None:
    problem = a_problem((64, 96), (17, 31), heads=12)
    calibration = simulator.calibration_for(calibrated)
    pairs = backends.find(f"{calibrated}-fna", "fna").tile_pairs(problem, HOPPER, "forward")
    seconds = [simulator.simulate(problem, pair, calibration=calibration).seconds for pair in pairs]
    assert len(pairs) > 50
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(seconds))  # type: ignore[operator]


@pytest.mark.parametrize("calibrated", ["hopper", "cutlass"])
def test_the_model_picks_tiles_that_were_measured_to_be_fast(calibrated: str) -> None:
    calibration = simulator.calibration_for(calibrated)
    problems: dict[Any, dict[TilePair, float]] = collections.defaultdict(dict)
    for record in json.loads((MEASUREMENTS / f"{calibrated}.json").read_text())["records"]:
        options = parse([*record["arguments"].split(), "--dtype", "bf16", "--backend", f"{calibrated}-fna"])
        problem = options.main_request.problem
        pair = tuple(record["q_tile"][-problem.rank :]), tuple(record["kv_tile"][-problem.rank :])
        seconds = problems[problem, record["pass"]]
        seconds[pair] = min(record["seconds"], seconds.get(pair, math.inf))
    assert len(problems) > 30
    for (problem, pass_), seconds in problems.items():
        ranked = simulator.rank(problem, seconds, pass_, calibration)
        assert seconds[ranked[0][0]] <= 1.08 * min(seconds.values()), problem.describe()


def test_bounds_and_bytes() -> None:
    problem = a_problem((256, 256), (80, 80), heads=24, heads_kv=8, head_dim_v=64)
    simulation = simulator.simulate(problem, ((16, 8), (16, 8)))
    assert simulation.flop_bound == pytest.approx(256 * 256 / 80**2)
    assert 1 < simulation.tile_bound < simulation.flop_bound
    assert simulation.flops == 2 * 24 * 192 * 65536 * 6400
    assert simulation.executed_flops > simulation.flops
    queries, keys = 65536 * 24 * 192 * 2, 65536 * 8 * 192 * 2
    assert simulation.least_bytes == queries + keys + 65536 * 24 * 4
    assert simulation.tile_bytes > simulation.least_bytes


def test_problems_are_described_without_arrays() -> None:
    described = simulator.problem_of((9, 12), 3, (1, 2), is_causal=(True, False), heads=4, heads_kv=2, head_dim=32)
    query: Any = jax.ShapeDtypeStruct((1, 9, 12, 4, 32), jnp.bfloat16)
    key: Any = jax.ShapeDtypeStruct((1, 9, 12, 2, 32), jnp.bfloat16)
    window = WindowArguments((3, 3), (1, 2), (1, 1), (True, False))
    assert described == neighborhood_problem(2, Inputs(query, key, key), window)


IMAGE = a_problem((9, 9), (3, 3))


@pytest.mark.parametrize(
    ("function", "arguments", "options", "message"),
    [
        (simulator.problem_of, ((9, 12), 3), {"heads": 3, "heads_kv": 2}, "query has 3 heads, which is not a multiple"),
        (simulator.problem_of, ((9, 12), 3), {"dtype": "float8"}, "dtype must be one of"),
        (simulator.count_tiles, (IMAGE, ((8,), (8, 8))), {}, "the query tile of pair must have 2 value"),
        (simulator.count_tiles, (IMAGE, ((8, 8), (8, 0))), {}, "the key/value tile of pair must be at least 1"),
        (simulator.simulate, (IMAGE, ((8, 8),) * 3), {}, "pair must be a query tile and a key/value tile"),
        (simulator.calibration_for, ("hoper",), {}, "got 'hoper': did you mean 'hopper'"),
    ],
)
def test_malformed_arguments_are_refused(function: Any, arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(*arguments, **options)


FUNCTIONS = [getattr(simulator, name) for name in simulator.__all__ if name.islower()]
FUNCTIONS += [halo.halo_of, halo.halos_of, halo.bytes_received, MODEL.kernel, MODEL.launch_of]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_lists_are_accepted_and_wrong_types_are_named(function: Any) -> None:
    problem, pair = problem_of((64, 64), 8, heads=24, head_dim=128), ((16, 8), (16, 8))
    kernel, plan = MODEL.kernel(problem, pair, "forward"), resolve(Request(problem), HOPPER, "forward")
    known = {"problem": problem, "pair": pair, "pairs": [pair], "pass_": "forward", "placement": "anchored"}
    known |= {"kernel": kernel, "calibration": MODEL, "plan": plan, "axis": problem.axes[0], "family": "hopper"}
    known |= {"tiles": simulator.count_tiles(problem, pair).tiles, "parts": 2 if function is halo.halo_of else (1, 2)}
    known |= {"layout": (9, 12), "kv_layout": (9, 12), "operator": "fna", "compute_capability": (9, 0)}
    known |= dict.fromkeys(("batch", "heads", "heads_kv", "head_dim", "head_dim_v", "additional_kv", "devices"), 2)
    given = {name: known[name] for name in inspect.signature(function).parameters if name in known}
    lists = {name: json.loads(json.dumps(value)) for name, value in given.items() if type(value) in (tuple, list)}
    assert function(**given | lists) == function(**given)
    for name, wrong in itertools.product(given, (["x"], 1.5j, {2: 2}, np.zeros((2, 2, 2)), object())):
        with pytest.raises((TypeError, ValueError), match=rf"\b{name.removesuffix('s')}.*, got "):
            function(**given | {name: wrong})


def test_calibrations_are_complete() -> None:
    folder = resources.files("natten_jax.cost_model").joinpath("calibrations")
    names = [file.name for file in folder.iterdir() if file.name.endswith(".json")]
    assert "hopper-9.0.json" in names
    for name in names:
        model = json.loads(folder.joinpath(name).read_text())
        assert name == "{}-{}.{}.json".format(model["family"], *model["compute_capability"])
        calibration = simulator.calibration_for(model["family"], model["compute_capability"])
        assert calibration is not None
        assert all(map(native.limits, calibration.limits))
        # Calibrations of native kernels have limits and measured coefficients. Calibrations of Pallas kernels have
        # neither.
        assert bool(calibration.limits) == calibration.is_measured
        assert all(kernel.inner_tile > 0 for kernels in calibration.kernels.values() for kernel in kernels)
    assert simulator.calibration_for("hopper", (8, 0)) is None
    assert simulator.calibration_for("flex") is None


def test_kernels_of_other_elements_have_times_of_their_own() -> None:
    problem = simulator.problem_of((4096,), 512, heads=8, head_dim=128)
    pair = (128,), (128,)
    wide = MODEL.kernel(problem, pair, "forward")
    small = MODEL.kernel(dataclasses.replace(problem, dtype="float8_e4m3fn"), pair, "forward")
    assert wide is not None and small is not None
    assert not wide.dtypes and small.dtypes == ("float8_e4m3fn",) and wide.size == small.size
    assert MODEL.kernel(dataclasses.replace(problem, dtype="float8_e5m2"), pair, "forward") is None


# The number of visible query/key pairs, compared with the dense mask. Floating-point operations are computed from this
# number.


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5)])
def test_flops_of_attention_between_sequences(queries: int, keys: int, is_causal: bool) -> None:
    query = jax.ShapeDtypeStruct((1, queries, 1, 8), jnp.float32)
    key = query.update(shape=(1, keys, 1, 8))
    problem = attention_problem(query, key, key, None, is_causal)
    assert tiles.visible_pairs(problem) == oracle.attention_mask(queries, keys, is_causal).sum()


# The simulator recommends a dilation only if it saves at least 2% of the executed operations. The recommended dilation
# executes at most 2% more operations than the best dilation.


def test_no_dilation_is_better() -> None:
    generator, recommended = np.random.default_rng(4), 0
    for _ in range(60):
        problem, pair = random_problem(generator)
        problem = dataclasses.replace(problem, additional_kv=0).with_axes(dilation=(1,) * problem.rank)
        dilations = itertools.product(*(range(1, axis.kv_extent // axis.kernel_size + 1) for axis in problem.axes))
        best = min(simulator.simulate(problem.with_axes(dilation=each), pair).executed_flops for each in dilations)
        own = simulator.simulate(problem, pair).executed_flops
        found = simulator.recommend_dilation(problem, [pair])
        if found is None:
            assert own <= 1.02 * best
            continue
        recommended += 1
        assert found.simulation.problem == problem.with_axes(dilation=found.dilation)
        assert 1.02 * found.simulation.executed_flops <= own
        assert found.simulation.executed_flops <= 1.02 * best
    assert 5 < recommended < 55


def test_windows_that_fill_their_groups_need_no_mask() -> None:
    pairs: list[TilePair] = [((8, 8), (8, 8))]
    found = simulator.recommend_dilation(simulator.problem_of((48, 96), 24), pairs)
    assert found is not None
    assert found.dilation == (2, 4)
    assert found.simulation.counts.is_fully_block_sparse
    assert found.simulation.executed_flops == found.simulation.flops
    dilated, whole = simulator.problem_of((48, 96), 24, dilation=(2, 4)), simulator.problem_of((24, 24), 24)
    for problem, tiles_ in ((whole, pairs), (dilated, pairs), (dilated, [])):
        assert simulator.recommend_dilation(problem, tiles_) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("-i 30 48 80 -n 24 -d 128 -w 18 24 24", "Dilation (1, 2, 2) is the smallest at nearly the best speed"),
        ("-i 32768 -d 128 -w 2048", "Dilation 16 is the smallest at nearly the best speed, without any mask"),
        ("-i 65536 -w 8", "No dilation that was tried makes the forward pass faster."),
        ("-i 20 20", None),
    ],
)
def test_the_command_line_prints_it(
    arguments: str, said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    assert main(f"{arguments} --simulate --compute-capability 9.0 --json {path}".split()) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert said in output if said else "ilation" not in output
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found = result["dilation_recommendation"]
    if said is None or said.startswith("No"):
        assert found is None
        return
    assert f"--dilation {' '.join(map(str, found['dilation']))};" in output
    assert found["predicted_seconds"] < result["passes"]["forward"]["predicted_seconds"]
