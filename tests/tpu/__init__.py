"""Compile the TPU kernels with the compiler for TPUs, which does not need a TPU: ``make test-tpu``."""
