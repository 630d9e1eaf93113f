"""Plans and the default device. A plan is made once per pass and device, and the compiled program contains it."""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import natten_jax
from natten_jax import backends
from natten_jax.arrays.operands import Inputs, Operands
from natten_jax.backends import select
from natten_jax.backends.select import resolve
from natten_jax.performance import PASSES, KernelSchedule, Pass, Performance
from natten_jax.plan import devices
from natten_jax.plan.devices import CPU, Device, default_device, default_jax_device, local_devices, lowering_targets
from natten_jax.plan.plan import BackendId, Plan, Request
from natten_jax.problem import problem_of
from natten_jax.profiler.program import Program
from tests.fuzz.problem import Fuzzed
from tests.support.cases import as_attention, random_case
from tests.support.machine import Machine
from tests.support.meshes import mesh_of

# Plans are stored in compiled programs, and read back from them.


HOPPER = Device("cuda", (9, 0), is_present=False)

shapes = st.none() | st.lists(st.integers(1, 2**40), min_size=1, max_size=3).map(tuple)


@given(st.integers(0, 2**31), st.sampled_from(PASSES), shapes, shapes, st.sampled_from([None, "pp"]))
def test_payload_holds_every_field(seed: int, pass_: Pass, tile: Any, splits: Any, schedule: Any) -> None:
    case = random_case(seed)
    case = as_attention(np.random.default_rng(seed), case, 100) if seed % 4 == 0 else case
    problem = Fuzzed("cpu", case, "float16" if seed % 2 else "float32", seed).description()
    performance = Performance(q_tile_shape=tile, backward_kv_splits=splits, kernel_schedule=schedule)
    plan = Plan(problem, pass_, BackendId("hopper", problem.operator), "cuda", performance)
    text = plan.payload()
    assert "\n" not in text and json.loads(text)["description"] == plan.problem.describe()
    found = Plan.from_payload(text)
    assert found == plan and hash(found) == hash(plan)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"pass": "forward"}', '{"problem": [], "pass": 1}'])
def test_malformed_payloads_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="no plan of natten_jax"):
        Plan.from_payload(text)


def test_a_program_holds_its_plans(native_family: Any) -> None:
    array = jax.ShapeDtypeStruct((1, 12, 14, 2, 16), native_family.dtype)

    def both(array: jax.Array) -> Any:
        return jax.grad(lambda x: natten_jax.na2d(x, x, x, (3, 5), backend=native_family.fna).sum().astype("f4"))(array)

    program = Program.from_compiled(jax.jit(both).lower(array).compile())
    ran = {each.plan for each in program.instructions.values() if each.target.startswith(native_family.target)}
    problem = problem_of((12, 14), (3, 5), heads=2, head_dim=16, dtype=native_family.dtype)
    device = next(device for device in jax.devices())
    expected = CPU if device.platform == "cpu" else Device("cuda", (9, 0))
    assert {plan.pass_ for plan in ran if plan} == set(PASSES)
    if expected == CPU:
        assert ran == {resolve(Request(problem, backend=native_family.fna), CPU, pass_) for pass_ in PASSES}


@pytest.mark.parametrize("pass_", PASSES)
def test_requested_tiles_are_the_plan(pass_: Pass) -> None:
    problem = problem_of((64, 64), 9)
    pair = (8, 8), (8, 16)
    plan = resolve(Request(problem, Performance().with_tiles(pass_, pair), "hopper-fna"), HOPPER, pass_)
    assert plan.tiles == pair and plan.backend == BackendId("hopper", "fna")
    default = resolve(Request(problem, backend="hopper-fna"), HOPPER, pass_)
    assert default.kernel_schedule == (KernelSchedule.PING_PONG if pass_ == "forward" else None)
    assert default.tiles[0] and default.performance.tiles(pass_) == default.tiles


def test_only_backends_with_schedules_have_one() -> None:
    asked = Performance(kernel_schedule="coop")
    problem = problem_of((64, 64), 9)
    assert resolve(Request(problem, asked, "hopper-fna"), HOPPER, "forward").kernel_schedule == "coop"
    assert resolve(Request(problem, asked, "cutlass-fna"), HOPPER, "forward").kernel_schedule is None


def test_an_empty_attention_kwargs_is_none() -> None:
    query = jnp.ones((1, 12, 2, 8))
    more = jnp.ones((1, 3, 2, 8))

    def calls(attention_kwargs: Any) -> int:
        operator = jax.jit(
            lambda q: natten_jax.na1d(
                q, q, q, 3, additional_keys=more, additional_values=more, attention_kwargs=attention_kwargs
            )
        )
        return str(operator.trace(query).jaxpr).count("natten_jax_pass[")

    assert calls({}) == calls(None) == 1
    assert calls({"q_tile_size": None}) == 2


@pytest.mark.parametrize("precision", [None, "highest", "tensorfloat32"])
def test_a_plan_has_the_precision_of_its_call(precision: str | None) -> None:
    request = Request(problem_of((16,), 4), backend="flex-fna", precision=precision)
    plan = resolve(request, CPU, "forward")
    assert plan.precision == precision
    assert Plan.from_payload(plan.payload()) == plan


@pytest.mark.parametrize("backend", ["flex-fna", "cutlass-fna"])
def test_backends_read_precision_only_from_the_plan(backend: str) -> None:
    """A pass may be traced long after its call. JAX's precision option may have changed by then."""
    array: Any = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.float32)
    programs = []
    for around in (None, "tensorfloat32"):
        request = Request(problem_of((64,), 4, heads=2, head_dim=64, dtype="float32"), backend=backend)
        plan = resolve(request, Device("cuda", (9, 0), is_present=False), "forward")

        def run(operands: Operands, plan: Plan = plan) -> Any:
            return backends.by_id(plan.backend).forward(plan, operands)

        with jax.default_matmul_precision(around):
            programs.append(str(jax.make_jaxpr(run)(Operands(Inputs(array, array, array)))))
    assert programs[0] == programs[1]


# The plan of each pass is made once per device, even if a program has several equal calls.


@pytest.fixture
def decisions(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> collections.Counter[Any]:
    """Count the plans that are made, by device, pass, and number of shards of each dimension."""
    made: collections.Counter[Any] = collections.Counter()
    decide = select.decided.__wrapped__

    @functools.lru_cache
    def counted(request: Any, device: Any, pass_: Any, registered: Any) -> Any:
        made[device, pass_, request.parts] += 1
        return decide(request, device, pass_, registered)

    monkeypatch.setattr(select, "decided", counted)
    return made


def loss(x: jax.Array, **arguments: Any) -> jax.Array:
    return natten_jax.na2d(x, x, x, 5, **arguments).sum()


@pytest.mark.parametrize("name", [None, "flex-fna"])
@pytest.mark.parametrize("times", [1, 3])
def test_each_pass_is_decided_once_for_a_device(
    name: str | None, times: int, decisions: collections.Counter[Any]
) -> None:
    def layers(x: jax.Array) -> jax.Array:
        return jnp.stack([loss(x, backend=name) for _ in range(times)]).sum()

    jax.jit(jax.grad(layers)).lower(jax.ShapeDtypeStruct((2, 16, 16, 2, 8), jnp.float32))
    assert set(decisions.values()) == {1}
    assert {pass_ for device, pass_, _ in decisions if device.platform == "cpu"} >= {"forward"}


@pytest.mark.usefixtures("without_stored_programs")
def test_a_gradient_over_a_mesh_decides_once_for_the_layout_and_once_for_its_parts(
    decisions: collections.Counter[Any],
) -> None:
    sharding = NamedSharding(mesh_of("Auto", d=2), PartitionSpec(None, "d"))
    function = jax.jit(jax.grad(loss), in_shardings=sharding)
    function.lower(jax.ShapeDtypeStruct((2, 16, 16, 2, 8), jnp.float32)).compile()
    assert decisions == {(CPU, pass_, parts): 1 for pass_ in PASSES for parts in ((), (2, 1))}


def test_rejected_calls_are_rejected_every_time(decisions: collections.Counter[Any]) -> None:
    x = jax.ShapeDtypeStruct((2, 16, 16, 2, 8), jnp.float32)
    said = []
    for _ in range(3):
        with pytest.raises(ValueError, match="hopper-fna") as caught:
            jax.eval_shape(lambda x: loss(x, backend="hopper-fna"), x)
        said.append(str(caught.value))
    assert len(set(said)) == 1 and set(decisions.values()) == {1}


# The default device of this package is the default device of JAX.


HOPPER_DEVICE = Device("cuda", (9, 0))


class FakeGpu(NamedTuple):
    """A simulated GPU. It has only the attributes that this package reads from a JAX device."""

    platform: str = "gpu"
    compute_capability: str = "9.0"


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate a process with two platforms: the first is a GPU, and the second is the CPU."""
    (host, *_) = jax.local_devices(backend="cpu")
    by_platform: dict[str | None, list[Any]] = {None: [FakeGpu()], "gpu": [FakeGpu()], "cuda": [FakeGpu()]}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: by_platform.get(backend, [host]))
    monkeypatch.setattr(jax, "devices", jax.local_devices)
    cached = devices._cuda_device, devices._cuda_devices
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


def test_the_first_platform_is_the_default(fake_gpu: None) -> None:
    assert default_jax_device() == FakeGpu()
    assert default_device() == HOPPER_DEVICE
    assert local_devices() == (HOPPER_DEVICE, CPU)
    assert [*lowering_targets().items()][:2] == [("cuda", HOPPER_DEVICE), ("cpu", CPU)]


@pytest.mark.parametrize("chosen", ["cpu", "device"])
def test_another_default_is_respected(fake_gpu: None, chosen: str) -> None:
    (host, *_) = jax.local_devices(backend="cpu")
    with jax.default_device("cpu" if chosen == "cpu" else host):
        assert default_jax_device() == host
        assert default_device() == CPU
        assert local_devices() == (CPU, HOPPER_DEVICE)  # with the GPU: it may hold arrays
        assert [*lowering_targets().values()][:2] == [CPU, HOPPER_DEVICE]
    assert default_device() == HOPPER_DEVICE


def test_rejected_calls_name_the_default_device(fake_gpu: None) -> None:
    x = jax.ShapeDtypeStruct((1, 12, 2, 12), jnp.float16)

    def run(x: jax.Array) -> jax.Array:
        return natten_jax.na1d(x, x, x, 3, backend="hopper-fna")

    with jax.default_device("cpu"), pytest.raises(ValueError, match=r"on cpu: it runs on .*, not on cpu"):
        jax.eval_shape(run, x)
    array = jax.ShapeDtypeStruct((1, 40, 4, 16), jnp.float32)
    with jax.default_device("cpu"):
        assert natten_jax.get_configs_for_cpu_fna(array)
    assert not natten_jax.get_configs_for_cpu_fna(array)


@pytest.mark.gpu
def test_host_kernels_run_if_a_gpu_is_the_first_platform() -> None:
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        x = jnp.ones((1, 12, 2, 8))
        assert jnp.allclose(natten_jax.na1d(x, x, x, 3, backend="cpu-fna"), 1.0)
        with pytest.raises(ValueError, match="on cpu: "):
            natten_jax.na1d(x, x, x, 3, backend="hopper-fna")
