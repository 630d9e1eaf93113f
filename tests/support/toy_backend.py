"""A backend family outside the package, in fewer than 40 lines: dense attention with a mask, in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax import backends, windows
from natten_jax.arrays.operands import Operands, Output
from natten_jax.backends.base import Capabilities, PureJaxBackend


class ToyBackend(PureJaxBackend):
    family = "toy"
    capabilities = Capabilities(
        ("float32", "float16"), lambda *_: (1, 1), carries_plan=False, is_plain_jax=True, is_slow_fallback=True
    )

    def tile_pairs(self, problem, device, pass_):
        return [((1,) * problem.rank, (1,) * problem.rank)]

    def attend(self, plan, operands: Operands) -> Output:
        problem, inputs = plan.problem, operands.inputs
        (batch, *queries, heads, _), keys = inputs.query.shape, inputs.key.shape[1:-2]
        # Without origins, NumPy computes the mask during tracing, so that it is a constant and not traced or compiled.
        xp, origins = (np, np.zeros((2, 3), int)) if operands.origins is None else (jnp, operands.origins)
        mask = xp.ones((1, 1), bool)
        for axis, start, own, others in zip(problem.axes, origins[:, 3 - problem.rank :].T, queries, keys, strict=True):
            query, key, d = (start[0] + xp.arange(own))[:, None], start[1] + xp.arange(others), axis.dilation
            length = windows.group_length(axis.kv_extent, d, query % d)
            first, end = windows.window_bounds(axis.window, query // d, length, xp=xp)
            seen = (query % d == key % d) & (first <= key // d) & (key // d < end)
            mask = (mask[:, None, :, None] & seen[:, None]).reshape(len(mask) * own, -1)
        tokens = [a.reshape(batch, -1, *a.shape[-2:]).astype("float32") for a in inputs[:3]]
        if more := [array for array in inputs[3:5] if array is not None]:
            mask = xp.pad(mask, ((0, 0), (0, problem.additional_kv)), constant_values=True)
            tokens[1:] = (jnp.concatenate(pair, axis=1) for pair in zip(tokens[1:], more, strict=True))
        query, key, value = (jnp.repeat(a, heads // a.shape[2], axis=2) for a in tokens)
        scale = problem.scale if inputs.scale is None else inputs.scale[:, None, :, None]
        logits = scale * jnp.einsum("bqhd,bkhd->bqhk", query, key, precision="highest")
        logits = jnp.where(mask[:, None], logits, -jnp.inf)
        lse = jax.nn.logsumexp(logits, axis=-1)
        weights = jnp.exp(logits - jnp.where(lse == -jnp.inf, 0, lse)[..., None])
        out = jnp.einsum("bqhk,bkhd->bqhd", weights, value, precision="highest").astype(problem.dtype)
        return Output(out.reshape(batch, *queries, heads, -1), lse.reshape(batch, *queries, heads))


backends.register(ToyBackend())
