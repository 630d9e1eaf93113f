"""A fixture for tests with tokens sharded over devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import pytest

from natten_jax.cost_model import halos


@pytest.fixture
def set_gains(
    without_stored_programs: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Callable[..., bool]], None]]:
    """Return a function that replaces ``halos.gains``, which decides if a pass overlaps halo exchange with compute."""

    def forget() -> None:
        halos.profitable_overlap.cache_clear()
        jax.clear_caches()  # traced passes keep the previous decision

    def set_to(gains: Callable[..., bool]) -> None:
        monkeypatch.setattr(halos, "gains", gains)
        forget()

    yield set_to
    forget()
