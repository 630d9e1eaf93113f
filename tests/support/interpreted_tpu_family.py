"""A plugin of pytest: the interpreted TPU kernels are one of the families under test."""

from tests.support import interpreted_tpu

interpreted_tpu.register()
