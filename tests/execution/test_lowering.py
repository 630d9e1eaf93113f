"""Programs lowered for absent GPUs, program size, and memory use."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import natten_jax
from natten_jax import na2d, simulator
from natten_jax.backends import cpu, cutlass
from natten_jax.performance import Performance
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import NAME_ATTRIBUTE, PLAN_ATTRIBUTE, Plan
from natten_jax.profiler.program import Program
from tests.support.compilation import as_users_do
from tests.support.families import Family
from tests.support.machine import Machine
from tests.support.programs import output_of, run_python

# Programs for absent GPUs: lowered, not run.


HOPPER, ADA = (9, 0), (8, 9)

CALLS = {
    HOPPER: ["natten_jax_sm90_forward", "natten_jax_sm90_backward_statistics", "natten_jax_sm90_backward"],
    ADA: ["natten_jax_sm80_forward", "natten_jax_sm80_delta", "natten_jax_sm80_backward"],
}


@pytest.fixture
def lowered(machine: Machine) -> Callable[..., str]:
    """Return a function that lowers another function for an absent GPU, and returns the program as text."""

    def lower(capability: tuple[int, int], function: Callable[..., Any], *arrays: Any) -> str:
        machine.has(Device("cuda", capability, is_present=False))
        exported = jax.export.export(
            jax.jit(function), platforms=["cuda"], disabled_checks=natten_jax.EXPORT_CHECKS
        )(*arrays)  # fmt: skip
        return str(exported.mlir_module())

    return lower


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def calls(text: str) -> list[str]:
    """Return the names of the custom calls in a program.

    A custom call inside a function appears once, even if the program calls the function several times.
    """
    return re.findall(r"custom_call @(natten_jax\w+)", text)


def tiles(shape: tuple[int, ...]) -> dict[str, Any]:
    """Return tile arguments that select the large-window kernels, which support windows of any size."""
    names = "q_tile_shape", "kv_tile_shape", "backward_q_tile_shape", "backward_kv_tile_shape"
    return dict.fromkeys(names, shape)


@pytest.mark.parametrize("arguments", [{}, tiles((8, 8))], ids=["small windows", "large windows"])
@pytest.mark.parametrize("capability", CALLS)
def test_a_loss_of_only_the_output_writes_no_zeros(
    capability: tuple[int, int], arguments: dict[str, Any], lowered: Callable[..., str]
) -> None:
    """If a loss does not depend on the logsumexp, the program contains no cotangent of zeros for it.

    A kernel would have to write these zeros, and another kernel would have to read them.
    """

    def loss(query: jax.Array, *, reads_logsumexp: bool) -> jax.Array:
        out, logsumexp = natten_jax.na2d(query, query, query, 7, **arguments, return_lse=True)
        return out.astype("float32").sum() + (jnp.sin(logsumexp).sum() if reads_logsumexp else 0)

    lse_pattern = r"(broadcast_in_dim|constant|cosine)[^\n]* tensor<8x(1x)?28x28x4xf32>"
    for reads_logsumexp in (False, True):
        differentiate = jax.grad(functools.partial(loss, reads_logsumexp=reads_logsumexp))
        text = lowered(capability, differentiate, array(8, 28, 28, 4, 32))
        assert bool(re.search(lse_pattern, text)) == reads_logsumexp


@pytest.mark.parametrize("capability", CALLS)
@pytest.mark.parametrize(("width", "width_v"), [(1, 250), (32, 20), (40, 24)])
def test_heads_of_any_width_run_on_kernels(
    capability: tuple[int, int], width: int, width_v: int, lowered: Callable[..., str]
) -> None:
    """Heads are padded with zeros. The default scale is computed from the unpadded head dimension."""

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return natten_jax.na1d(query, key, value, 40, **tiles((32,))).astype("float32").sum()

    arrays = [array(2, 64, 4, each) for each in (width, width, width_v)]
    text = lowered(capability, jax.grad(loss, (0, 1, 2)), *arrays)
    assert calls(text) == CALLS[capability]
    wide, wide_v = (-(-each // 8) * 8 for each in (width, width_v))
    assert ("stablehlo.pad" in text) == ((wide, wide_v) != (width, width_v))
    forward = next(line for line in text.splitlines() if f"@{CALLS[capability][0]}(" in line)
    assert f"2x1x1x64x4x{wide}xbf16" in forward
    assert f"2x1x1x64x4x{wide_v}xbf16" in forward
    scale = float(re.findall(r"scale = ([-+.e\d]+) : f32", forward)[0])
    assert math.isclose(scale, width**-0.5, rel_tol=1e-6)
    results = re.findall(r"tensor<2x64x4x(\d+)xbf16>", re.findall(r"func.func public @main.*-> \((.*)\) \{", text)[0])
    assert results == [str(width), str(width), str(width_v)]


@pytest.mark.parametrize("capability", CALLS)
def test_equal_layers_share_their_program(capability: tuple[int, int], lowered: Callable[..., str]) -> None:
    def layers(x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = natten_jax.na1d(x, x, x, 9, **tiles((64,)))
        return x.astype("float32").sum()

    text = lowered(capability, jax.grad(layers), array(2, 64, 4, 64))
    assert sorted(calls(text)) == sorted(CALLS[capability])


def test_batches_are_folded_into_one_call(lowered: Callable[..., str]) -> None:
    def operator(x: jax.Array) -> jax.Array:
        return natten_jax.na3d(x, x, x, 3, is_causal=(True, False, False), backend="hopper-fna")

    text = lowered(HOPPER, jax.vmap(jax.vmap(operator)), array(2, 3, 5, 4, 6, 8, 2, 128))
    assert calls(text) == ["natten_jax_sm90_forward"]
    assert "tensor<30x4x6x8x2x128xbf16>" in text


def test_a_backend_that_cannot_run_there_gives_the_reason(lowered: Callable[..., str]) -> None:
    def operator(x: jax.Array) -> jax.Array:
        return natten_jax.na1d(x, x, x, 9, backend="hopper-fna")

    with pytest.raises(ValueError, match=r"compute capability 9.0 only, not on cuda \(compute capability 8.9\)"):
        lowered(ADA, operator, array(2, 64, 4, 64))


@pytest.mark.parametrize("operator", ["forward", "backward"])
def test_steps_of_plain_jax_have_the_size_for_the_platform(operator: str) -> None:
    """The size of a step depends on the platform of the program, not on the device of this process.

    On a CPU, the logits of a step fit in the caches. On an accelerator, they are enough work for the whole device.
    """

    def forward(x: jax.Array) -> jax.Array:
        return natten_jax.na1d(x, x, x, 9, backend="flex-fna")

    function = forward if operator == "forward" else jax.grad(lambda x: forward(x).sum())

    def largest_product(platform: str) -> int:
        exported = jax.export.export(jax.jit(function), platforms=[platform], disabled_checks=natten_jax.EXPORT_CHECKS)
        text = str(exported(array(4, 65_536, 8, 32, dtype=jnp.float32)).mlir_module())
        shapes = re.findall(r"stablehlo.dot_general .* -> tensor<([0-9x]+)xf32>", text)
        return max(math.prod(map(int, shape.split("x"))) for shape in shapes)

    cpu_product, gpu_product, tpu_product = map(largest_product, ("cpu", "cuda", "tpu"))
    assert cpu_product <= 2**20 < gpu_product <= 2**22 and tpu_product == gpu_product


@pytest.mark.parametrize(("precision", "is_accurate"), [(None, 1), ("highest", 1), ("tensorfloat32", 0)])
def test_precision_is_that_of_the_call_not_of_the_compilation(
    precision: str | None, is_accurate: int, lowered: Callable[..., str]
) -> None:
    def loss(x: jax.Array) -> jax.Array:
        with jax.default_matmul_precision(precision):
            return natten_jax.na1d(x, x, x, 9).sum()

    text = lowered(HOPPER, jax.grad(loss), array(2, 64, 4, 64, dtype=jnp.float32))
    assert text.count(f"is_accurate = {is_accurate} : i64") == 2  # forward and backward


# Compiled programs: number of instructions per layer, and plans in the metadata of instructions.


def layers(count: int, backend: str, layout: tuple[int, int] = (16, 24), dtype: str = "float32") -> jax.stages.Lowered:
    """Lower a program that computes ``count`` equal layers and their gradients."""
    tokens = jax.ShapeDtypeStruct((1, *layout, 2, 16), dtype)

    def run(query: jax.Array, key: jax.Array) -> jax.Array:
        for _ in range(count):
            query = na2d(query, key, key, kernel_size=5, backend=backend)
        return jnp.sum(query.astype("float32"))

    return jax.jit(jax.grad(run, argnums=(0, 1))).lower(tokens, tokens)


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile with XLA's default options, but do not optimize the machine code, which these tests do not read."""
    options: dict[str, Any] = {**as_users_do(), "xla_backend_optimization_level": 0}
    return lowered.compile(compiler_options=options)


def instructions(text: str) -> int:
    return len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", text, re.MULTILINE))


def test_a_plan_appears_once_in_each_pass(family: Family) -> None:
    """In the lowered program, equal layers call the same function for a pass, so each pass has one plan.

    The compiled program contains a copy of both passes for each layer.
    """
    lowered = layers(3, family.fna, dtype=family.dtype)
    assert lowered.as_text().count(f"{PLAN_ATTRIBUTE} =") == 2
    program = compiled(lowered)
    text = program.as_text()
    assert text is not None
    names = set(re.findall(rf'{NAME_ATTRIBUTE}="([0-9a-f]+)"', text))
    assert len(names) == 2
    plans = [each.plan for each in Program.from_compiled(program).instructions.values() if each.plan is not None]
    assert {plan.pass_ for plan in plans} == {"forward", "backward"}
    assert all(str(plan.backend) == family.fna for plan in plans)


def test_loops_of_a_pass_are_marked(pure_family: Family) -> None:
    program = Program.from_compiled(compiled(layers(1, pure_family.fna))).instructions.values()
    loops = [each for each in program if each.opcode == "while"]
    assert loops and all(each.plan is not None for each in loops)


@pytest.mark.parametrize("layout", [(16, 24), (128, 256)])
def test_a_layer_in_plain_jax_is_small(layout: tuple[int, int]) -> None:
    """A layer has so few instructions that 24 layers with gradients compile in seconds.

    XLA takes about 0.2 milliseconds per instruction.
    """
    one, two = (compiled(layers(count, "flex-fna", layout)).as_text() for count in (1, 2))
    assert one is not None and two is not None
    assert instructions(two) - instructions(one) < 1600


# Memory does not grow with the number of query/key pairs, and the memory preference limits scratch memory.


PROGRAM = """
import resource, sys
import jax, jax.numpy as jnp
import natten_jax

backend = sys.argv[1]
query, key, value, cotangent = (
    jax.random.normal(jax.random.key(i), (1, 256, 256, 1, 32), jnp.float32) for i in range(4)
)
jax.block_until_ready((query, key, value, cotangent))

@jax.jit
def both(query, key, value, cotangent):
    out, pullback = jax.vjp(lambda *a: natten_jax.na2d(*a, kernel_size=7, backend=backend), query, key, value)
    return out, pullback(cotangent)

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
jax.block_until_ready(both(query, key, value, cotangent))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6)
"""

LARGEST = 400  # in MB. Operands, results and gradients take 64 MB. All logits would take 16384 MB.


@pytest.mark.usefixtures("without_stored_programs")
def test_peak_of_both_passes(family: Family) -> None:
    if family.needs_gpu:
        pytest.skip("this is about the host's memory")
    megabytes = float(output_of(run_python(PROGRAM, family.fna, quick=False, fresh=True)))
    assert megabytes < LARGEST


LIMITS = {"strict": 64 << 20, "default": 1 << 30, "unrestricted": math.inf}


@given(
    preference=st.sampled_from(sorted(LIMITS)),
    batch=st.integers(1, 9),
    heads_kv=st.integers(1, 24),
    group=st.integers(1, 4),
    tokens=st.integers(1, 200_000),
    head_dim=st.sampled_from([8, 64, 128, 256]),
)
def test_query_gradients_are_summed_up_within_the_preference(
    preference: str, batch: int, heads_kv: int, group: int, tokens: int, head_dim: int
) -> None:
    heads = heads_kv * group
    problem = simulator.problem_of((tokens,), 1, batch=batch, heads=heads, heads_kv=heads_kv, head_dim=head_dim)
    query: Any = jax.ShapeDtypeStruct((batch, 1, 1, tokens, heads, head_dim), jnp.bfloat16)
    elements = cutlass.scratch_elements(problem, query, Performance(memory_usage_preference=preference))
    head_elements, limit = tokens * group * head_dim, LIMITS[preference]
    assert elements % head_elements == 0
    at_once = elements // head_elements
    # Scratch memory contains the sums for some heads of one batch entry, or for all heads of some entries. It contains
    # as many heads as fit within the limit, but at least one.
    assert 1 <= at_once <= batch * heads_kv and (at_once < heads_kv or at_once % heads_kv == 0)
    assert at_once == 1 or 4 * elements <= limit
    if 4 * batch * heads_kv * head_elements <= limit:
        assert at_once == batch * heads_kv
    if at_once < heads_kv:  # if the loop over heads had one iteration less, the memory would exceed the limit
        turns = math.ceil(heads_kv / at_once)
        assert 4 * head_elements * math.ceil(heads_kv / (turns - 1)) > limit


@pytest.mark.parametrize("preference", [None, "strict", "unrestricted"])
def test_preference_reaches_the_backend(preference: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    backward = cpu.CpuBackend.backward

    def record(self: cpu.CpuBackend, plan: Plan, *arguments: Any) -> Any:
        seen.append(plan.performance.memory_usage_preference)
        return backward(self, plan, *arguments)

    monkeypatch.setattr(cpu.CpuBackend, "backward", record)
    chosen: dict[str, Any] = {} if preference is None else {"memory_usage_preference": preference}
    array = jnp.ones((1, 12, 2, 8))
    for kernel_size in (5, 12):  # windows of 5 of the 12 tokens, and of all tokens
        jax.grad(lambda x, k=kernel_size: natten_jax.na1d(x, x, x, k, **chosen).sum())(array)
    jax.grad(lambda x: natten_jax.attention(x, x, x, **chosen).sum())(array)
    assert seen and set(seen) == {preference or "default"}
