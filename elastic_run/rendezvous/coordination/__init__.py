"""The coordination of a job of several nodes: one agent coordinates, and each node has one connection to it."""
