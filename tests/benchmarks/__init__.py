"""Figures, side by side with torchrun and with a bare loop: ``make bench``, or ``python -m tests.benchmarks start tee``."""
