"""Search for fast configurations: the flag ``--optimize``, ``natten_jax.tune``, and saved configurations."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax import backends, simulator
from natten_jax.autotuning import tables
from natten_jax.autotuning.configurations import Tuned
from natten_jax.autotuning.tables import TunedPass, TunedTable
from natten_jax.backends.select import ignored, plan_with, resolve, staleness
from natten_jax.performance import PASSES, Pass, TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import BackendId, Request
from natten_jax.problem import Problem, problem_of
from natten_jax.profiler import parse, predict, search
from natten_jax.profiler.capture import Event
from natten_jax.profiler.measure import Workload
from natten_jax.profiler.options import Options
from natten_jax.profiler.program import Program
from natten_jax.profiler.search import Effort, Optimum, best_table, optimize, plans_of
from tests.support.native_programs import needs_native

from .conftest import Profiler

# The flag ``--optimize``. Operators and modules accept its results as arguments.

FEW = "--warmup-steps 1 --iterations 2"

HOPPER_GPU = Device("cuda", (9, 0), is_present=False)


@needs_native
def test_search_result_is_accepted_by_operators(tmp_path: Path, profiler: Profiler) -> None:
    output, _, found = profiler(f"-i 8 12 -n 2 -d 16 -w 4 6 --dtype fp32 --backprop --backend cpu-fna --optimize {FEW}")
    assert output.index("Best configuration") < output.index("Profiler results")
    assert "Speedup over the default configuration" in output
    tuned = natten_jax.load_tuned(tmp_path / "result.json")
    assert tuned["backend"] == "cpu-fna"
    assert tuned["attention_kwargs"] == {"backend": "cpu-fmha"}
    assert {len(tuned[f"{prefix}{side}_tile_shape"]) for prefix in ("", "backward_") for side in ("q", "kv")} == {2}

    trials = found["search"]["trials"]
    assert len(trials) > 20
    assert any(trial["passes"] == ["forward", "backward"] for trial in trials)
    assert found["search"]["best_seconds"] <= found["search"]["default_seconds"]

    query, key, value = (jax.random.normal(jax.random.key(i), (1, 8, 12, 2, 16)) for i in range(3))

    def loss(arguments: Mapping[str, Any]) -> Any:
        return lambda q: jnp.sum(natten_jax.na2d(q, key, value, (4, 6), **arguments) ** 2)

    plain, fast = (jax.value_and_grad(loss(arguments))(query) for arguments in (dict[str, Any](), tuned))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain, fast)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_tuned_arguments_are_accepted_in_every_rank(rank: int, tmp_path: Path) -> None:
    from natten_jax.flax_modules import linen, nnx

    path = tmp_path / "tuned.json"
    best = {
        "backend": "flex-fna", "attention_kwargs": {"backend": "flex-fmha"}, "run_persistent_kernel": True,
        "q_tile_shape": (4,) * rank, "kv_tile_shape": (4,) * rank,
        "backward_q_tile_shape": (4,) * rank, "backward_kv_tile_shape": (4,) * rank,
    }  # fmt: skip
    path.write_text(json.dumps({"best_configuration": best}))
    tuned = natten_jax.load_tuned(path)
    assert tuned == best
    layout, window = (6,) * rank, (3,) * rank
    x = jnp.ones((1, *layout, 16))
    out = getattr(natten_jax, f"na{rank}d")(*[x.reshape(1, *layout, 2, 8)] * 3, window, **tuned)
    assert out.shape == (1, *layout, 2, 8)
    layer = getattr(nnx, f"NeighborhoodAttention{rank}D")(
        16, num_heads=2, kernel_size=window, rngs=nnx.nnx.Rngs(0), **tuned
    )
    assert layer(x).shape == x.shape
    module = getattr(linen, f"NeighborhoodAttention{rank}D")(num_heads=2, kernel_size=window, **tuned)
    assert module.init_with_output(jax.random.key(0), x)[0].shape == x.shape


def chosen(options: Options) -> tuple[Any, ...]:
    """Return the forward query tile, the backward query tile, and the kernel schedule."""
    performance = options.performance
    return performance.q_tile_shape, performance.backward_q_tile_shape, performance.kernel_schedule


def fake_search(monkeypatch: pytest.MonkeyPatch, line: str, seconds: Any) -> tuple[Optimum, list[tuple[Any, ...]]]:
    """Run a search without compiling programs.

    Return the optimum, and a tuple of backend, tiles and schedule for each candidate. ``seconds(options)`` returns the
    time of a candidate, or the exception that its compilation raises.
    """
    compiled = []

    def compile_workload(options: Any, name: str, arguments: Any) -> Any:
        compiled.append((options.backend, *chosen(options)))
        duration = seconds(options)
        if isinstance(duration, Exception):
            raise duration
        empty: Any = None
        load = Workload(options, {}, Device("cpu"), empty, (), Program(name, {}))
        monkeypatch.setattr(Workload, "run", lambda self: jnp.zeros(()))
        load.program.instructions["seconds"] = duration
        return load

    def capture(launches: Any, runs: int, platform: str) -> Any:
        return [[[Event("", "", "", 0.0, 1e9 * each.program.instructions["seconds"])]] * runs for each in launches]

    monkeypatch.setattr(search, "compile_workload", compile_workload)
    monkeypatch.setattr(search, "capture_interleaved", capture)
    return optimize(parse(line.split())), compiled


@needs_native
@pytest.mark.parametrize("device", [Device("cpu"), HOPPER_GPU, Device("cuda", (8, 0), is_present=False)], ids=str)
@pytest.mark.parametrize("line", ["-w 8", "-w 8 --add-kv 4", "-w 64", "-w 64 --add-kv 4 --backend flex-fna"])
def test_search_ends_at_its_announced_steps_and_adds_no_ignored_argument(
    device: Device, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {"more_steps": 0, "done": 0}

    def update(stage: str = "", **changes: int) -> None:
        for name, count in changes.items():
            steps[name] += count
        assert steps["done"] <= steps["more_steps"]

    def seconds(options: Options) -> Any:
        for call in options.sub_calls:
            for pass_ in options.passes:
                assert not ignored(resolve(call.request, device, pass_), call.request.performance)
        return ValueError("fails") if chosen(options)[0] == (64,) else 1e-3

    monkeypatch.setattr(search, "default_device", lambda: device)
    monkeypatch.setattr(search, "progress", lambda total: contextlib.nullcontext(update))
    fake_search(monkeypatch, f"-i 64 {line} --dtype bf16 --backprop --optimize", seconds)
    assert 0 < steps["done"] == steps["more_steps"]


@needs_native
def test_search_finds_the_best_pair_of_each_pass_and_survives_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(options: Any) -> Any:
        if options.backend == "flex-fna":
            return 1.0
        if chosen(options)[0] == (64,):
            return ValueError("no such tile")
        time = 1e-3 if options.performance.tiles("forward") == ((128,), (512,)) else 2e-3
        if options.backprop:
            time += 1e-3 if options.performance.tiles("backward") == ((256,), (128,)) else 5e-3
        return time

    optimum, compiled = fake_search(monkeypatch, "-i 4096 -w 64 --backprop --optimize", seconds)
    options = optimum.options
    assert (options.backend, options.performance.tiles("forward")) == ("cpu-fna", ((128,), (512,)))
    assert options.performance.tiles("backward") == ((256,), (128,))
    assert optimum.seconds == pytest.approx(2e-3)
    assert optimum.default_seconds == pytest.approx(7e-3)
    assert {trial.error for trial in optimum.failures} == {"no such tile"}
    assert sum(backend == "flex-fna" for backend, *_ in compiled) == 1  # plain JAX is slower, and is tried once


@needs_native
def test_without_a_calibration_the_backends_own_order_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "-i 48 64 -w 8 9 --backprop --backend cpu-fna --optimize"
    assert simulator.calibration_for("cpu", None) is None
    options = parse(line.split())
    problem = options.main_request.problem
    offered = {each.pass_: each.pairs for each in predict.listings(options, problem, Device("cpu"))}
    compiled = fake_search(monkeypatch, line, lambda options: 1e-3)[1]
    forward = [q_tile for _, q_tile, backward_q_tile, _ in compiled if backward_q_tile is None]
    backward = [backward_q_tile for *_, backward_q_tile, _ in compiled if backward_q_tile is not None]
    for searched, pass_ in zip((forward, backward), PASSES, strict=True):
        first = [pair[0] for pair in offered[pass_][:40]]
        assert len(first) > 10
        assert searched[: len(first)] == first


@needs_native
def test_search_does_not_wait_for_plain_jax_if_kernels_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    optimum, compiled = fake_search(monkeypatch, "-i 64 -w 8 --optimize", lambda options: 0.03)
    assert optimum.options.backend == "cpu-fna"
    assert {backend for backend, *_ in compiled} == {"cpu-fna", None}  # None: the call names no backend


@needs_native
def test_search_keeps_named_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "-i 64 -w 8 --backend cpu-fna --q-tile 32 --kv-tile 16 --backprop --optimize"
    optimum, compiled = fake_search(monkeypatch, line, lambda options: 1e-3)
    assert optimum.options.performance.q_tile_shape == (32,)
    assert {(backend, q_tile) for backend, q_tile, *_ in compiled} == {("cpu-fna", (32,))}
    assert len({backward for *_, backward, _ in compiled}) >= 5


@pytest.mark.parametrize(
    ("backend", "arguments", "schedule"),
    [
        ("hopper-fna", "", "pp"),
        ("hopper-fna", "--schedule coop", "coop"),
        ("hopper-fmha", "", "pp"),
        ("cutlass-fna", "", None),
    ],
)
def test_the_best_configuration_names_the_default_backend(backend: str, arguments: str, schedule: str | None) -> None:
    options = parse(f"-i 64 64 -w 8 8 --backprop --optimize {arguments}".split())
    tiles: dict[Pass, TilePair] = {"forward": ((16, 8), (8, 16)), "backward": ((8, 8), (16, 8))}
    request = options.main_request
    operator = BackendId.parse(backend).operator
    request = dataclasses.replace(request, problem=dataclasses.replace(request.problem, operator=operator))
    plans = {
        pass_: plan_with(
            backends.find(backend, request.problem.operator),
            dataclasses.replace(request, performance=request.performance.with_tiles(pass_, pair)),
            HOPPER_GPU,
            pass_,
        )
        for pass_, pair in tiles.items()
    }
    empty: Any = None
    ran = Workload(
        options, {str(pass_): plan for pass_, plan in plans.items()}, HOPPER_GPU, empty, (), Program("ran", {})
    )
    table = best_table(Optimum(search.with_choices(options, ran), 1.0, 1.0, (), 1.0, 0.0))
    rows = {row[0]: row[1] for row in table.rows}
    assert rows.get("kernel_schedule") == schedule
    assert rows["fmha_backend" if backend.endswith("fmha") else "backend"] == backend
    shapes = [rows[f"{prefix}{side}_tile_shape"] for prefix in ("", "backward_") for side in ("q", "kv")]
    assert shapes == ["(16, 8)", "(8, 16)", "(8, 8)", "(16, 8)"]


def test_search_without_anything_that_runs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no configuration runs: broken"):
        fake_search(monkeypatch, "-i 64 -w 8 --optimize", lambda options: RuntimeError("broken"))


# ``natten_jax.tune``: its results, their files and context manager, and the tables that the package contains.


CPU = Device("cpu")

LITTLE_EFFORT = Effort(screened=3, finalists=1, seconds=0.1)

PROBLEM = problem_of((8, 12), (4, 6), heads=2, head_dim=16, dtype="float32")


def other_plan(problem: Problem) -> Any:
    """Return a forward plan with tiles other than the default: the last tiles that the backend lists."""
    default = resolve(Request(problem), CPU, "forward")
    pair = backends.by_id(default.backend).tile_pairs(problem, CPU, "forward")[-1]
    assert pair != default.tiles
    return dataclasses.replace(default, performance=default.performance.with_tiles("forward", pair))


def table_of(plan: Any, device: str = "cpu", **facts: Any) -> TunedTable:
    return TunedTable(device, (TunedPass(plan, 1.0, 2.0, facts.get("is_default", False)),))


def loss(tokens: jax.Array) -> jax.Array:
    once = natten_jax.na2d(tokens, tokens, tokens, (4, 6))
    flat = natten_jax.na2d(once, once, once, (4, 6))[:, 0]
    return jnp.sum(natten_jax.attention(flat, flat, flat) ** 2)


@pytest.mark.parametrize("devices", [1, 8])
def test_every_operator_of_a_program_is_found_once(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with several devices, the search compiles a program to find its operators."""
    present = jax.local_devices()
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: present[:devices])
    tokens = jax.ShapeDtypeStruct((1, 8, 12, 2, 16), jnp.float32)
    for function in (jax.grad(loss), jax.jit(jax.grad(loss))):
        tasks = search.tasks_of(plans_of(function, tokens))
        assert sorted(each.problem.describe() for each in tasks) == ["attention 12 k=12", "na2d 8x12 k=4x6"]
        assert all(each.backprop for each in tasks)
    assert not any(each.backprop for each in search.tasks_of(plans_of(loss, tokens)))


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"edges": "wrap"}, None),
        ({"edges": ("cut", "shift"), "stride": (2, 1), "dilation": (1, 2), "is_causal": (False, True)}, None),
        ({"extents": jnp.array([[7, 9]])}, "separate layouts"),
        ({"relative_bias": jnp.ones((2, 5, 9))}, "would be measured instead"),
    ],
)
def test_measured_programs_equal_called_programs(keywords: dict[str, Any], reason: str | None) -> None:
    keys = jax.ShapeDtypeStruct((1, 8, 12, 2, 16), jnp.float32)

    def attend(tokens: jax.Array) -> jax.Array:
        return natten_jax.na2d(tokens, tokens, tokens, (3, 5), **keywords)

    (task,) = search.tasks_of(plans_of(attend, keys))
    if reason is None:
        assert task.obstacle is None and task.planned_problem == task.problem  # planned_problem is searched and timed
    else:
        assert reason in str(task.obstacle)


@needs_native
def test_saved_configurations_load_and_keep_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("natten_jax.profiler.search.THOROUGH", LITTLE_EFFORT)
    tokens = jax.random.normal(jax.random.key(0), (1, 8, 12, 2, 16))

    def attend(array: jax.Array) -> jax.Array:
        return natten_jax.na2d(array, array, array, (4, 6))

    path = tmp_path / "tuned.json"
    tuned = natten_jax.tune(attend, tokens, save=path)
    (found,) = tuned.passes
    assert found.plan.pass_ == "forward" and found.seconds <= found.default_seconds
    loaded = natten_jax.load_tuned(path)
    assert loaded.table == tuned.table and dict(loaded) == dict(tuned)
    with loaded:
        np.testing.assert_allclose(jax.jit(attend)(tokens), attend(tokens), rtol=1e-4, atol=1e-5)


@needs_native
def test_a_table_applies_only_inside_its_block() -> None:
    plan = other_plan(PROBLEM)
    tokens = jnp.ones((1, 8, 12, 2, 16))
    function = jax.jit(lambda array: natten_jax.na2d(array, array, array, (4, 6), scale=0.5))
    (before,) = plans_of(function, tokens)
    function(tokens)
    with Tuned(table_of(plan)):
        (inside,) = plans_of(function, tokens)  # tuned tiles, although the function was compiled before
    assert inside.tiles == plan.tiles != before.tiles
    assert plans_of(function, tokens) == (before,)


@needs_native
def test_boxes_of_a_layout_are_no_problem_of_a_table() -> None:
    plan = other_plan(PROBLEM)
    tokens, box = jnp.ones((1, 8, 12, 2, 16)), jnp.ones((1, 4, 12, 2, 16))

    def attend(query: jax.Array, **where: Any) -> Any:
        function = jax.jit(lambda query: natten_jax.na2d(query, tokens, tokens, (4, 6), **where))
        (found,) = plans_of(function, query)
        return found.tiles

    untouched = attend(box, query_origin=(2, 0))
    with Tuned(table_of(plan)):
        assert attend(tokens) == plan.tiles
        assert attend(box, query_origin=(2, 0)) == untouched != plan.tiles


@needs_native
@pytest.mark.parametrize("change", ["backend", "performance", "problem", "parts", "device", "default"])
def test_arguments_of_a_call_take_precedence(change: str) -> None:
    table = table_of(other_plan(PROBLEM), "cuda" if change == "device" else "cpu", is_default=change == "default")
    own = resolve(Request(PROBLEM), CPU, "forward").performance
    batch = dataclasses.replace(PROBLEM, batch=2)
    changes = {"backend": "flex-fna", "performance": own, "problem": batch, "parts": (2, 1)}
    given: dict[str, Any] = {name: value for name, value in changes.items() if name == change}
    request = dataclasses.replace(Request(PROBLEM, tuned=table), **given)
    plain = resolve(dataclasses.replace(request, tuned=None), CPU, "forward")
    assert resolve(request, CPU, "forward") == plain


@needs_native
@pytest.mark.parametrize(("name", "reason"), [("gone", "there is no backend gone-fna"), ("cutlass", "cutlass-fna: ")])
def test_tables_of_another_build_are_not_used(name: str, reason: str) -> None:
    stale = dataclasses.replace(other_plan(PROBLEM), backend=BackendId(name, "fna"))
    assert str(staleness(stale, CPU)).startswith(reason)
    default = resolve(Request(PROBLEM), CPU, "forward")
    assert resolve(Request(PROBLEM, tuned=table_of(stale)), CPU, "forward") == default


@needs_native
def test_shipped_tables_are_found_by_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device("cpu", product="NVIDIA H100 80GB HBM3")
    plan = other_plan(PROBLEM)
    monkeypatch.setattr(tables, "shipped_tables", lambda: {"NVIDIA H100 80GB HBM3": table_of(plan, gpu.kind)})
    assert resolve(Request(PROBLEM), gpu, "forward").tiles == plan.tiles
    assert resolve(Request(PROBLEM), Device("cpu", product="NVIDIA H200"), "forward").tiles != plan.tiles
    monkeypatch.setenv(tables.VARIABLE, "0")
    assert tables.measured(Request(PROBLEM), gpu, "forward") is None


def test_every_pass_of_a_shipped_table_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tables.VARIABLE, raising=False)
    for product in tables.shipped_tables():
        device = Device("cuda", product=product)
        table = tables.shipped(device)
        assert table is not None and table.device == product
        for each in table.passes:
            problem = dataclasses.replace(each.plan.problem, scale=0.25)  # plans in tables apply to all scales
            assert tables.measured(Request(problem), device, each.plan.pass_) is each
            assert each.seconds <= each.default_seconds


def test_functions_without_an_operator_and_other_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="calls no operator of natten_jax"):
        natten_jax.tune(jnp.sin, jnp.ones(3))
    with pytest.raises(TypeError, match="function must be callable, got int"):
        natten_jax.tune(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"device": 3}, "device must be a str"),
        ({"tuned": {}}, "tuned must be a list"),
        ({"tuned": [3]}, r"tuned\[0\]: it is not an object"),
        ({"tuned": [{"seconds": "fast"}]}, r"tuned\[0\]: seconds must be a float"),
        ([], "does not hold a tuned configuration.*--optimize --json PATH"),
        ({"rows": []}, "does not hold a tuned configuration"),
    ],
)
def test_malformed_tables(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    is_table = isinstance(content, dict) and "rows" not in content
    path.write_text(json.dumps({"device": "cpu", "tuned": [], **content} if is_table else content))
    with pytest.raises(ValueError, match=rf"^path='{path}'.*{message}"):
        natten_jax.load_tuned(path)


@pytest.mark.parametrize(
    ("fast", "slow", "is_clear"),
    [
        ((1.0,) * 8, (1.05,) * 8, True),
        ((1.0,) * 8, (1.01,) * 8, False),
        ((1.0,) * 8, (0.9,) * 8, False),
        ((0.8, 0.9, 0.9, 1.0, 1.0, 1.1, 1.2, 1.3), (0.9, 0.9, 1.0, 1.1, 1.1, 1.1, 1.2, 1.3), False),  # noise
    ],
)
def test_gains_within_noise_are_not_kept(fast: tuple[float, ...], slow: tuple[float, ...], is_clear: bool) -> None:
    assert search.is_clearly_faster(fast, slow) == is_clear
