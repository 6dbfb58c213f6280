"""What went wrong with a worker. Imported after a failure, `root_cause` excepted.

| module | what it holds |
|---|---|
| `diagnose` | evidence to causes, the likeliest first |
| `evidence` | what is known of a failed attempt, and a cause that follows from it |
| `exception_text` | an exception as a worker wrote it down |
| `exit_code_hints` | what helps against a signal or an exit code |
| `kernel_log` | what the kernel's log says of a worker that failed |
| `oom_kills` | the record of kills by the OOM killer, and the kills between two readings of the counters |
| `root_cause` | the end of a worker; which end is the root cause; whether two failures are the same |
| `secondary_failures` | what torch writes on a rank whose peer has failed |
| `torn_names` | the name of an exception in a line that other threads wrote into |
| `traceback_blocks` | the forms in which an exception stands in a text |
| `traceback_text` | the exception at the end of a worker's stderr |
| `uncaught` | the exception that has ended a worker's main thread, as the worker tells it |
"""
