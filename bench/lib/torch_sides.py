"""PyTorch implementations to compare with: NATTEN, and FlexAttention with masks of neighborhood attention."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from benchmarks import Benchmark

from lib.sides import Side, wall_times
from lib.timing import LAUNCHES
from natten_jax import windows
from natten_jax.performance import Pass
from natten_jax.windows import Axis

Tensor = Any


def natten(benchmark: Benchmark, cotangent: jax.Array, arrays: Sequence[jax.Array], pass_: Pass, platform: str) -> Side:
    """Prepare NATTEN's operator for timing. The operator permutes its arrays, and the times include that."""
    library: Any = importlib.import_module("natten")
    problem = benchmark.problem
    operator = library.attention if benchmark.kernel_size is None else getattr(library, f"na{problem.rank}d")
    facts: dict[str, Any] = {"is_causal": benchmark.is_causal}
    if benchmark.kernel_size is not None:
        facts = {
            "kernel_size": problem.kernel_size,
            "stride": problem.stride,
            "dilation": problem.dilation,
            "is_causal": problem.is_causal,
        }
    tensors = [_tensor(array, platform) for array in (cotangent, *arrays)]
    return _side(lambda *inputs: operator(*inputs, **facts), tensors, pass_, platform, lambda tensor: tensor)


def flex_attention(
    benchmark: Benchmark, cotangent: jax.Array, arrays: Sequence[jax.Array], pass_: Pass, platform: str
) -> Side:
    """Prepare compiled FlexAttention for timing.

    The inputs are permuted to ``[batch, heads, tokens, head_dim]`` in advance. This permutation is not timed.
    """
    torch: Any = importlib.import_module("torch")
    library: Any = importlib.import_module("torch.nn.attention.flex_attention")
    mask = None
    if benchmark.kernel_size is not None or benchmark.is_causal:
        tokens = benchmark.tokens
        mask_of = _mask(benchmark.problem.axes, _device(platform))
        mask = library.create_block_mask(mask_of, None, None, tokens, tokens, device=_device(platform))
    compiled = torch.compile(library.flex_attention)
    tensors = [_tensor(array, platform).flatten(1, -3).transpose(1, 2).contiguous() for array in (cotangent, *arrays)]
    is_grouped = benchmark.heads_kv is not None
    return _side(
        lambda *inputs: compiled(*inputs, block_mask=mask, enable_gqa=is_grouped),
        tensors,
        pass_,
        platform,
        lambda tensor: tensor.transpose(1, 2),
    )


def _mask(axes: Sequence[Axis], device: str) -> Callable[..., Tensor]:
    """Build FlexAttention's mask function, which looks up the window bounds of a query in a table per dimension."""
    torch: Any = importlib.import_module("torch")
    tables, below = [], 1
    for axis in reversed(axes):
        coordinate = np.arange(axis.query_extent)
        group, index = coordinate % axis.dilation, coordinate // axis.dilation
        window = windows.Window(axis.kernel_size, axis.stride, axis.is_causal)
        length = windows.group_length(axis.kv_extent, axis.dilation, group)
        ends = windows.window_bounds(window, index, length)
        starts, stops = (torch.tensor(np.asarray(each) * axis.dilation + group, device=device) for each in ends)
        tables.append((below, axis.query_extent, axis.dilation, starts, stops))
        below *= axis.query_extent

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= 0
        for step, extent, dilation, starts, stops in tables:
            at, key_at = query // step % extent, key // step % extent
            seen = seen & (starts[at] <= key_at) & (key_at < stops[at]) & (at % dilation == key_at % dilation)
        return seen

    return sees


def _side(
    function: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    pass_: Pass,
    platform: str,
    as_ours: Callable[[Tensor], Tensor],
) -> Side:
    torch: Any = importlib.import_module("torch")
    upstream, *inputs = tensors
    if pass_ == "backward":
        for tensor in inputs:
            tensor.requires_grad_()
        output = function(*inputs)

        def run() -> Sequence[Tensor]:
            gradients: Sequence[Tensor] = torch.autograd.grad(output, inputs, upstream, retain_graph=True)
            return gradients

    else:

        def run() -> Sequence[Tensor]:
            with torch.no_grad():
                return (function(*inputs),)

    run()
    return Side(
        (lambda: _device_times(torch, run)) if platform == "cuda" else (lambda: wall_times(run)),
        lambda: [as_ours(each).detach().float().cpu().numpy() for each in run()],
        is_same=True,
    )


def _device_times(torch: Any, run: Callable[[], Any]) -> list[float]:
    """Return the time of each of several launches, in seconds, from events that the device records between launches.

    Earlier launches keep the device busy, so that the times do not include launch latency.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(LAUNCHES + 2)]
    run()
    for event in events:
        event.record()
        run()
    torch.cuda.synchronize()
    return [first.elapsed_time(then) / 1e3 for first, then in itertools.pairwise(events)][1:]


def _device(platform: str) -> str:
    return "cuda" if platform == "cuda" else "cpu"


def _tensor(array: jax.Array, platform: str) -> Tensor:
    torch: Any = importlib.import_module("torch")
    plain = torch.from_numpy(np.array(array, np.float32))
    return plain.to(device=_device(platform), dtype=getattr(torch, str(array.dtype)))
