"""Custom calls in programs that are lowered for GPUs. The GPUs are simulated, so no GPU is needed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from natten_jax.native import module as native
from natten_jax.plan.devices import Device
from tests.guard.calls import Call, windows
from tests.support.machine import Machine

GPUS = {"sm_80": (8, 0), "sm_90": (9, 0)}
#: Names of operations that move data between devices.
_COLLECTIVES = "all_gather", "all_reduce", "all_to_all", "collective_permute", "reduce_scatter"


@contextlib.contextmanager
def fake_gpu(name: str) -> Iterator[None]:
    """Let this process lower programs as if the machine had the named GPU, and the build had kernels for it."""
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch)
        build = {**native.build_info(), "cuda_architectures": ["80", "90a"]}
        patch.setattr(native, "missing", lambda target: None)
        patch.setattr(native, "build_info", lambda: build)
        machine.has(Device("cuda", GPUS[name]))
        yield
    machine.forget()


@dataclasses.dataclass(frozen=True)
class Case:
    """A program.

    Attributes:
        call: The call that the program makes.
        targets: For each GPU, the name prefix of the custom calls that the program must contain.
        passes: Passes to lower, from ``forward`` and ``gradients``.
        mesh: Kind of sharding: ``shard_map``, or a mesh with ``auto`` or ``explicit`` axes. ``None`` for one device.
        spec: Mesh axes over which the dimensions of query, key and value are sharded.
    """

    call: Call
    targets: Mapping[str, str]
    passes: Sequence[str] = ("forward", "gradients")
    mesh: str | None = None
    spec: P = dataclasses.field(default_factory=P)


_L, _K = (16, 16), {"kernel_size": (5, 5)}
_LARGE, _LARGE_K = (48, 48), {"kernel_size": (24, 24)}
_SMALL = {"sm_80": "sm80_small", "sm_90": "sm80_small"}
_TILED = {"sm_80": "sm80", "sm_90": "sm90"}


def _na2d(layout: tuple[int, ...] = _L, shapes: Mapping[str, Any] | None = None, **options: Any) -> Call:
    more = {"heads": 4, "heads_kv": 4, "head_dim": 64, **(shapes or {})}
    kernel = _K if layout == _L else _LARGE_K
    return Call("na2d", windows(layout, **more), {**kernel, **options}, "bfloat16")


def _attention(shapes: Mapping[str, Any] | None = None, **options: Any) -> Call:
    more = {"heads": 4, "heads_kv": 2, "head_dim": 64, **(shapes or {})}
    return Call("attention", windows((4096,), **more), options, "bfloat16")


_LAYOUTS = [[16, 16], [12, 9]]
_CALLS: Mapping[str, tuple[Call, Mapping[str, str]]] = {
    "small": (_na2d(), _SMALL),
    "large": (_na2d(_LARGE), _TILED),
    "large causal": (_na2d(_LARGE, is_causal=(True, False)), _TILED),
    "large stride dilation": (_na2d(_LARGE, stride=(4, 2), dilation=(2, 1)), _TILED),
    "large grouped heads": (_na2d(_LARGE, {"heads_kv": 2}), _TILED),
    "large additional fused": (_na2d(_LARGE, {"additional": 8}, try_fuse_additional_kv=True), _TILED),
    "large additional merged": (_na2d(_LARGE, {"additional": 8}, try_fuse_additional_kv=False), _TILED),
    "large key bias": (_na2d(_LARGE, {"key_bias": (2, 48, 48)}), _TILED),
    "large key bias of heads": (_na2d(_LARGE, {"key_bias": (2, 4, 48, 48)}), _TILED),
    "large sinks": (_na2d(_LARGE, {"sinks": (4,)}), _TILED),
    "large scales": (_na2d(_LARGE, {"scale": (4,)}), _TILED),
    "large scale": (_na2d(_LARGE, {"scale": ()}), _TILED),
    "large wrap": (_na2d(_LARGE, edges="wrap"), _TILED),
    "large cut": (_na2d(_LARGE, edges="cut"), _TILED),
    "large extents": (_na2d(_LARGE, extents=[[48, 48], [40, 30]]), _TILED),
    "large origins": (_na2d(_LARGE, {"queries": (24, 24)}, query_origin=[[3, 5], [0, 1]]), _TILED),
    "large upsample": (_na2d(_LARGE, {"queries": (96, 48)}, upsample=(2, 1)), _TILED),
    "large deterministic": (_na2d(_LARGE, backward_deterministic=True), _TILED),
    "small relative bias": (_na2d(shapes={"head_dim": 32, "relative_bias": (4, 9, 9)}), _SMALL),
    "small relative bias sinks": (_na2d(shapes={"head_dim": 32, "relative_bias": (4, 9, 9), "sinks": (4,)}), _SMALL),
    "small biases": (
        _na2d(shapes={"head_dim": 32, "relative_bias": (4, 9, 9), "key_bias": (2, 16, 16), "scale": (4,)}),
        _SMALL,
    ),
    "small key bias of heads": (_na2d(shapes={"head_dim": 32, "key_bias": (2, 4, 16, 16)}), _SMALL),
    "small extents": (_na2d(extents=_LAYOUTS), _SMALL),
    "small wrap": (_na2d(edges="wrap"), _SMALL),
    "small na1d": (
        Call("na1d", windows((512,), head_dim=64), {"kernel_size": 9, "is_causal": True, "dilation": 4}, "float16"),
        _SMALL,
    ),
    "small na3d": (Call("na3d", windows((8, 8, 8), head_dim=32), {"kernel_size": (3, 3, 3)}, "bfloat16"), _SMALL),
    "float32": (
        Call("na2d", windows(_LARGE, head_dim=64), dict(_LARGE_K), "float32"),
        {"sm_80": "sm80", "sm_90": "sm80"},
    ),
    "cutlass by name": (_na2d(_LARGE, backend="cutlass-fna"), {"sm_80": "sm80", "sm_90": "sm80"}),
    "attention": (_attention(), _TILED),
    "attention causal": (_attention(is_causal=True), _TILED),
    "attention lengths": (_attention(kv_lengths=[4096, 3000], query_lengths=[4096, 2000]), _TILED),
    "attention key bias sinks": (_attention({"key_bias": (2, 4096), "sinks": (4,)}), _TILED),
}
_MESHED = {"tokens": (_na2d(_LARGE, edges="cut"), P("x", "y")), "heads": (_na2d(_LARGE), P("x", None, None, "y"))}
_MESHES = "shard_map", "auto", "explicit"


def cases() -> dict[str, Case]:
    """Return all cases by name."""
    found = {name: Case(call, targets) for name, (call, targets) in _CALLS.items()}
    fp8 = _na2d(_LARGE, {"head_dim": 128}, fp8="e4m3", backend="hopper-fna")
    found["fp8"] = Case(fp8, {"sm_90": "sm90_forward_float8"}, ("forward",))
    for mesh, (name, (call, spec)) in itertools.product(_MESHES, _MESHED.items()):
        if mesh == "shard_map" and name == "tokens":
            call = dataclasses.replace(call, options={**call.options, "token_axes": ("y", None)})
        found[f"{mesh} {name}"] = Case(call, _TILED, mesh=mesh, spec=spec)
    return found


def programs() -> dict[str, tuple[str, Case, str]]:
    """Return the GPU, case and pass of each program. The program's name is ``GPU/case/pass``."""
    return {
        f"{gpu}/{name}/{pass_}": (gpu, case, pass_)
        for gpu in GPUS
        for name, case in cases().items()
        for pass_ in case.passes
        if gpu in case.targets
    }


def required_targets(name: str) -> set[str]:
    """Return the names of the custom calls that a program must contain."""
    gpu, case, pass_ = programs()[name]
    if case.mesh == "auto":  # the calls of each device are lowered later, by XLA's partitioner
        return {"CustomSPMDPartitioning"}
    prefix = f"natten_jax_{case.targets[gpu]}"
    if prefix.endswith("float8"):
        return {prefix}
    return {f"{prefix}_{each}" for each in (("forward",) if pass_ == "forward" else ("forward", "backward"))}


def take(names: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Return a list of lines for each program: a description of each distinct custom call."""
    found = {}
    for gpu, group in itertools.groupby(names or programs(), lambda name: name.split("/")[0]):
        with fake_gpu(gpu):
            for name in group:
                _, case, pass_ = programs()[name]
                found[name] = lines_of(case, case.call.run if pass_ == "forward" else case.call.gradients)
    return found


def lines_of(case: Case, function: Callable[[Mapping[str, Any]], Any]) -> list[str]:
    """Lower a function for a GPU with the arrays and mesh of a case, and return descriptions of its custom calls."""
    operands = case.call.abstract_arrays()
    context: Any = contextlib.nullcontext()
    if case.mesh is not None:
        kind = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "shard_map": AxisType.Auto}[case.mesh]
        mesh = AbstractMesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
        context = jax.sharding.use_abstract_mesh(mesh)
        if case.mesh == "shard_map":
            shape = {"query": case.spec, "key": case.spec, "value": case.spec}
            lse = P(*tuple(case.spec)[:4])
            results = shape if function == case.call.gradients else (case.spec, lse)
            function = jax.shard_map(function, mesh=mesh, in_specs=(shape,), out_specs=results)
        else:
            sharding = NamedSharding(mesh, case.spec)
            operands = {
                name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding) for name, each in operands.items()
            }
    with context:
        lowered = jax.jit(function).trace(operands).lower(lowering_platforms=("cuda",))
    return Reader(lowered.compiler_ir("stablehlo"), sorted(operands)).lines()


class Reader:
    """Describes the custom calls of a StableHLO module.

    The description of an operand contains its type and the program's arguments on which it depends. The description
    therefore changes if two operands of the same type trade places. The body of a function is read once per call of the
    function.
    """

    def __init__(self, module: Any, arguments: Sequence[str]) -> None:
        functions = [op.operation for op in module.body.operations if op.operation.name == "func.func"]
        self._functions = {_symbol(op): op.regions[0].blocks[0] for op in functions}
        self._lines: dict[str, None] = {}
        main = self._functions["main"]
        # Integer arrays are constants of the program. Its arguments are the floating-point arrays, sorted by name.
        count = len(main.arguments)
        self._walk(main, [frozenset({name}) for name in arguments][:count])

    def lines(self) -> list[str]:
        """Return the sorted descriptions of the distinct calls."""
        return sorted(self._lines)

    def _walk(self, block: Any, inputs: Sequence[frozenset[str]], outer: Any = None) -> list[frozenset[str]]:
        """Read the calls in a block, and return the program arguments on which each result of the block depends."""
        known = {} if outer is None else dict(outer)
        known |= dict(zip(block.arguments, inputs, strict=True))
        results: list[frozenset[str]] = []
        for op in block.operations:
            op = op.operation
            sources = [known.get(value, frozenset()) for value in op.operands]
            everything = frozenset().union(*sources)
            found = [everything] * len(op.results)
            if op.name in ("func.return", "stablehlo.return", "sdy.return"):
                results = sources
            elif op.name in ("func.call", "call"):
                callee = str(op.attributes["callee"]).lstrip("@").strip('"')
                found = self._walk(self._functions[callee], sources)
            elif op.name == "stablehlo.custom_call":
                self._read(op, sources)
            else:
                for region in op.regions:
                    for inner in region.blocks:
                        given = sources if len(inner.arguments) == len(sources) else None
                        given = given or [everything] * len(inner.arguments)
                        region_origins = self._walk(inner, given, known)
                        if len(region_origins) == len(found):
                            found = [one | other for one, other in zip(found, region_origins, strict=True)]
                            if op.name == "sdy.manual_computation":
                                found = region_origins
                kind = op.name.rpartition(".")[2]
                if kind in _COLLECTIVES:
                    self._lines[f"collective {kind}"] = None
            known |= dict(zip(op.results, found, strict=True))
        return results

    def _read(self, op: Any, sources: Sequence[frozenset[str]]) -> None:
        target = str(op.attributes["call_target_name"]).strip('"')
        if not target.startswith("natten_jax") and target != "CustomSPMDPartitioning":
            return
        operands = [
            f"{value.type} of {' '.join(sorted(given)) or 'nothing'}"
            for value, given in zip(op.operands, sources, strict=True)
        ]
        text = [target, "(", ", ".join(operands), ") -> ", ", ".join(str(each.type) for each in op.results)]
        if target.startswith("natten_jax"):
            for name in ("mhlo.backend_config", "output_operand_aliases"):
                if name in op.attributes:
                    text.append(f" {name}={op.attributes[name]}")
        self._lines[re.sub(r"\s+", " ", "".join(text))] = None


def _symbol(op: Any) -> str:
    return str(op.operation.attributes["sym_name"]).strip('"')
