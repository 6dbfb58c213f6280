"""The workers' output: read from pipes and pseudo-terminals, written to log files and to the launcher's console.

`Wiring` opens the workers' descriptors; `WorkerOutput` reads them; `console_lines` says how lines and progress bars are
shown, and `Console` when: it owns the launcher's own stdout and stderr.
Nothing is imported here: a worker starts as soon as it is wired, and does not wait for the import of the other parts.
"""
