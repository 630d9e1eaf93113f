"""``--optimize``, and its results as arguments of the operators and the modules."""

from __future__ import annotations

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
from natten_jax.backends.select import plan_with
from natten_jax.native import module as native
from natten_jax.performance import PASSES, Pass, TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import BackendId
from natten_jax.profiler import parse, predict, search
from natten_jax.profiler.__main__ import main
from natten_jax.profiler.capture import Event
from natten_jax.profiler.options import Options
from natten_jax.profiler.program import Program
from natten_jax.profiler.search import Optimum, best_table, optimize
from natten_jax.profiler.workload import Workload, request_of

needs_native = pytest.mark.skipif(native.path() is None, reason="the native module is not built")
FEW = "--warmup-steps 1 --iterations 2"
HOPPER_GPU = Device("cuda", (9, 0), is_present=False)


@needs_native
def test_search_result_is_accepted_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from natten_jax.flax_modules import linen, nnx

    path = tmp_path / "tuned.json"
    problem = "-i 8 12 -n 2 -d 16 -w 4 6 --dtype fp32 --backprop --backend cpu-fna"
    assert main(f"{problem} --optimize {FEW} --json {path}".split()) == 0
    output = capsys.readouterr().out
    assert output.index("Best configuration") < output.index("Profiler results")
    assert "Speedup over the default configuration" in output
    tuned = natten_jax.load_tuned(path)
    assert tuned["backend"] == "cpu-fna"
    assert tuned["attention_kwargs"] == {"backend": "cpu-fmha"}
    assert {len(tuned[f"{prefix}{side}_tile_shape"]) for prefix in ("", "backward_") for side in ("q", "kv")} == {2}

    found = json.loads(path.read_text())
    trials = found["search"]["trials"]
    assert len(trials) > 20
    assert any(trial["passes"] == ["forward", "backward"] for trial in trials)
    assert found["search"]["best_seconds"] <= found["search"]["default_seconds"]

    query, key, value = (jax.random.normal(jax.random.key(i), (1, 8, 12, 2, 16)) for i in range(3))

    def loss(arguments: Mapping[str, Any]) -> Any:
        return lambda q: jnp.sum(natten_jax.na2d(q, key, value, (4, 6), **arguments) ** 2)

    plain, fast = (jax.value_and_grad(loss(arguments))(query) for arguments in (dict[str, Any](), tuned))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain, fast)
    layer = nnx.NeighborhoodAttention2D(32, num_heads=2, kernel_size=(4, 6), rngs=nnx.nnx.Rngs(0), **tuned)
    assert layer(jnp.ones((1, 8, 12, 32))).shape == (1, 8, 12, 32)
    module = linen.NeighborhoodAttention2D(num_heads=2, kernel_size=(4, 6), **tuned)
    assert module.init_with_output(jax.random.key(0), jnp.ones((1, 8, 12, 32)))[0].shape == (1, 8, 12, 32)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_tuned_arguments_are_taken_in_every_rank(rank: int, tmp_path: Path) -> None:
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
    """Query tiles of both passes, and the schedule."""
    performance = options.performance
    return performance.q_tile_shape, performance.backward_q_tile_shape, performance.kernel_schedule


def fake_search(monkeypatch: pytest.MonkeyPatch, line: str, seconds: Any) -> tuple[Optimum, list[tuple[Any, ...]]]:
    """A search whose programs are not compiled: ``seconds(options)`` is what they take, or an error."""
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
    monkeypatch.setattr(search, "capture_in_turns", capture)
    return optimize(parse(line.split())), compiled


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
    assert sum(backend == "flex-fna" for backend, *_ in compiled) == 1  # hopeless after one run


@needs_native
def test_without_a_calibration_the_backends_own_order_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "-i 48 64 -w 8 9 --backprop --backend cpu-fna --optimize"
    assert simulator.calibration_for("cpu", None) is None
    options = parse(line.split())
    problem = predict.main_sub_call(options).request.problem
    offered = {each.pass_: each.pairs for each in predict.listings(options, problem, Device("cpu"))}
    compiled = fake_search(monkeypatch, line, lambda options: 1e-3)[1]
    forward = [q_tile for _, q_tile, backward_q_tile, _ in compiled if backward_q_tile is None]
    backward = [backward_q_tile for *_, backward_q_tile, _ in compiled if backward_q_tile is not None]
    for searched, pass_ in zip((forward, backward), PASSES, strict=True):
        first = [pair[0] for pair in offered[pass_][:40]]
        assert len(first) > 10
        assert searched[: len(first)] == first


@needs_native
def test_search_does_not_wait_for_plain_jax_where_kernels_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    optimum, compiled = fake_search(monkeypatch, "-i 64 -w 8 --optimize", lambda options: 0.03)
    assert optimum.options.backend == "cpu-fna"
    assert {backend for backend, *_ in compiled} == {"cpu-fna", None}  # None is what runs without a choice


@needs_native
def test_search_keeps_what_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_best_configuration_names_what_ran_by_default(backend: str, arguments: str, schedule: str | None) -> None:
    options = parse(f"-i 64 64 -w 8 8 --backprop --optimize {arguments}".split())
    tiles: dict[Pass, TilePair] = {"forward": ((16, 8), (8, 16)), "backward": ((8, 8), (16, 8))}
    request = request_of(options)
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "holds no tuned configuration"),
        ('{"rows": []}', "--optimize --json PATH"),
        ('{"best_configuration": {"scale": 2}}', "unknown arguments scale"),
    ],
)
def test_files_that_are_no_search_results(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        natten_jax.load_tuned(path)
