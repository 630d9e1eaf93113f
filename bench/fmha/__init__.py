"""Shared code of ``fmha_scaling.py`` and ``fmha_report.py``: lists of kernels to compare, figures, and conclusions."""
