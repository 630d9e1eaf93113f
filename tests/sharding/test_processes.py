"""Train in several processes with separate devices, and compare with training in a single process."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")

import jax
import numpy as np

from tests.support.programs import run_processes
from tests.support.sharded_training import train_nnx

PROCESSES, DEVICES_EACH = 2, 2

TRAINING = """
import sys
import jax, numpy as np
from jax.sharding import AxisType

address, processes, index, devices, path = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", int(devices))
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, int(processes), int(index), initialization_timeout=120)
assert jax.process_count() == int(processes) and jax.local_device_count() == int(devices)

from tests.support.sharded_training import placed_by_processes, train_nnx

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
trained = train_nnx(mesh, placed_by_processes(mesh), layers=1)
assert trained.collectives() == {"all-reduce"}, trained.collectives()
params = {name: np.asarray(array) for name, array in trained.params.items()}  # all of each is on every device
np.savez(path, losses=trained.losses, **params)
jax.distributed.shutdown()
"""


def free_address() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.slow
def test_a_batch_over_processes(tmp_path: Path) -> None:
    address = free_address()
    paths = [tmp_path / f"{index}.npz" for index in range(PROCESSES)]
    run_processes(
        TRAINING, [(address, str(PROCESSES), str(i), str(DEVICES_EACH), str(path)) for i, path in enumerate(paths)]
    )
    expected = train_nnx(layers=1)
    for path in paths:
        with np.load(path) as found:
            assert set(found) == {"losses", *expected.params}
            np.testing.assert_allclose(found["losses"], expected.losses, rtol=1e-5)
            for name, array in expected.params.items():
                np.testing.assert_allclose(found[name], jax.device_get(array), rtol=1e-4, atol=1e-5, err_msg=name)
