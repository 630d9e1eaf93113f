"""Machine code of the CUDA kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from natten_jax.native import module
from tests.support import sass

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(sass.missing() is not None, reason=str(sass.missing()))
@pytest.mark.parametrize("names", ["sm80_fna", "sm90_", "small_ring", "small_(?!ring)"])
def test_buffers_are_released_after_loads_have_ended(names: str) -> None:
    path = module.path()
    assert path is not None
    kernels = sass.kernels_with_early_arrivals(Path(path).with_name("libnatten_jax.so"), names)
    assert kernels
    assert {name: arrivals for name, arrivals in kernels.items() if arrivals} == {}
