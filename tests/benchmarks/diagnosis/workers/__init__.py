"""The programs that have the planted faults."""
