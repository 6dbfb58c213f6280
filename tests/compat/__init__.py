"""Checks against other releases of torch, run by a person: see `torch_versions`."""
