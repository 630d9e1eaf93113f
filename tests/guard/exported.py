"""Programs that are exported for the CPU, some of them with their derivative."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.export
import numpy as np

import natten_jax
from tests.guard.calls import Call, cosines, windows
from tests.guard.results import difference

_L, _K = (5, 6), {"kernel_size": (3, 3)}


@dataclasses.dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        call: The call that the program makes.
        vjp_order: Number of times that the restored program can be differentiated.
    """

    call: Call
    vjp_order: int = 0


def _cpu(function: str, shapes: Mapping[str, Any], **options: Any) -> Call:
    operator = "fmha" if function == "attention" else "fna"
    return Call(function, shapes, {"backend": f"cpu-{operator}", **options})


PROGRAMS = {
    "na1d": Program(_cpu("na1d", windows((12,)), kernel_size=5, dilation=2, is_causal=True), 1),
    "na2d": Program(_cpu("na2d", windows(_L, 4, 2), **_K, stride=2), 1),
    "na3d": Program(_cpu("na3d", windows((2, 3, 4)), kernel_size=(2, 3, 2)), 0),
    "biases": Program(
        _cpu("na2d", windows(_L, relative_bias=(2, 5, 5), key_bias=(2, *_L), sinks=(2,), scale=(2,)), **_K), 1
    ),
    "additional": Program(_cpu("na2d", windows(_L, additional=3), **_K, try_fuse_additional_kv=False), 1),
    "extents": Program(_cpu("na2d", windows(_L), **_K, extents=[[5, 6], [4, 3]]), 0),
    "origin": Program(_cpu("na2d", windows(_L, queries=(3, 4)), **_K, query_origin=[2, 1]), 0),
    "wrap": Program(_cpu("na2d", windows(_L), **_K, edges="wrap"), 0),
    "attention": Program(_cpu("attention", windows((9,), 4, 2, queries=(7,)), kv_lengths=[9, 4]), 1),
    "flex": Program(Call("na2d", windows(_L), {**_K, "backend": "flex-fna", "edges": "cut"}), 0),
}


def take(names: Sequence[str] = tuple(PROGRAMS)) -> dict[str, np.ndarray]:
    """Return the serialised programs as bytes."""
    found = {}
    for name in names:
        program = PROGRAMS[name]
        export = jax.export.export(jax.jit(program.call.run), disabled_checks=natten_jax.EXPORT_CHECKS)
        serialised = export(program.call.abstract_arrays()).serialize(vjp_order=program.vjp_order)
        found[name] = np.frombuffer(serialised, np.uint8)
    return found


def disagreements(name: str, recorded: np.ndarray) -> list[str]:
    """Run a recorded program and the same call in this tree, and return the differences of their results."""
    program = PROGRAMS[name]
    restored = jax.export.deserialize(bytearray(recorded.tobytes()))
    arrays = program.call.arrays(1)

    def both(run: Any) -> dict[str, Any]:
        results, pullback = jax.vjp(run, arrays) if program.vjp_order else (run(arrays), None)
        found = dict(zip(("out", "lse"), results, strict=True))
        if pullback is not None:
            cotangents = tuple(map(cosines, results))
            found |= {f"d_{argument}": each for argument, each in pullback(cotangents)[0].items()}
        return {argument: np.asarray(each) for argument, each in found.items()}

    found, expected = both(jax.jit(restored.call)), both(jax.jit(program.call.run))
    texts = {argument: difference(found[argument], each, program.call.dtype) for argument, each in expected.items()}
    return [f"{argument}: {text}" for argument, text in texts.items() if text is not None]
