"""A fixture of tests whose tokens are split over devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import pytest

from natten_jax.cost_model import halos


@pytest.fixture
def set_gains(
    without_stored_programs: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Callable[..., bool]], None]]:
    """A function that sets which passes gain if they compute while halos travel."""

    def forget() -> None:
        halos.overlap_that_pays.cache_clear()
        jax.clear_caches()  # a traced pass has the previous choice

    def set_to(gains: Callable[..., bool]) -> None:
        monkeypatch.setattr(halos, "gains", gains)
        forget()

    yield set_to
    forget()
