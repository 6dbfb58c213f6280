"""Tests of the benchmarks: their arithmetic, and generous bounds on ratios."""
