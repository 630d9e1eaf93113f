"""Exit with status 1 if this build lacks kernels that only ``fmha_scaling.py`` needs on this device."""

from __future__ import annotations

from fmha.ladder import lacks_kernels
from lib import command

from natten_jax.plan.devices import default_device

if __name__ == "__main__":
    command.run(lambda: lacks_kernels(default_device()))
