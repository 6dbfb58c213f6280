"""Faults at random moments, reproducible by their seed."""
