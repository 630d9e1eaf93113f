"""Compile programs for TPUs without a TPU, and read the compiler's dumps.

:func:`compiled` starts a program in a subprocess, because the compiler reads its options only once per process. The
program calls :func:`serve`, which compiles a function and writes the results to a folder. The compiler writes its dumps
to the same folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

#: Names of the topology and of the device kind, by chip.
CHIPS = {
    "v4": ("v4:2x2x1", "TPU v4"),
    "v5e": ("v5e:2x2", "TPU v5 lite"),
    "v5p": ("v5p:2x2x1", "TPU v5"),
    "v6e": ("v6e:2x2", "TPU v6 lite"),
}
_HLO, _FACTS = "hlo.txt", "facts.json"


def versions() -> dict[str, str]:
    """Return the versions of ``jax``, ``jaxlib`` and the compiler package ``libtpu``, by name.

    Raises:
        importlib.metadata.PackageNotFoundError: One of these packages is not installed.
    """
    return {name: metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Output of the compiler.

    Attributes:
        hlo: Text of the optimised HLO program.
        facts: Values that the compiling process returned.
        bundles: Dumps of the final bundles of each HLO instruction, by the instruction's name.
        utilization: Dumps that count the slots of each unit of the core that these bundles use, by the instruction's
            name.
    """

    hlo: str
    facts: dict[str, Any]
    bundles: Mapping[str, str]
    utilization: Mapping[str, str]


def compiled(chip: str, module: Path, request: Mapping[str, Any]) -> Compiled:
    """Compile a function for a chip in a subprocess, and read the results.

    Args:
        chip: A key of :data:`CHIPS`.
        module: File of the program that runs in the subprocess and calls :func:`serve`.
        request: Arguments of that program. This function adds the chip and the folder for the results to them.

    Raises:
        ValueError: Compilation failed; the message includes the compiler's message.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final.*"
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": options,
        }
        arguments = [sys.executable, str(module), "--compile", json.dumps({"chip": chip, "to": folder, **request})]
        done = subprocess.run(arguments, env=environment, capture_output=True, encoding="utf-8", check=False)
        if done.returncode:
            told = [line for line in done.stderr.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
            raise ValueError(told[-1] if told else done.stderr[-2000:])
        path = Path(folder)
        return Compiled(
            (path / _HLO).read_text(encoding="utf-8"),
            json.loads((path / _FACTS).read_text(encoding="utf-8")),
            dict(_written(path, r"final_bundles")),
            dict(_written(path, r"final_hlo-static-per-bundle-utilization")),
        )


def _written(folder: Path, kind: str) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.iterdir()):
        if match := re.fullmatch(rf"\d+-(.+)-\d+-{kind}\.txt", path.name):
            yield match[1], path.read_text(encoding="utf-8", errors="backslashreplace")


def serve(request: Mapping[str, Any], function: Callable[..., Any], arguments: Any, facts: Mapping[str, Any]) -> None:
    """Compile a function for the chip ``request["chip"]``, and write the results to the folder ``request["to"]``."""
    import jax
    from jax.experimental import topologies

    topology, kind = CHIPS[request["chip"]]
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    with _as_on(kind):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
    program = lowered.compile()
    folder = Path(request["to"])
    (folder / _HLO).write_text(program.as_text(), encoding="utf-8")
    cost = program.cost_analysis() or {}
    found = {**facts, "bytes_accessed": cost.get("bytes accessed")}
    (folder / _FACTS).write_text(json.dumps(found), encoding="utf-8")


@contextmanager
def _as_on(kind: str) -> Iterator[None]:
    """Enter a context in which JAX lowers functions for this device kind. Some lowerings query the device kind."""
    import jax

    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        yield
