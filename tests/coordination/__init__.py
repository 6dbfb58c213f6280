"""Simulated jobs: the coordinator's and the nodes' pure decisions over a network that fails."""
