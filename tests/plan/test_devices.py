"""Which device a process computes on by default is JAX's to say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import natten_jax
from natten_jax.plan import devices
from natten_jax.plan.devices import CPU, Device, default_device, default_jax_device, local_devices, lowering_targets

HOPPER = Device("cuda", (9, 0))


class FakeGpu(NamedTuple):
    """What this package reads of JAX's object."""

    platform: str = "gpu"
    compute_capability: str = "9.0"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process whose first platform is a GPU, and the second is the host."""
    (host, *_) = jax.local_devices(backend="cpu")
    by_platform: dict[str | None, list[Any]] = {None: [FakeGpu()], "gpu": [FakeGpu()], "cuda": [FakeGpu()]}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: by_platform.get(backend, [host]))
    monkeypatch.setattr(jax, "devices", jax.local_devices)
    cached = devices._cuda_device, devices._cuda_devices
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


def test_the_first_platform_is_the_default(gpu: None) -> None:
    assert default_jax_device() == FakeGpu()
    assert default_device() == HOPPER
    assert local_devices() == (HOPPER, CPU)
    assert [*lowering_targets().items()][:2] == [("cuda", HOPPER), ("cpu", CPU)]


@pytest.mark.parametrize("chosen", ["cpu", "device"])
def test_another_default_is_respected(gpu: None, chosen: str) -> None:
    (host, *_) = jax.local_devices(backend="cpu")
    with jax.default_device("cpu" if chosen == "cpu" else host):
        assert default_jax_device() == host
        assert default_device() == CPU
        assert local_devices() == (CPU, HOPPER)  # where arrays may lie all the same
        assert [*lowering_targets().values()][:2] == [CPU, HOPPER]
    assert default_device() == HOPPER


def test_what_is_refused_is_refused_for_the_default_device(gpu: None) -> None:
    x = jax.ShapeDtypeStruct((1, 12, 2, 12), jnp.float16)  # heads that hopper does not take on a GPU, either

    def run(x: jax.Array) -> jax.Array:
        return natten_jax.na1d(x, x, x, 3, backend="hopper-fna")

    with jax.default_device("cpu"), pytest.raises(ValueError, match=r"on cpu: it runs on .*, not on cpu"):
        jax.eval_shape(run, x)
    array = jax.ShapeDtypeStruct((1, 40, 4, 16), jnp.float32)
    with jax.default_device("cpu"):
        assert natten_jax.get_configs_for_cpu_fna(array)
    assert not natten_jax.get_configs_for_cpu_fna(array)


@pytest.mark.gpu
def test_host_kernels_run_where_a_gpu_is_the_first_platform() -> None:
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        x = jnp.ones((1, 12, 2, 8))
        assert jnp.allclose(natten_jax.na1d(x, x, x, 3, backend="cpu-fna"), 1.0)
        with pytest.raises(ValueError, match="on cpu: "):
            natten_jax.na1d(x, x, x, 3, backend="hopper-fna")
