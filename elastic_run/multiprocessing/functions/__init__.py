"""Functions as workers, and process groups that a program starts and watches itself: `start_processes`, `spawn`.

A process group here is the set of processes of one call; a POSIX process group is called a session's group.

| module | what it holds |
|---|---|
| `contexts` | `PContext`, torch's context of processes that were started together, and its result |
| `group_context` | a `PContext` over a process group: logs, environments, results |
| `launch` | starts a function's process by spawn, fork or forkserver |
| `pickling` | pickles functions and arguments, and refuses what can't be pickled |
| `process_group` | processes that a loop in a thread of its own watches |
| `results` | the pipe that brings a function's return value or traceback |
| `spawn` | `elastic_run.spawn`, in the manner of torch.multiprocessing.spawn |
| `start_methods` | spawn, fork or forkserver: which is chosen, and what each refuses |
| `start_processes` | `start_processes`, and its contexts of functions and commands |
| `subprocess_handlers` | a process of `SubprocessContext`, as torch shows it |
| `worker` | what happens in the process of a function worker |
"""
