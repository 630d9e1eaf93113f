"""Profile a neighborhood attention block on video tokens, to see which kernels take the time of a compiled step.

JAX's profiler records the launches of the compiled block; natten_jax's profiler reads the trace and gives every launch
a readable name.

    python examples/profile_block.py --layout 8 16 16 --kernel-size 4 7 7 --backward
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from natten_jax.flax_modules.nnx import NeighborhoodAttention3D
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from natten_jax.plan.devices import default_device
from natten_jax.profiler import capture, measure
from natten_jax.profiler.program import Program, compile_for_trace
from natten_jax.profiler.report import format_time


class Block(nnx.Module):
    """Neighborhood attention and an MLP, each with pre-normalization and a residual connection."""

    def __init__(self, features: int, attention: NeighborhoodAttention3D, dtype: Any, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(features, dtype=dtype, rngs=rngs)
        self.attention = attention
        self.perceptron_norm = nnx.LayerNorm(features, dtype=dtype, rngs=rngs)
        self.expand = nnx.Linear(features, 4 * features, dtype=dtype, rngs=rngs)
        self.contract = nnx.Linear(4 * features, features, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Apply the block to ``[batch, depth, height, width, features]``. The result has the same shape."""
        tokens = tokens + self.attention(self.attention_norm(tokens))
        return tokens + self.contract(nnx.gelu(self.expand(self.perceptron_norm(tokens))))


def build(options: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
    """Build the function to profile and its arguments: the block's state and random tokens."""
    dtype = jnp.dtype(options.dtype)
    rngs = nnx.Rngs(0)
    attention = NeighborhoodAttention3D(
        options.features,
        num_heads=options.heads,
        kernel_size=tuple(options.kernel_size),
        stride=tuple(options.stride),
        dilation=tuple(options.dilation),
        dtype=dtype,
        backend=options.backend,
        rngs=rngs,
    )
    graph, state = nnx.split(Block(options.features, attention, dtype, rngs))
    tokens = jax.random.normal(rngs.params(), (options.batch, *options.layout, options.features), dtype)

    def forward(state: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(tokens)

    def forward_and_backward(state: Any, tokens: jax.Array) -> Any:
        outputs, pull_back = jax.vjp(forward, state, tokens)
        return outputs, pull_back(jnp.ones_like(outputs))

    return forward_and_backward if options.backward else forward, (state, tokens)


def profile(options: argparse.Namespace) -> tuple[measure.Row, ...]:
    """Compile the block, run it under JAX's profiler, and add up the times of its launches by name."""
    platform = default_device().platform
    function, arguments = build(options)
    compiled = compile_for_trace(function, *arguments)
    jax.block_until_ready(compiled(*arguments))
    program = Program.from_compiled(compiled)
    iterations = capture.capture(lambda: compiled(*arguments), options.iterations, program, platform)
    return measure.summarize(iterations, program, "fna", platform)


def table(rows: Sequence[measure.Row], title: str) -> Table:
    """Format a table with a line per operation, slowest first."""
    total = sum(row.runtime for row in rows)
    result = Table("Operation", "Category", title=title, show_footer=True)
    result.columns[0].footer = "Total"
    result.add_column("Calls", str(sum(row.calls for row in rows)), justify="right")
    result.add_column("Runtime", format_time(total), justify="right")
    result.add_column("Share", "100.0%", justify="right")
    for row in sorted(rows, key=lambda row: -row.runtime):
        name = escape(row.name.operation)  # names may contain brackets, which rich would parse as markup
        result.add_row(name, row.name.category, str(row.calls), format_time(row.runtime), f"{row.runtime / total:.1%}")
    return result


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Profile a 3-D neighborhood attention block with JAX's profiler.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--batch", type=int, default=1, help="videos")
    parser.add_argument("--layout", type=int, nargs=3, default=[8, 16, 16], help="tokens: depth, height, width")
    parser.add_argument("--features", type=int, default=128, help="features per token")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--kernel-size", type=int, nargs=3, default=[4, 7, 7], help="window of the attention")
    parser.add_argument("--stride", type=int, nargs=3, default=[1, 1, 1], help="queries that share a window")
    parser.add_argument("--dilation", type=int, nargs=3, default=[1, 1, 1], help="distance between a window's tokens")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--backward", action="store_true", help="also profile the gradient")
    parser.add_argument("--backend", default=None, help="such as cpu-fna or flex-fna (default: automatic)")
    parser.add_argument("--iterations", type=int, default=5, help="runs; times are medians over them")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Profile and print the table."""
    options = parse(arguments)
    passes = "forward and backward" if options.backward else "forward"
    layout, window = ("x".join(map(str, sizes)) for sizes in (options.layout, options.kernel_size))
    title = f"Block on {layout} tokens, window {window}, {passes}, {options.dtype}, {jax.devices()[0].device_kind}"
    Console().print(table(profile(options), title))


if __name__ == "__main__":
    main()
