"""The TPU kernels and the compiler for TPUs, which needs no TPU: ``make test-tpu``."""
