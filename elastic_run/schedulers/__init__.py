"""Slurm, Kubernetes and other schedulers: what a launcher learns from them, and what it asks of them."""
