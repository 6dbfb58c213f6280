"""The workers' output: read from pipes and pseudo-terminals, written to log files and to the launcher's console.

`Wiring` opens the workers' descriptors. `WorkerOutput` has a `Channel` for each of their streams. `Console` owns the
launcher's own stdout and stderr, and gives the channels turns.
Nothing is imported here: a worker starts as soon as it is wired, and does not wait for the import of the other parts.
"""
