"""Processes of the operating system: start a worker, find what is left of it, stop it, guard it."""
