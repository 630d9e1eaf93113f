"""Shared code of ``fmha_scaling.py`` and ``fmha_report.py``: ladders of kernels, figures, and conclusions."""
