"""The words and records that nodes of a job send each other, and how they become JSON."""
