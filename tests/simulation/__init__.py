"""Whole jobs in virtual time: the pure core of every node over a store in memory, with faults drawn from a seed."""
