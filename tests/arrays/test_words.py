"""Arrays as words: the same bits there and back, and what travels as such."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax.arrays.boxes import elements_of, words_of
from tests.support.programs import output_of, run_python


@pytest.mark.parametrize("width", [1, 2, 7, 8, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8"])
def test_words_have_the_bits_of_their_elements(dtype: str, width: int) -> None:
    bits = np.random.default_rng(width).integers(0, 256, (3, 5, width * jnp.dtype(dtype).itemsize), np.uint8)
    array = jnp.asarray(bits.view(jnp.dtype(dtype)))
    words = words_of(array)
    is_paired = jnp.dtype(dtype).itemsize == 2 and width % 2 == 0
    assert words.shape == ((3, 5, width // 2) if is_paired else array.shape)
    assert words.dtype == (jnp.uint32 if is_paired else array.dtype)
    assert np.asarray(words).tobytes() == np.asarray(array).tobytes()
    assert np.asarray(elements_of(words, array.dtype)).tobytes() == np.asarray(array).tobytes()


TRAVEL = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from natten_jax import na2d
from natten_jax.cost_model import halos

halos.gains = lambda *_: True
mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
keys = jax.random.split(jax.random.key(0), 4)

def gradients(query, key, value, cotangent):
    out, vjp = jax.vjp(lambda *each: na2d(*each, 5, backend="cpu-fna"), query, key, value)
    return out, *vjp(cotangent)

for width, width_v in json.loads(sys.argv[1]):
    shapes = [(2, 16, 8, 2, each) for each in (width, width, width_v, width_v)]
    wide = [jax.random.normal(key, shape, "float32") for key, shape in zip(keys, shapes)]
    for dtype in sys.argv[2:]:
        arrays = [array.astype(dtype) for array in wide]
        split = [jax.device_put(array, NamedSharding(mesh, P(None, "x"))) for array in arrays]
        program = jax.jit(gradients).lower(*split).compile()
        moved = sum("u32[" in line and "collective-permute" in line for line in program.as_text().splitlines())
        pairs = zip(program(*split), jax.jit(gradients)(*(array.astype("float32") for array in arrays)))
        errors = [float(abs(np.float32(one) - np.float32(other)).max() / abs(other).max()) for one, other in pairs]
        print(json.dumps([width, width_v, dtype, moved > 0, max(errors)]))
"""


def test_slabs_travel_as_words() -> None:
    """All in one process: starting one takes longer than each."""
    bounds = {"bfloat16": 2e-2, "float16": 2e-3, "float32": 1e-6}
    widths = [[8, 8], [7, 14]]
    found = map(json.loads, output_of(run_python(TRAVEL, json.dumps(widths), *bounds, devices=4)).splitlines())
    seen = {(width, width_v, dtype): (in_words, error) for width, width_v, dtype, in_words, error in found}
    assert set(seen) == {(*each, dtype) for each in widths for dtype in bounds}
    for (*_, dtype), (in_words, error) in seen.items():
        assert in_words == (dtype != "float32"), seen
        assert error < bounds[dtype], seen
