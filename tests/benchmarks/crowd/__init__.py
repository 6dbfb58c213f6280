"""Thousands of nodes on one machine: programs for `tests.benchmarks.scale`, one for each part of a large job."""
