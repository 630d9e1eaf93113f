"""Pytest plugin that adds the interpreted TPU kernels to the families under test."""

from tests.support import interpreted_tpu

interpreted_tpu.register()
