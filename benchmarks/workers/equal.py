"""Writes 1,000 lines to stderr, which each rank writes."""

import sys

for number in range(1000):
    sys.stderr.write(f"line {number} of every rank\n")
