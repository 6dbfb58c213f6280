"""What workers write: taken through pipes and pseudo-terminals, written to log files and the launcher's console.

`Wiring` opens what the workers of a round write to; `WorkerOutput` takes what they write; `Console` owns the launcher's
own stdout and stderr. Nothing is imported here: a worker starts as soon as it is wired, and doesn't wait for the rest.
"""
