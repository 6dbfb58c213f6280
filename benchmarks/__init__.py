"""Figures beside those of torchrun and of a bare loop: ``make bench``, ``python -m benchmarks start tee``."""
