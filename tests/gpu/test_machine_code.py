"""Machine code of the CUDA kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from natten_jax.native import module
from tests.support import sass

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(sass.missing() is not None, reason=str(sass.missing()))]


def _library() -> Path:
    path = module.path()
    assert path is not None
    return Path(path).with_name("libnatten_jax.so")


@pytest.mark.parametrize("names", ["sm80_fna", "sm90_", "small_ring", "small_(?!ring)"])
def test_buffers_are_released_after_loads_have_ended(names: str) -> None:
    kernels = sass.found_in_kernels(sass.early_arrivals, _library(), names)
    assert kernels
    assert {name: arrivals for name, arrivals in kernels.items() if arrivals} == {}


def test_lanes_of_ring_kernels_stay_together() -> None:
    kernels = sass.found_in_kernels(sass.divergent_collectives, _library(), "small_ring")
    assert kernels
    assert [name for name, branches in kernels.items() if branches] == []
