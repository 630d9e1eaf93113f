"""Generate sequences token by token, with a causal sliding-window transformer and a key-value cache.

The prompts of a batch have different lengths, so a step processes a different position of each sequence. The step is
compiled only once, for all positions. The cache keeps the keys and values of all tokens (``--cache whole``), or
only those of the current window in a ring buffer (``--cache ring``). Afterwards, the logits of all steps are compared
with the logits of a single pass over the whole sequences.

Parameters and prompts are random: the example shows the mechanism, not a trained model.

    python examples/decode.py --tokens 64 --window 16 --cache ring
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax import attention, na1d
from natten_jax.rotary import apply_rotary, rotary_angles


class Layer(NamedTuple):
    """Parameters of a layer: projections of query, key, value and output, and the MLP."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    out: jax.Array
    expand: jax.Array
    contract: jax.Array


class Cache(NamedTuple):
    """Keys and values of a layer, ``[batch, slots, heads, head_dim]``."""

    keys: jax.Array
    values: jax.Array


class Model(NamedTuple):
    """Parameters of a transformer: token embeddings, layers, and the projection to the logits of the vocabulary."""

    embeddings: jax.Array
    layers: tuple[Layer, ...]
    logits: jax.Array


def random_model(key: jax.Array, options: argparse.Namespace) -> Model:
    """Return a model with random parameters."""
    heads, heads_kv, width = options.heads, options.heads_kv, options.head_dim
    features = heads * width
    keys = iter(jax.random.split(key, 2 + 6 * options.depth))

    def draw(*shape: int, inputs: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / inputs**0.5

    def layer() -> Layer:
        return Layer(
            draw(features, heads, width, inputs=features),
            draw(features, heads_kv, width, inputs=features),
            draw(features, heads_kv, width, inputs=features),
            draw(heads, width, features, inputs=features),
            draw(features, 4 * features, inputs=features),
            draw(4 * features, features, inputs=4 * features),
        )

    embeddings, layers = draw(options.vocabulary, features, inputs=1), tuple(layer() for _ in range(options.depth))
    return Model(embeddings, layers, draw(features, options.vocabulary, inputs=features))


def normalized(tokens: jax.Array) -> jax.Array:
    """Normalize tokens to a root mean square of 1."""
    return tokens * jax.lax.rsqrt(jnp.mean(tokens**2, axis=-1, keepdims=True) + 1e-6)


def projected(layer: Layer, tokens: jax.Array, angles: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Project ``[batch, tokens, features]`` to query, key and value.

    Query and key are rotated by angles ``[batch, tokens, pairs]``.
    """
    query, key, value = (jnp.einsum("btf,fhd->bthd", normalized(tokens), each) for each in layer[:3])
    turned = jax.vmap(apply_rotary)
    return turned(query, angles), turned(key, angles), value


def with_layer(layer: Layer, tokens: jax.Array, attended: jax.Array) -> jax.Array:
    """Apply the output projection and the MLP of a layer, each with a residual connection."""
    tokens = tokens + jnp.einsum("bthd,hdf->btf", attended, layer.out)
    return tokens + jax.nn.gelu(normalized(tokens) @ layer.expand) @ layer.contract


def logits_at_once(model: Model, ids: jax.Array, angles: jax.Array, window: int) -> jax.Array:
    """Return the logits of all tokens of sequences ``[batch, tokens]``, from a single pass."""
    batch, count = ids.shape
    tokens = model.embeddings[ids]
    per_token = jnp.broadcast_to(angles[:count], (batch, count, angles.shape[-1]))
    for layer in model.layers:
        query, key, value = projected(layer, tokens, per_token)
        attended = na1d(query, key, value, window, is_causal=True, clamp_window=True)
        tokens = with_layer(layer, tokens, attended)
    return normalized(tokens) @ model.logits


def step(
    model: Model, caches: tuple[Cache, ...], ids: jax.Array, places: jax.Array, angles: jax.Array, window: int
) -> tuple[tuple[Cache, ...], jax.Array]:
    """Process one token of each sequence; return the new caches and the logits ``[batch, vocabulary]``.

    Args:
        model: The model.
        caches: Cache of each layer. A cache with fewer slots than positions is a ring buffer.
        ids: Token ids, ``[batch]``.
        places: Positions of the tokens in their sequences, ``[batch]``.
        angles: Rotary angles, ``[positions, pairs]``.
        window: Window size in tokens.
    """
    tokens = model.embeddings[ids][:, None]
    slots = caches[0].keys.shape[1]
    new = []
    for layer, cache in zip(model.layers, caches, strict=True):
        query, key, value = projected(layer, tokens, angles[places][:, None])
        put = jax.vmap(lambda old, own, slot: jax.lax.dynamic_update_slice_in_dim(old, own, slot, 0))
        cache = Cache(put(cache.keys, key, places % slots), put(cache.values, value, places % slots))
        if slots == len(angles):
            attended = na1d(query, *cache, window, is_causal=True, query_origin=places[:, None])
        else:  # a ring buffer contains the current window in any order; at first, some slots are empty
            attended = attention(query, *cache, kv_lengths=jnp.minimum(places + 1, slots))
        tokens = with_layer(layer, tokens, attended)
        new.append(cache)
    return tuple(new), (normalized(tokens) @ model.logits)[:, 0]


def generate(
    model: Model, prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Continue prompts; return sequences ``[batch, tokens]``, the logits of every token, and the sequence lengths."""
    angles = rotary_angles((options.tokens,), options.head_dim)
    batch, slots = len(prompts), options.window if options.cache == "ring" else options.tokens
    shape = batch, slots, options.heads_kv, options.head_dim
    caches = tuple(Cache(jnp.zeros(shape), jnp.zeros(shape)) for _ in model.layers)
    run = jax.jit(step, static_argnames="window", donate_argnames="caches")
    ids = np.zeros((batch, options.tokens), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts])
    logits = np.zeros((batch, options.tokens, options.vocabulary), np.float32)
    # The longest prompt starts at step 0. Shorter prompts start later, so that all prompts end at the same step.
    starts = lengths.max() - lengths
    rows = np.arange(batch)
    for tick in range(options.tokens):
        places = np.maximum(tick - starts, 0)
        caches, found = run(model, caches, ids[rows, places], places, angles, options.window)
        logits[rows, places] = found
        follows = places + 1
        is_open = (follows >= lengths) & (follows < options.tokens) & (tick >= starts)
        ids[rows[is_open], follows[is_open]] = np.asarray(found).argmax(-1)[is_open]
    return ids, logits, options.tokens - starts


def main(arguments: Sequence[str] | None = None) -> None:
    """Generate sequences, and compare the logits with the logits of a single pass."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a sequence, including its prompt")
    parser.add_argument("--prompts", type=int, nargs="+", default=[3, 17, 9], help="tokens of each prompt")
    parser.add_argument("--window", type=int, default=16, help="tokens that a token sees, including itself")
    parser.add_argument("--cache", choices=("whole", "ring"), default="whole")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--heads-kv", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if min(options.prompts) < 1 or max(options.prompts) >= options.tokens:
        parser.error(f"--prompts must be at least 1 and less than --tokens {options.tokens}, got {options.prompts}")
    if not 1 <= options.window < options.tokens:
        parser.error(f"--window must be at least 1 and less than --tokens {options.tokens}, got {options.window}")
    rng = np.random.default_rng(options.seed)
    prompts = [rng.integers(0, options.vocabulary, count).tolist() for count in options.prompts]
    model = random_model(jax.random.key(options.seed), options)
    began = time.perf_counter()
    ids, logits, lengths = generate(model, prompts, options)
    seconds = time.perf_counter() - began
    for prompt, row, length in zip(prompts, ids, lengths, strict=True):
        print(f"{len(prompt):>4} tokens of prompt, then {' '.join(map(str, row[len(prompt) : length][:12]))} ...")
    angles = rotary_angles((options.tokens,), options.head_dim)
    expected = np.asarray(jax.jit(logits_at_once, static_argnames="window")(model, ids, angles, options.window))
    difference = max(float(np.abs(logits[i, :length] - expected[i, :length]).max()) for i, length in enumerate(lengths))
    print(f"{options.tokens} steps in {seconds:.1f} s, the compilation of one step included")
    largest = np.abs(expected).max()
    print(f"Largest difference from logits of whole sequences, which go up to {largest:.1f}: {difference:.1e}")


if __name__ == "__main__":
    main()
