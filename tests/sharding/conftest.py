"""A fixture for tests with tokens sharded over devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import pytest

from natten_jax.cost_model import halos


@pytest.fixture
def set_overlap(
    without_stored_programs: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Callable[..., bool]], None]]:
    """Return a function that replaces ``halos.is_overlap_faster``, the decision to overlap halo exchange."""

    def forget() -> None:
        halos.profitable_overlap.cache_clear()
        jax.clear_caches()  # traced passes keep the previous decision

    def set_to(is_faster: Callable[..., bool]) -> None:
        monkeypatch.setattr(halos, "is_overlap_faster", is_faster)
        forget()

    yield set_to
    forget()
