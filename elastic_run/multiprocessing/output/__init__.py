"""The workers' output: read from pipes and pseudo-terminals, written to log files and to the launcher's console.

`Wiring` opens the workers' descriptors; `WorkerOutput` reads them; `Console` owns the launcher's own stdout and stderr.
Nothing is imported here: a worker starts as soon as it is wired, and does not wait for the import of the other parts.

| module | what it holds |
|---|---|
| `activity` | when a worker has last written |
| `backlog` | the place in a log file up to which the console has shown it |
| `channel` | reads one pipe or pseudo-terminal of a worker |
| `console` | the launcher's own stdout and stderr |
| `descriptors` | opens the pipes, pseudo-terminals and log files that workers write to |
| `filters` | files with the lines of all tee'd ranks that contain a text |
| `interrupt_fold` | shows the equal KeyboardInterrupts of several workers once, after Ctrl-C |
| `last_exception` | finds the last traceback of a stream in bounded memory |
| `log_directories` | makes and removes the directories of log files |
| `logfile` | appends to a log file on a disk that may be full |
| `logs` | `LogsSpecs`, `DefaultLogsSpecs` and `LogsDest` |
| `outlet` | how a worker's bytes reach the console: unchanged, or as lines with a prefix |
| `plugin_logs` | checks the paths that a plug-in of --logs-specs returns |
| `prefix` | the text in front of a tee'd line |
| `remainder` | a process that passes on the output of background processes after the launcher's end |
| `sink` | writes to a descriptor that others share, and never blocks |
| `std` | torch's `Std` |
| `stream` | one stream of the console: many sources, one descriptor, whole lines |
| `stream_option` | reads the values of --redirects and --tee |
| `tail` | the last bytes of a stream, for the report |
| `wiring` | which descriptors each worker of a round gets for its output |
| `worker_output` | connects the workers' output to files, console and report |
"""
