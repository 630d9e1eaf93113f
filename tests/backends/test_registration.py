"""Names, platforms and devices of backends, and a backend registered outside of the package."""

from __future__ import annotations

import ast
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import natten_jax
from natten_jax import backends
from natten_jax.arrays.operands import Operands, Output
from natten_jax.backends.base import Capabilities, Platform, PureJaxBackend
from natten_jax.ops.config_queries import target_device
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.devices import Device, compute_capability_of, default_device
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem
from tests.support.families import Family
from tests.support.machine import Machine
from tests.support.programs import output_of, run_command

ARRAY = jnp.zeros((1, 16, 2, 8))


def messages(name: Any) -> list[str]:
    """Return the errors for a backend's name, given to ``na1d``, to ``attention``, and in ``attention_kwargs``."""
    found = []
    for call in (
        lambda: natten_jax.na1d(ARRAY, ARRAY, ARRAY, 3, backend=name),
        lambda: natten_jax.attention(ARRAY, ARRAY, ARRAY, backend=name),
        lambda: natten_jax.na1d(ARRAY, ARRAY, ARRAY, 3, attention_kwargs={"backend": name}),
    ):
        with pytest.raises(ValueError, match="backend") as caught:
            call()
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("hoper-fna", "hopper"),
        ("Hopper_FNA", "hopper"),
        ("cutlas", "cutlass"),
        (" cutlass fmha", "cutlass"),
        ("flex", "flex"),
        ("flexx-fmha", "flex"),
        ("CPU", "cpu"),
    ],
)
def test_a_misspelt_name_finds_the_backend_of_the_operator(name: str, meant: str) -> None:
    for message, operator in zip(messages(name), ("fna", "fmha", "fmha"), strict=True):
        assert f"{name!r} is unknown: did you mean '{meant}-{operator}'? Choose None or one of" in message


@pytest.mark.parametrize("name", ["", "-", "torch-fna", "none", "gpu", "x" * 10**6, 3, ["cpu-fna"], None.__class__])
def test_other_names_have_no_suggestion(name: Any) -> None:
    for message in messages(name):
        assert "is unknown; choose None or one of" in message
        assert all(each in message for each in backends.names("fna" if "cpu-fna," in message else "fmha"))


@pytest.mark.parametrize(("name", "whose"), [("cudnn", "JAX"), ("xformers", "PyTorch"), ("fav2", "PyTorch")])
def test_messages_explain_names_of_other_implementations(name: str, whose: str) -> None:
    for message in messages(name):
        assert f"{name} is an implementation of" in message
        assert whose in message


def test_a_backend_of_the_other_operator_names_its_counterpart() -> None:
    with pytest.raises(ValueError, match=r"'cpu-fmha' is a backend of attention, and this is .*did you mean 'cpu-fna'"):
        natten_jax.na1d(ARRAY, ARRAY, ARRAY, 3, backend="cpu-fmha")
    with pytest.raises(ValueError, match=r"'cpu-fna' is a backend of neighborhood attention, .* mean 'cpu-fmha'"):
        natten_jax.attention(ARRAY, ARRAY, ARRAY, backend="cpu-fna")


def test_costs_and_native_calls_know_no_family() -> None:
    """No shared module contains the name of a family.

    Only backends and calibrations describe the kernels of a family.
    """
    platforms = {"cpu", "tpu"}  # these platforms are also names of families
    root, families = Path(natten_jax.__file__).parent, {each.family for each in backends.registered()} - platforms
    named = {}
    for folder in ("arrays", "plan", "native", "cost_model", "sharding", "execution", "ops"):
        for path in (root / folder).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
            if found := {word for word in words if word in families or word.rpartition("-")[0] in families}:
                named[path.name] = found
    assert not named


ROOT = Path(__file__).parents[2]

WITH_TOY = "import sys, tests.support.toy_backend\n"


def run_with_toy(*arguments: str) -> str:
    """Run Python in a new process that can import the toy backend, and return its output."""
    return output_of(run_command(arguments, os.environ, folder=ROOT))


def test_it_is_written_in_fewer_than_40_lines() -> None:
    assert sum(map(bool, (ROOT / "tests" / "support" / "toy_backend.py").read_text().splitlines())) < 40


def test_it_is_known_to_operators_and_queries() -> None:
    code = """
import jax, natten_jax
array = jax.ShapeDtypeStruct((1, 12, 2, 8), "float32")
print(natten_jax.get_configs_for_toy_fna(array), natten_jax.get_bwd_configs_for_toy_fmha(array))
print([name for name in dir(natten_jax) if "toy" in name])
try:
    natten_jax.na1d(*[jax.numpy.zeros((1, 12, 2, 8))] * 3, 3, backend="nobody-fna")
except ValueError as error:
    print(error)
"""
    printed = run_with_toy("-c", WITH_TOY + code)
    for part in ("[((1,), (1,))] [(1, 1)]", "get_bwd_configs_for_toy_fmha", "cpu-fna, tpu-fna, toy-fna, flex-fna"):
        assert part in printed, part


@pytest.mark.parametrize(
    ("module", "arguments", "expected"),
    [
        ("doctor", "", "toy-fmha       runs float16, float32"),
        ("profiler", "-i 12 -w 3 --dtype fp32 --dry-run", "Use case is compatible with backend toy-fna."),
        ("profiler", "-i 12 -w 3 --dtype fp32 --backend toy-fna --iterations 2", "toy-fna"),
    ],
)
def test_it_is_known_to_the_tools(module: str, arguments: str, expected: str) -> None:
    code = f"""
import runpy
sys.argv = ["tool", *{arguments.split()}]
runpy.run_module("natten_jax.{module}", run_name="__main__")
"""
    assert expected in run_with_toy("-c", WITH_TOY + code)


@pytest.mark.slow
def test_it_passes_the_suite_of_a_family() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    files = "tests/ops/test_operators.py", "tests/ops/test_configs.py"
    # The toy backend does not divide problems into tiles. So tests with many tiles would take longer, and test nothing
    # new.
    options = "-p", "tests.support.toy_backend", "-k", "toy and not many-tiles", "--problems", "8"
    done = run_command(["-m", "pytest", *options, *files], environment, timeout=900, folder=ROOT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found and int(found[1]) > 60, done.stdout[-500:]


# A backend for an absent device. Calls can be lowered for the backend's platform. For other platforms, lowering raises.


TOKENS = jax.ShapeDtypeStruct((1, 12, 2, 8), jnp.float32)


class ConstantBackend(PureJaxBackend):
    """A backend with a trivial computation, for one platform. The text of a lowered program contains the plans."""

    family = "constant"

    def __init__(self, platform: str, *, fuses_additional_kv: bool = True) -> None:
        self.capabilities = Capabilities(  # type: ignore[misc]
            ("float32",),
            lambda *_: (1, 1),
            Platform(platform),
            carries_plan=False,
            features=("additional_kv",) if fuses_additional_kv else (),
            is_plain_jax=True,
        )

    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        tile = (1,) * problem.rank
        return [(tile, tile)]

    def attend(self, plan: Plan, operands: Operands) -> Output:
        query, value = operands.inputs.query, operands.inputs.value
        return Output(query + value.sum(), query.sum(-1))


def attend(x: jax.Array, **arguments: Any) -> jax.Array:
    return natten_jax.na1d(x, x, x, 3, **arguments)


def gradient(x: jax.Array, **arguments: Any) -> jax.Array:
    return jax.grad(lambda x: attend(x, **arguments).sum())(x)


def exported(function: Callable[..., Any], *platforms: str) -> str:
    checks = natten_jax.EXPORT_CHECKS
    return str(jax.export.export(jax.jit(function), platforms=platforms, disabled_checks=checks)(TOKENS).mlir_module())


def is_of_it(text: str) -> bool:
    return "constant-fna" in text


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
@pytest.mark.parametrize("name", [None, "constant-fna"])
@pytest.mark.parametrize("function", [attend, gradient])
def test_it_is_lowered_for_its_platform(
    platform: str, name: str | None, function: Callable[..., Any], machine: Machine
) -> None:
    machine.knows(ConstantBackend(platform))
    assert is_of_it(exported(lambda x: function(x, backend=name), platform))


@pytest.mark.parametrize("function", [attend, gradient])
def test_it_is_rejected_on_other_devices(function: Callable[..., Any], machine: Machine) -> None:
    machine.knows(ConstantBackend("tpu"))
    for platform in "cpu", "cuda", "rocm":
        with pytest.raises(ValueError, match=rf"'constant-fna' cannot run .* on {platform}: it runs on platform tpu"):
            exported(lambda x: function(x, backend="constant-fna"), platform)
    with pytest.raises(ValueError, match=r"on cpu: it runs on platform tpu only, not on cpu\. Backends that can: cpu-"):
        attend(jnp.zeros(TOKENS.shape), backend="constant-fna")
    assert not any(is_of_it(exported(function, platform)) for platform in ("cpu", "cuda", "rocm"))


def test_one_program_for_several_platforms_has_what_each_prefers(machine: Machine) -> None:
    machine.knows(ConstantBackend("tpu"))
    text = exported(attend, "cpu", "tpu", "rocm")
    assert [text.count('natten_jax_plan = "{') > 0, is_of_it(text), "natten_jax_cpu_forward" in text] == [True] * 3


@pytest.mark.parametrize("platform", ["tpu", "rocm", "plugin"])
def test_it_is_the_default_on_its_machine(platform: str, machine: Machine) -> None:
    """On a device of its platform, the backend runs by default and by name. Configuration queries list its tiles."""
    machine.knows(ConstantBackend(platform))
    machine.has(Device(platform))
    assert natten_jax.get_configs_for_constant_fna(TOKENS) == [((1,), (1,))]
    for name in None, "constant-fna":
        jax.eval_shape(lambda x, name=name: gradient(x, backend=name), TOKENS)
    with pytest.raises(ValueError, match=rf"'hopper-fna' cannot run .* on {platform}: "):
        jax.eval_shape(lambda x: attend(x, backend="hopper-fna"), TOKENS)


@pytest.mark.parametrize("fuses", [True, False])
def test_a_backend_may_leave_additional_tokens_to_another_call(fuses: bool, machine: Machine) -> None:
    machine.knows(ConstantBackend("tpu", fuses_additional_kv=fuses))
    tokens = jnp.ones((1, 3, 2, 8))

    def with_additional(x: jax.Array) -> jax.Array:
        return attend(x, additional_keys=tokens, additional_values=tokens, backend="constant-fna")

    text = exported(with_additional, "tpu")
    assert is_of_it(text) and ("constant-fmha" in text) == (not fuses)


# The argument ``compute_capability`` of configuration queries.


def test_none_is_the_default_device() -> None:
    assert target_device(None) == default_device()


REFUSED: dict[type[Exception], list[Any]] = {
    ValueError: [
        "x", "", "9", "sm_90", "9.0a", " 9.0", "9.", "9.75", "9.0.1", "1_0.0", "\u0669.\u0660", "-9.0", "0.9",
        "9" * 5000 + ".0", float("nan"), float("inf"), -9.0, 8.65, 1e-9, (9,), (), (9, 0, 0), (9, 10), (9, -1), (0, 0),
        (10**9, 0),
    ],
    TypeError: [
        9, 90, 10**5000, True, b"9.0", (9.0, 0.0), np.array([9.0, 0.0]), ("9", "0"), (True, False), ((9, 0),),
        {"major": 9, "minor": 0}, {9, 0}, Device,
    ],
}  # fmt: skip


@pytest.mark.parametrize("error", REFUSED)
def test_other_values_raise_a_one_line_error(error: type[Exception], family: Family) -> None:
    array = jax.ShapeDtypeStruct((1, 40, 2, 16), jnp.dtype(family.dtype))
    for value, operator in itertools.product(REFUSED[error], ("fna", "fmha")):
        with pytest.raises(error, match=r"^compute_capability must be .*\"9\.0\".*\(9, 0\)") as caught:
            family.query(operator, "forward")(array, compute_capability=value)
        assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


@given(st.integers(1, 99), st.integers(0, 9))
def test_all_spellings_are_equal(major: int, minor: int) -> None:
    text = f"{major}.{minor}"
    assert compute_capability_of(text) == (major, minor)
    values: tuple[Any, ...] = (text, float(text), np.float32(text), (major, minor), [major, minor])
    for value in (*values, np.array([major, minor]), jnp.array([major, minor]), (np.int32(major), np.int8(minor))):
        device = target_device(value)
        assert device == Device("cuda", (major, minor), is_present=False)
        assert hash(device) == hash(Device("cuda", (major, minor), is_present=False))
