"""Check that the kernels that only the steps of ``fmha_scaling.py`` need are built; exit status 1 if not."""

from __future__ import annotations

from fmha.ladder import lacks_kernels
from lib import command

from natten_jax.plan.devices import default_device

if __name__ == "__main__":
    command.run(lambda: lacks_kernels(default_device()))
